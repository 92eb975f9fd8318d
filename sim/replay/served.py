"""Replicas that serve a trace, each with its record."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pandas as pd
import simpy
from pagecast.sim.core.check import Checker
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replay.metrics import prefix_lookup_s, request_table
from pagecast.sim.replay.recorder import Recorder
from pagecast.sim.replay.rollout import RevisionWatch, watch_revision
from pagecast.sim.replica.arrivals import ArrivalSource
from pagecast.sim.replica.observer import Observer
from pagecast.sim.replica.replica import Replica
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.traces.schema import Trace

Progress = Callable[[int], None]  # called now and then with the number of requests that have ended
_SLICE = 4096


class Served:
    """A replica named `name`, and the `recorder` of what it served.

    `revision`: the blocks of the old model's revision, where the scenario has a rollout.
    """

    def __init__(self, name: str, replica: Replica, recorder: Recorder, feed: Feed) -> None:
        self.name = name
        self.replica = replica
        self.recorder = recorder
        replica.observe(recorder)
        clock = partial(getattr, replica, "changed_ns")
        self.revision: RevisionWatch | None = watch_revision(
            self.spec.scenario, self.scheduler, feed.new_keys, clock
        )

    @property
    def spec(self) -> ReplicaSpec:
        """The kind of the replica: equal replicas have one."""
        return self.replica.spec

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the replica."""
        return self.replica.scheduler

    def requests(self) -> pd.DataFrame:
        """The requests that ended here, in the trace's order, with their latencies (`metrics.py`)."""
        rows = self.recorder.requests()
        caching = self.spec.scenario.enable_prefix_caching
        return request_table(
            rows, prefix_lookup_s(rows, self.spec.costs, caching=caching), self.recorder.reasons
        )

    def check_all_ended(self) -> None:
        """Errors: BadInput where requests wait for one another for ever, AssertionError for others left."""
        count = len(self.scheduler.requests)
        offloading = self.scheduler.offloading
        if count and offloading is not None and offloading.holders:
            raise BadInput(f"{count} requests are never served: {_why_never(self.scheduler.limits)}")
        if count:
            raise AssertionError(f"{count} requests never ended")


def alone(
    trace: Trace,
    spec: ReplicaSpec,
    arrivals: ArrivalSource,
    recorder: Recorder,
    scheduler: Scheduler,
    *,
    fast_forward: bool = True,
) -> Served:
    """A fleet of one: a replica that serves `trace` with nothing between it and its clients."""
    feed = Feed(trace, spec.limits.block_size, spec.scenario, lookahead=spec.key_lookahead)
    env = simpy.Environment()
    replica = Replica(env, spec, arrivals, feed, scheduler=scheduler, fast_forward=fast_forward)
    return Served("", replica, recorder, feed)


class Checking(Observer):
    """Proves the invariants of a scheduler after each commit, and all of them every `every` commits."""

    def __init__(self, scheduler: Scheduler, every: int) -> None:
        self._checker = Checker(scheduler, every)

    def step(self, plan: StepPlan, outcome: Outcome, start_ns: int, end_ns: int) -> None:
        """Errors: `InvariantError`."""
        self._checker.after_step()


def run(env: simpy.Environment, progress: Progress | None, ended: Callable[[], int]) -> None:
    """Runs an environment until nothing is left to happen. `ended`: how many requests have ended by now."""
    step = env.step
    try:
        while True:
            for _ in range(_SLICE):
                step()
            if progress is not None:
                progress(ended())
    except simpy.core.EmptySchedule:
        if progress is not None:
            progress(ended())


def _why_never(limits: Limits) -> str:
    """Why requests wait for one another for ever, and what to do."""
    cause = "the first in the queue needs blocks that a loaded request behind it holds"
    tenants = limits.tenants
    if tenants is not None and tenants.limited:
        return (
            f"{cause}; a ceiling in `tenants` held back requests in front while those behind them loaded; "
            "raise the ceilings, give more blocks, or leave out kv_offloading_size"
        )
    if tenants is not None and tenants.fair:
        return (
            f"{cause}; weights in `tenants` put it in front of what had loaded; "
            "give more blocks, leave out the weights, or leave out kv_offloading_size"
        )
    return f"{cause} (as in vLLM 0.24); give more blocks, or use fcfs"
