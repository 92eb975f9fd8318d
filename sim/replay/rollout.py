"""Rollout of a model revision in the middle of a trace: forced misses, and how long old blocks stay."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.costs.batch import Batch
from pagecast.sim.replica.arrivals import NS
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.scenario import Scenario

_WINDOW_S = 10.0
_NS = 1e-9


class RevisionWatch:
    """Counts the cached blocks of the old revision (a `Watcher` of the pool).

    `new_keys`: the keys of the new one. `clock`: the time of the replica. Times are exact to a step, or to a
    stretch of decode steps.
    """

    def __init__(self, at_ns: int, new_keys: Container[bytes], clock: Callable[[], int]) -> None:
        self.old_blocks = 0
        self.at_ns = at_ns
        self._new_keys = new_keys
        self._clock = clock
        self._blocks_before = 0  # old blocks before the first change since the rollout
        self._changed_ns = 0  # when `old_blocks` changed last

    @property
    def blocks_at_rollout(self) -> int:
        """Old blocks when the rollout began; as of now where it has not."""
        return self._blocks_before if self._changed_ns >= self.at_ns else self.old_blocks

    @property
    def gone_ns(self) -> int | None:
        """When the last old block was evicted, not before the rollout; None while there are some."""
        return None if self.old_blocks else max(self._changed_ns, self.at_ns)

    def stored(self, key: bytes, begin: int, end: int) -> None:
        """These blocks can be found from now on."""
        if key not in self._new_keys:
            self._change(end - begin, self._clock())

    def removed(self, key: bytes, begin: int, end: int) -> None:
        """These blocks can no longer be found."""
        if key not in self._new_keys:
            self._change(begin - end, self._clock())

    def lose_all(self, now: int) -> None:
        """The replica is gone, and all its blocks with it."""
        if self.old_blocks:
            self._change(-self.old_blocks, now)

    def _change(self, blocks: int, now: int) -> None:
        if self._changed_ns < self.at_ns <= now:
            self._blocks_before = self.old_blocks
        self._changed_ns = now
        self.old_blocks += blocks


def watch_revision(
    scenario: Scenario, scheduler: Scheduler, new_keys: Container[bytes], clock: Callable[[], int]
) -> RevisionWatch | None:
    """A watch on the pool where the scenario has a rollout; None where it has none.

    Errors: BadInput for memories whose pool tells nobody what it evicts.
    """
    if scenario.rollout_at_s is None:
        return None
    if scheduler.memory.untold:
        raise BadInput(
            f"rollout_at_s needs to hear of all content that is evicted; {scheduler.memory.untold}"
        )
    watch = RevisionWatch(round(scenario.rollout_at_s * NS), new_keys, clock)
    scheduler.memory.watch(watch)
    return watch


def rollout_figures(
    watches: Sequence[RevisionWatch], table: pd.DataFrame, before: dict[str, Any], summary: dict[str, Any]
) -> dict[str, Any]:
    """The cost of a rollout, against a replay without it (`before`). `watches`: one for each replica."""
    at_ns = watches[0].at_ns
    gone_ns = [watch.gone_ns for watch in watches if watch.gone_ns is not None]
    all_gone = len(gone_ns) == len(watches)
    arrived = table["arrival_s"] >= at_ns * _NS
    return {
        "at_s": at_ns * _NS,
        "requests_after": int(arrived.sum()),
        "forced_miss_tokens": before["reused_prefix_tokens"] - summary["reused_prefix_tokens"],
        "ttft_p99_s": summary["ttft_s"]["p99"],
        "ttft_p99_without_s": before["ttft_s"]["p99"],
        "old_blocks_at_rollout": sum(watch.blocks_at_rollout for watch in watches),
        "old_blocks_at_end": sum(watch.old_blocks for watch in watches),
        "old_blocks_gone_after_s": (max(gone_ns) - at_ns) * _NS if all_gone else None,
    }


def peak_admission(table: pd.DataFrame, spec: ReplicaSpec, most_requests: int) -> dict[str, float]:
    """Uncached prompt tokens per second: what a replica can admit at its peak, and what was asked of it.

    Asked for: the uncached tokens that arrived in the busiest ten seconds (see `busiest_window`).
    """
    return peak_figures(admission_rate(table, spec, most_requests), busiest_window(table).rate)


def peak_figures(at_peak: float, asked: float) -> dict[str, float]:
    """The summary's section `peak`: uncached prompt tokens per second, admissible and asked for."""
    return {"uncached_tokens_per_s_at_peak": at_peak, "uncached_tokens_per_s_asked": asked}


def admission_rate(table: pd.DataFrame, spec: ReplicaSpec, most_requests: int) -> float:
    """Uncached prompt tokens per second that a replica can admit at its peak.

    It can compute what the token budget leaves in a step beside as many decoding requests as ran at most
    (`most_requests`), with a mean context. `table` has the requests that it served.
    """
    admissions = table[table["admitted_s"].notna()]
    context = 0
    if len(admissions):
        context = int((admissions["input_tokens"] + admissions["output_tokens"] / 2).mean())
    limits, costs = spec.limits, spec.costs
    requests = min(most_requests, limits.max_num_batched_tokens - 1)
    room = limits.max_num_batched_tokens - requests
    step_ns = costs.device_ns(Batch(requests, requests * context, context, ((room, 0),))) + costs.host_ns(
        requests + 1
    )
    return room / (step_ns * _NS)


class Window(NamedTuple):
    """Ten seconds from `start_s` on, in which `rate` uncached prompt tokens per second arrived."""

    start_s: float
    rate: float

    @property
    def end_s(self) -> float:
        """When it is over."""
        return self.start_s + _WINDOW_S


def busiest_window(table: pd.DataFrame) -> Window:
    """The ten seconds in which most uncached tokens arrived of the requests that were admitted."""
    admissions = table[table["admitted_s"].notna()]
    if not len(admissions):
        return Window(0.0, 0.0)
    uncached = (admissions["input_tokens"] - admissions["cached_tokens"]).to_numpy(np.float64)
    windows = (admissions["arrival_s"].to_numpy(np.float64) // _WINDOW_S).astype(np.int64)
    first = int(windows.min())
    demand = np.bincount(windows - first, weights=uncached)
    busiest = int(demand.argmax())
    return Window((first + busiest) * _WINDOW_S, float(demand[busiest]) / _WINDOW_S)
