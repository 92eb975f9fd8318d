"""Replays that stop when the outcome of their load is decided.

A watch follows the requests of the settled time. It stops the replay when a term of the SLO is lost whatever
else comes (`tallies.py`), and when all of these requests have ended: what follows them is never looked at. So
a replay that holds has the same figures as one to the end, and one that fails fails in both.

    rate    the settled time is known beforehand
    users   it begins when as many sessions have ended as there are users, and ends with the start of the last
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import pandas as pd
from pagecast.planner_app.planner.capacity.tallies import Tally
from pagecast.sim.core.request import Request
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replay import Result
from pagecast.sim.replay.clients import Arrivals, ClosedLoop
from pagecast.sim.replay.recorder import Recorder
from pagecast.sim.replay.rejections import is_for_load
from pagecast.sim.replay.room import room_of, watch_content
from pagecast.sim.replay.served import alone, run
from pagecast.sim.replica.arrivals import NEVER_NS
from pagecast.sim.replica.observer import Observer
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.replica.workload import TraceWorkload
from pagecast.sim.scenario import Scenario
from pagecast.traces.chains import Chains
from pagecast.traces.schema import Trace

_NS = 1e-9


class Enough(Exception):
    """The replay need not go on."""


class Watch(Observer):
    """Watch over the requests that count. `lost` has the numbers of the terms that were.

    `cut`: the replay was, for any reason. Where not `stops`, it only counts.
    """

    stops = True

    def __init__(self, rows: int, tallies: Sequence[Tally]) -> None:
        self.arrivals: Arrivals | None = None
        self.requests_so_far: Callable[[], pd.DataFrame] = pd.DataFrame  # those that have ended
        self.lost: tuple[int, ...] = ()
        self.lost_ns = NEVER_NS  # when the first of them was
        self.cut = False
        self.measured = 0  # requests that came in the settled time
        self._open: set[int] = set()  # those of them that have not ended
        self._to_come = rows
        self._tallies = tallies

    def arrived(self, row: int, arrival_ns: int) -> None:
        """A request has come."""
        self._to_come -= 1
        if self._counts(row, arrival_ns):
            self.measured += 1
            self._open.add(row)

    def ended(self, request: Request, now: int) -> None:
        """A request has ended. Raises `Enough` where nothing is left to find out."""
        self._note_end(request, now)
        row = request.index
        if row in self._open:
            self._open.remove(row)
            for tally in self._tallies:
                tally.add(request)
            most = self.measured + (0 if self._closed(now) else self._to_come)
            if any(tally.lost(most) for tally in self._tallies):
                self.lost = tuple(at for at, tally in enumerate(self._tallies) if tally.lost(most))
                self.lost_ns = min(self.lost_ns, now)
        if not self.stops:
            return
        if self.lost or (not self._open and self.measured and self._closed(now)):
            self.cut = True
            raise Enough

    def _counts(self, row: int, arrival_ns: int) -> bool:
        """Whether a request comes in the settled time."""
        raise NotImplementedError

    def _closed(self, now: int) -> bool:
        """Whether no request that counts comes any more."""
        raise NotImplementedError

    def _note_end(self, request: Request, now: int) -> None:
        return

    def _next_ns(self) -> int:
        return NEVER_NS if self.arrivals is None else self.arrivals.next_ns


class TimedWatch(Watch):
    """The settled time is `from_s` to `to_s`; where this is infinite, nothing closes it."""

    def __init__(self, rows: int, tallies: Sequence[Tally], from_s: float, to_s: float) -> None:
        super().__init__(rows, tallies)
        self._from_s, self._to_s = from_s, to_s

    def _counts(self, row: int, arrival_ns: int) -> bool:
        return self._from_s <= arrival_ns * _NS <= self._to_s

    def _closed(self, now: int) -> bool:
        return now * _NS > self._to_s and self._next_ns() * _NS > self._to_s


class UsersWatch(Watch):
    """The settled time of a closed loop; after a rejection for the load, or with retries, it never stops."""

    def __init__(self, rows: int, tallies: Sequence[Tally], chains: Chains, users: int) -> None:
        super().__init__(rows, tallies)
        self._chain: list[int] = chains.chain.tolist()
        self._left: list[int] = np.bincount(chains.chain).tolist()
        self._to_begin: set[int] = set(chains.first.tolist())
        self._to_end = min(users, len(chains.first))  # sessions, before the settled time
        self._from_ns = self._taken_ns = -1
        self.unsure = False

    @property
    def settled_s(self) -> tuple[float, float]:
        """The settled time in seconds; endless where the last session has not begun."""
        return self._from_ns * _NS, inf if self._taken_ns < 0 else self._taken_ns * _NS

    def arrived(self, row: int, arrival_ns: int) -> None:
        # The first turn of the last session ends the settled time, and is a part of it.
        super().arrived(row, arrival_ns)
        self._to_begin.discard(row)
        if not self._to_begin and self._taken_ns < 0:
            self._taken_ns = arrival_ns
            self.unsure |= self._from_ns < 0

    def ended(self, request: Request, now: int) -> None:
        # Users who are turned away may use up the trace, and the load is replayed with more of it.
        self.unsure |= is_for_load(request)
        if not self.unsure:
            super().ended(request, now)

    def _note_end(self, request: Request, now: int) -> None:
        chain = self._chain[request.index]
        self._left[chain] -= 1
        if not self._left[chain]:
            self._to_end -= 1
            if not self._to_end and self._from_ns < 0:
                self._from_ns = request.finished_ns

    def _counts(self, row: int, arrival_ns: int) -> bool:
        return 0 <= self._from_ns <= arrival_ns and (self._taken_ns < 0 or arrival_ns <= self._taken_ns)

    def _closed(self, now: int) -> bool:
        return 0 <= self._taken_ns < min(now, self._next_ns())


class WatchedArrivals(Arrivals):
    """Arrivals that tell a watch."""

    def __init__(self, trace: Trace, watch: Watch) -> None:
        super().__init__(trace)
        self._attach(watch)

    def _attach(self, watch: Watch) -> None:
        self.watch = watch
        watch.arrivals = self

    def take_arrival(self, now: int) -> tuple[int, int] | None:
        """The next arrival, told."""
        arrival = super().take_arrival(now)
        if arrival is not None:
            self.watch.arrived(*arrival)
        return arrival


class WatchedUsers(WatchedArrivals, ClosedLoop):
    """Users of a closed loop whose requests are told to a watch."""

    def __init__(self, trace: Trace, users: int, think_s: float | None, seed: int, watch: Watch) -> None:
        ClosedLoop.__init__(self, trace, users, think_s, seed)
        self._attach(watch)


def replay_watched(
    trace: Trace,
    scenario: Scenario,
    clients: Callable[[Trace], Arrivals],
    watch: Watch | None,
    *,
    costs: StepCosts | None = None,
    keep_steps: bool = False,
    room: bool = False,
) -> Result:
    """A replay until `watch` has seen enough. Its summary has only what the replica counted.

    `room`: find which limits are not met until then (`Result.room`).

    Errors: BadInput, as for `replay`.
    """
    spec = ReplicaSpec.of(scenario, TraceWorkload(trace), costs)
    scheduler = spec.scheduler()
    recorder = Recorder(keep_steps=keep_steps)
    content = watch_content(spec, scheduler) if room else None
    served = alone(trace, spec, clients(trace), recorder, scheduler)
    if watch is not None:
        watch.requests_so_far = served.requests
        served.replica.observe(watch)
    try:
        run(served.replica.env, None, lambda: 0)
        served.check_all_ended()
    except Enough:
        pass
    counted = {
        "evicted_blocks": scheduler.memory.evicted_blocks,
        "failed_allocations": scheduler.failed_allocations,
        "preemptions": scheduler.preemptions,
    }
    return Result(
        trace.name,
        scenario,
        counted,
        served.requests(),
        recorder.steps(),
        (),
        pool_blocks=spec.limits.num_blocks,
        room=room_of(spec, scheduler, recorder, content),
    )
