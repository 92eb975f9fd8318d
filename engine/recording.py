"""Recorder of a run in progress; it makes a `RecordedRun` at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pagecast.engine.host_tier import HostTransfer
from pagecast.engine.sequence import Sequence
from pagecast.sim.core.events import Event, run_length
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import NEVER, State
from pagecast.sim.runs.recorded import RecordedRun, Steps
from pagecast.sim.runs.run_journal import RunJournal
from pagecast.sim.runs.transfers import RecordedTransfer
from pagecast.sim.speculation.recorded import ACCEPTED, DRAFTS
from pagecast.traces.operations import select
from pagecast.traces.schema import Trace

NS = 1_000_000_000


class Recording:
    """Implements `loop.Log`: notes every step, and every plan that only preempted.

    `speculates`: the requests do. `journal` is written as it happens. One that can't be written any more is
    left as it is: the run goes on.
    """

    def __init__(
        self, num_blocks: int, journal: RunJournal | None = None, *, speculates: bool = False
    ) -> None:
        self._num_blocks = num_blocks
        self._speculates = speculates
        self._journal = journal
        self._keys: dict[int, BlockKeys] = {}  # of live requests, for the journal
        self._rows: list[tuple[int, ...]] = []
        self._prefill: list[tuple[tuple[int, int], ...]] = []
        self._ends: list[int] = []
        self.transfers: list[RecordedTransfer] = []
        self.idle_ns: list[int] = []

    def idle(self, start_ns: int) -> None:
        self.idle_ns.append(start_ns)
        with self._writing() as journal:
            if journal is not None:
                journal.idle(start_ns)

    def step(self, plan: StepPlan, start_ns: int, planned_ns: int) -> None:
        self._rows.append(
            (
                start_ns,
                planned_ns - start_ns,
                plan.decode_n,
                plan.decode_ctx,
                plan.decode_max,
                plan.running,
                plan.waiting,
                plan.used_blocks,
            )
        )
        self._prefill.append(plan.prefill)

    def committed(self, plan: StepPlan, outcome: Outcome, end_ns: int) -> None:
        with self._writing() as journal:
            if journal is not None:
                if self._speculates:
                    journal.verified(plan, outcome)
                journal.committed(plan, self._rows[len(self._ends)][0], end_ns)
        self._ends.append(end_ns)

    def submitted(self, sequence: Sequence, at_ns: int, *, adapter: str = "", salt: str = "") -> None:
        """A request is about to be handed to the scheduler."""
        with self._writing() as journal:
            if journal is None:
                return
            request = sequence.request
            size, prompt = request.keys.block_size, sequence.ids[: request.prompt_tokens].astype(np.int64)
            keys = BlockKeys.of_ids(size, prompt)
            self._keys[request.index] = keys
            tail = prompt[len(prompt) // size * size :].tolist()
            journal.submitted(request, at_ns, keys.digests, tail, adapter=adapter, salt=salt)

    def ended(self, sequence: Sequence) -> None:
        """A request has ended."""
        request = sequence.request
        keys = self._keys.pop(request.index, None)
        with self._writing() as journal:
            if journal is not None and keys is not None:
                keys.extend(sequence.output.astype(np.int64))
                journal.ended(request, request.finished_ns, len(sequence.output), keys.digests)

    @contextmanager
    def _writing(self) -> Iterator[RunJournal | None]:
        try:
            yield self._journal
        except OSError:
            self._journal = None

    def transferred(self, transfers: Iterable[HostTransfer], now_ns: int) -> None:
        told = [transfer.recorded(now_ns) for transfer in transfers]
        self.transfers += told
        with self._writing() as journal:
            if journal is not None:
                journal.transferred(told)

    def steps(self) -> Steps:
        """The steps so far; all of them must have been committed."""
        rows = np.array(self._rows, np.int64).reshape(-1, 8).T
        start, sched, decode_n, decode_ctx, decode_max, running, waiting, used = rows
        flat = np.array([chunk for chunks in self._prefill for chunk in chunks], np.int64).reshape(-1, 2)
        counts = np.array([len(chunks) for chunks in self._prefill], np.int64)
        return Steps(
            start_ns=start,
            end_ns=np.array(self._ends, np.int64),
            sched_ns=sched,
            decode_n=decode_n,
            decode_ctx=decode_ctx,
            decode_max=decode_max,
            running=running,
            waiting=waiting,
            kv_usage=used / self._num_blocks,
            prefill_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            prefill_tokens=flat[:, 0].copy(),
            prefill_ctx=flat[:, 1].copy(),
            section=np.zeros(len(start), np.int64),
            sections=("",),
        )


def recorded_run(
    trace: Trace,
    recording: Recording,
    sequences: Mapping[int, Sequence],
    submitted_ns: Mapping[int, int],
    events: Iterable[Event],
    meta: dict[str, Any],
) -> RecordedRun:
    """The run of the rows of a trace that became `sequences`, submitted at these times. All have ended.

    Rows that were never submitted (retries that were not needed) are left out, and those after them move up.
    """
    rows = sorted(sequences)
    trace = select(trace, np.array(rows, np.int64))
    requests = pd.DataFrame(
        [_request_row(i, sequences[row], submitted_ns[row]) for i, row in enumerate(rows)]
    )
    if requests["cancelled_s"].isna().all():
        del requests["cancelled_s"]
    if (requests["reason"] == "").all():
        del requests["reason"]
    scope = [name for name in ("model", "adapter", "salt") if name in trace.requests]
    if scope:
        parts = trace.requests[scope].fillna("").astype(str)
        requests["scope"] = ["/".join(filter(None, row)) for row in parts.itertuples(index=False)]
    inputs = trace.requests.copy()
    inputs["arrival_s"] = requests["arrival_s"]
    if any(sequence.drafts for sequence in sequences.values()):
        inputs[DRAFTS] = [_counts(sequences[row].drafts) for row in rows]
        inputs[ACCEPTED] = [_counts(sequences[row].accepted) for row in rows]
    if recording.idle_ns:
        meta = {**meta, "idle_plans_s": [time / NS for time in recording.idle_ns]}
    names = {str(row): str(i) for i, row in enumerate(rows)}
    lines = [event_line(event._replace(request=names.get(event.request, event.request))) for event in events]
    run = RecordedRun(trace.name, Path(), meta, recording.steps(), requests, inputs, trace.spans, lines)
    return replace(run, transfers=tuple(recording.transfers))


def _request_row(index: int, sequence: Sequence, submitted_ns: int) -> dict[str, Any]:
    request = sequence.request
    ended = request.state is State.FINISHED
    cancelled = request.state is State.CANCELLED
    return {
        "index": index,
        "arrival_s": request.arrival_ns / NS,
        "submitted_s": submitted_ns / NS,
        "input_tokens": request.prompt_tokens,
        "output_tokens": sequence.max_output,
        "first_token_s": None if request.first_token_ns == NEVER else request.first_token_ns / NS,
        "finish_s": request.finished_ns / NS if ended else None,
        "cached_tokens": max(request.cached_tokens, 0),
        "tokens_out": len(sequence.output),
        "cancelled_s": request.finished_ns / NS if cancelled else None,
        "reason": sequence.reason,
        "output_ids": " ".join(map(str, sequence.output.tolist())),
    }


def _counts(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def event_line(event: Event) -> dict[str, Any]:
    """An event as a line of `events.jsonl.gz`."""
    line = {"step": event.step, "kind": event.kind.value, "request": event.request}
    if event.blocks:
        line["blocks"] = run_length(event.blocks)
    if event.detail:
        line["detail"] = event.detail
    return line
