"""Test of a request rate that lasts: the trace at that rate, repeated many times.

A short load can hide that it is too much: a batch that is not full yet takes in the excess, and caches that
still hold what they need make it cheaper than it stays. So the trace is played over and over, each copy one
period after the one before. In a server that keeps up, the number of requests is the same after each period,
but for noise; in one that does not, it grows. The second third of the periods is compared with the last. A
load that runs away is given up, for it takes longest and has nothing more to tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt
from pagecast.planner_app.planner.capacity.users import Load, LoadReplay, long_s, period, repeated
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replay import replay
from pagecast.sim.replay.clients import NS, Arrivals
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import scale
from pagecast.traces.schema import Trace

TIMES = 6  # as many requests as a short load may have, at least
LEAST_PERIODS = 6  # two a third
LENGTHS = 12  # of long sessions, where ten short loads allow that
MOST_TIMES = 10
AWAY = 3.0  # times the most requests in the server before, or that may run: a load that runs away
_FEW = 4.0  # requests: growth of fewer is no growth
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lasting:
    """A trace over and over: `copies` of it, `period_s` after each other at its own rate."""

    trace: Trace
    copies: int
    period_s: float

    @classmethod
    def of(cls, trace: Trace, rate: float, most_requests: int) -> Lasting:
        """A load long enough at about `rate` times the trace's, in thirds of whole periods."""
        period_s = period(trace)
        repeats = max(TIMES * most_requests / len(trace), LENGTHS * long_s(trace) * rate / period_s)
        repeats = max(min(repeats, MOST_TIMES * most_requests / len(trace)), LEAST_PERIODS)
        copies = 3 * ceil(repeats / 3)
        return cls(repeated(trace, copies, period_s), copies, period_s)


@dataclass(frozen=True, slots=True)
class LongLoad:
    """What a long load came to: `served` is None where it was given up.

    `growth`: mean number in the server in the last third, divided by those in the second, less 1; at least 0.
    `most_ended_per_s`: requests that ended per second in the best period.
    """

    served: LoadReplay | None
    growth: float
    most_ended_per_s: float

    def holds(self, most: float) -> bool:
        """Whether it came to its end, and the server had no more than `most` more in it."""
        return self.served is not None and self.growth <= most


def serve_long(work: Lasting, scenario: Scenario, load: Load, *, costs: StepCosts | None = None) -> LongLoad:
    """Serves a long load at `load.amount` times the trace's rate. Errors: BadInput."""
    trace, period_s = scale(work.trace, load.amount), work.period_s / load.amount
    seen: list[_WatchedArrivals] = []

    def clients(trace: Trace) -> Arrivals:
        seen.append(_WatchedArrivals(trace, round(2 * period_s * NS), scenario.max_num_seqs))
        return seen[0]

    try:
        result = replay(trace, scenario, costs=costs, arrivals=clients, keep_steps=False)
    except _RunsAwayError:
        return _lasted(None, seen[0], period_s, seen[0].periods(period_s))
    begin = seen[0].begin_s
    start, end = begin + work.copies // 3 * period_s, begin + work.copies * period_s
    arrival = result.requests["arrival_s"].to_numpy(np.float64)
    measured = result.requests[(arrival >= start) & (arrival <= end)]
    served = LoadReplay(result, measured if len(measured) else result.requests, start, end)
    return _lasted(served, seen[0], period_s, work.copies)


def _lasted(served: LoadReplay | None, watched: _WatchedArrivals, period_s: float, periods: int) -> LongLoad:
    edges = watched.begin_s + period_s * np.arange(periods + 1)
    arrived, ended = watched.times()
    within = [_in_system(arrived, ended, *edges[at : at + 2]) for at in range(periods)]
    third = periods // 3
    before, after = float(np.mean(within[third : 2 * third])), float(np.mean(within[2 * third :]))
    growth = max(after / max(before, _FEW) - 1, 0.0)
    counts = np.histogram(ended, edges)[0]
    return LongLoad(served, growth, float(counts.max()) / period_s)


def _in_system(arrived: Floats, ended: Floats, start: float, end: float) -> float:
    """How many requests are in the server between two moments, in the mean."""
    return float(np.clip(np.minimum(ended, end) - np.maximum(arrived, start), 0, None).sum()) / (end - start)


class _RunsAwayError(Exception):
    """More requests are in the server than a load that it keeps up with would bring there."""


class _WatchedArrivals(Arrivals):
    """Arrivals that note when requests came and ended, and end the replay of a load that runs away.

    From `after_ns` on that is `AWAY` times the most that were in the server till then, or that may run.
    """

    def __init__(self, trace: Trace, after_ns: int, may_run: int) -> None:
        super().__init__(trace)
        self._came = np.full(len(trace), np.inf)
        self._gone = np.full(len(trace), np.inf)
        self._first_ns = self.next_ns
        self._after_ns = self._first_ns + after_ns
        self._inside, self._most, self._now_ns = 0, may_run, self._first_ns

    def due(self, now: int) -> tuple[int, int] | None:
        """The next arrival, noted."""
        arrival = super().due(now)
        if arrival is not None:
            row, self._now_ns = arrival
            self._came[row] = self._now_ns
            self._inside += 1
            if self._now_ns < self._after_ns:
                self._most = max(self._most, self._inside)
            elif self._inside > AWAY * self._most:
                raise _RunsAwayError
        return arrival

    def ended(self, row: int, now: int) -> None:
        """An end, noted."""
        self._gone[row] = now
        self._inside -= 1
        super().ended(row, now)

    @property
    def begin_s(self) -> float:
        """When the first request came."""
        return self._first_ns / NS

    def periods(self, period_s: float) -> int:
        """How many periods have passed; three at least, to be told apart."""
        return max(3, int((self._now_ns - self._first_ns) / NS / period_s))

    def times(self) -> tuple[Floats, Floats]:
        """When each request that came did so, and when it ended; infinity for those that have not."""
        came = np.isfinite(self._came)
        return self._came[came] / NS, self._gone[came] / NS
