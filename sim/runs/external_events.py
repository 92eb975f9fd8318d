"""External events of a recorded run: cancellations, early ends, and all else that no plan could know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from pagecast.sim.core.plan import DONE, Outcome
from pagecast.sim.runs.recorded import RecordedRun, to_ns


class ExternalEventKind(IntEnum):
    """The kinds of events that reach an engine between its steps."""

    SUBMITTED = 0
    CANCELLED = 1
    PLANNED_NOTHING = 2  # a plan that computed nothing: it preempted requests, or began to load blocks
    TRANSFERRED = 3  # the engine learned that a transfer to or from the host tier had ended
    GIVEN_BACK = 4  # another engine has read the blocks of a prompt, which were held for it
    RESERVED = 5  # blocks were taken for a prompt that another engine has computed
    LANDED = 6  # they were written


HANDOFFS = {
    "given_back_s": ExternalEventKind.GIVEN_BACK,
    "reserved_s": ExternalEventKind.RESERVED,
    "landed_s": ExternalEventKind.LANDED,
}
"""Columns of `requests.csv.gz` in runs of engines that hand prompts over."""


class Outside(NamedTuple):
    """Something that happened at a time, to the request of a row; for a plan, its row in `run.idle`; for a
    transfer, its place in the order of all of them."""

    time_ns: int
    kind: ExternalEventKind
    row: int


@dataclass(frozen=True)
class Endings:
    """Requests that ended with a step's commit although the plan could not know: by its end."""

    stopped: dict[int, list[str]]
    failed: dict[int, list[tuple[str, str]]]
    reasons: dict[int, str]

    @classmethod
    def of(cls, run: RecordedRun) -> Endings:
        """Rows with fewer tokens than were asked for, and rows that failed, of a recorded run."""
        endings = cls({}, {}, {})
        table = run.requests
        finish = table["finish_s"].to_numpy(np.float64)
        short = table["tokens_out"].to_numpy() < table["output_tokens"].to_numpy()
        for row in np.flatnonzero(short & ~np.isnan(finish)).tolist():
            endings.stopped.setdefault(int(to_ns(finish[row])), []).append(str(row))
        if "reason" in table and "cancelled_s" in table:
            ends = set(run.steps.end_ns.tolist())
            for row, (time_s, reason) in enumerate(zip(table["cancelled_s"], table["reason"], strict=True)):
                if reason and not np.isnan(time_s):
                    endings.reasons[row] = reason
                    time_ns = int(to_ns(time_s))
                    if time_ns in ends:
                        endings.failed.setdefault(time_ns, []).append((str(row), reason))
        return endings

    def at(self, end_ns: int) -> Outcome:
        """The outcome of the step that ended at this time."""
        stopped, failed = self.stopped.get(end_ns), self.failed.get(end_ns)
        if not stopped and not failed:
            return DONE
        return Outcome(tuple(stopped or ()), tuple(failed or ()))


def outside(run: RecordedRun) -> Iterator[Outside]:
    """The external events of a recorded run, in no particular order."""
    for row, time_ns in enumerate(run.submitted_ns.tolist()):
        yield Outside(time_ns, ExternalEventKind.SUBMITTED, row)
    if "cancelled_s" in run.requests:
        ends = set(run.steps.end_ns.tolist())
        for row, time_s in enumerate(run.requests["cancelled_s"].to_numpy(np.float64).tolist()):
            if not np.isnan(time_s) and int(to_ns(time_s)) not in ends:
                yield Outside(int(to_ns(time_s)), ExternalEventKind.CANCELLED, row)
    for name, kind in HANDOFFS.items():
        if name in run.requests:
            times = run.requests[name].to_numpy(np.float64)
            for row in np.flatnonzero(~np.isnan(times)).tolist():
                yield Outside(int(to_ns(times[row])), kind, row)
    if run.idle is not None:
        for row, time_ns in enumerate(run.idle.start_ns.tolist()):
            yield Outside(time_ns, ExternalEventKind.PLANNED_NOTHING, row)
    for row, transfer in enumerate(run.transfers):
        yield Outside(transfer.told_ns, ExternalEventKind.TRANSFERRED, row)
    for time_s in run.meta.get("idle_plans_s", ()):
        yield Outside(int(to_ns(time_s)), ExternalEventKind.PLANNED_NOTHING, -1)
