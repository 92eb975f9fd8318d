"""Long loads: a trace at one rate, repeated many times, to see whether the server keeps up.

A short load can hide overload: the batch still fills up, and the cache does not yet evict what it needs. So
the trace is repeated, each copy one period after the one before. In a server that keeps up, the number of
requests in it is the same after each period, but for noise. In one that does not, it grows: the mean of the
last third of the periods is compared with that of the second. A replay whose backlog runs away is stopped
early.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt
from pagecast.planner_app.planner.capacity.users import Load, LoadReplay, long_s, period, repeated
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replay import replay
from pagecast.sim.replay.clients import Arrivals
from pagecast.sim.replica.arrivals import NS
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import scale
from pagecast.traces.schema import Trace

TIMES = 6  # least requests, in multiples of those of a short load
LEAST_PERIODS = 6  # two in each third
LENGTHS = 12  # least duration, in lengths of a long session, unless `MOST_TIMES` is reached first
MOST_TIMES = 10  # most requests, in multiples of those of a short load
AWAY = 3.0  # a load runs away at this multiple of the most requests in the server before, or that may run
_FEW = 4.0  # least mean number of requests that growth is relative to
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lasting:
    """A repeated trace: `trace` has `copies` of it, each `period_s` seconds after the one before."""

    trace: Trace
    copies: int
    period_s: float

    @classmethod
    def of(cls, trace: Trace, rate: float, most_requests: int) -> Lasting:
        """Repeats a trace often enough for loads of about `rate` times its own; copies come in threes."""
        period_s = period(trace)
        repeats = max(TIMES * most_requests / len(trace), LENGTHS * long_s(trace) * rate / period_s)
        repeats = max(min(repeats, MOST_TIMES * most_requests / len(trace)), LEAST_PERIODS)
        copies = 3 * ceil(repeats / 3)
        return cls(repeated(trace, copies, period_s), copies, period_s)


@dataclass(frozen=True, slots=True)
class LongLoad:
    """Outcome of a long load. `served` is None where it ran away and was stopped.

    `growth`: mean number of requests in the server in the last third, divided by that in the second third,
    less 1; at least 0. `most_ended_per_s`: requests that ended per second, in the best period.
    """

    served: LoadReplay | None
    growth: float
    most_ended_per_s: float

    def holds(self, most: float) -> bool:
        """Whether it was served to its end, and the backlog grew by at most the share `most`."""
        return self.served is not None and self.growth <= most


def serve_long(work: Lasting, scenario: Scenario, load: Load, *, costs: StepCosts | None = None) -> LongLoad:
    """Serves a long load at `load.amount` times the trace's rate. Errors: BadInput."""
    trace, period_s = scale(work.trace, load.amount), work.period_s / load.amount
    watchers: list[_WatchedArrivals] = []

    def clients(trace: Trace) -> Arrivals:
        watchers.append(_WatchedArrivals(trace, round(2 * period_s * NS), scenario.max_num_seqs))
        return watchers[0]

    try:
        result = replay(trace, scenario, costs=costs, arrivals=clients, keep_steps=False, compare=False)
    except _RunsAwayError:
        return _lasted(None, watchers[0], period_s, watchers[0].periods(period_s))
    begin = watchers[0].begin_s
    start, end = begin + work.copies // 3 * period_s, begin + work.copies * period_s
    arrival = result.requests["arrival_s"].to_numpy(np.float64)
    measured = result.requests[(arrival >= start) & (arrival <= end)]
    served = LoadReplay(result, measured if len(measured) else result.requests, start, end)
    return _lasted(served, watchers[0], period_s, work.copies)


def _lasted(served: LoadReplay | None, watched: _WatchedArrivals, period_s: float, periods: int) -> LongLoad:
    edges = watched.begin_s + period_s * np.arange(periods + 1)
    arrived, endings = watched.times()
    within = [_in_system(arrived, endings, *edges[at : at + 2]) for at in range(periods)]
    third = periods // 3
    before, after = float(np.mean(within[third : 2 * third])), float(np.mean(within[2 * third :]))
    growth = max(after / max(before, _FEW) - 1, 0.0)
    counts = np.histogram(endings, edges)[0]
    return LongLoad(served, growth, float(counts.max()) / period_s)


def _in_system(arrived: Floats, endings: Floats, start: float, end: float) -> float:
    """Mean number of requests in the server between two times, in seconds."""
    return float(np.clip(np.minimum(endings, end) - np.maximum(arrived, start), 0, None).sum()) / (
        end - start
    )


class _RunsAwayError(Exception):
    """More requests are in the server than a load that it keeps up with would bring there."""


class _WatchedArrivals(Arrivals):
    """Arrivals that record when requests came and ended, and stop the replay of a load that runs away.

    In the first `after_ns` nanoseconds it only records. A load runs away when the requests in the server
    exceed `AWAY` times their peak in that time, or `AWAY` times `may_run`.
    """

    def __init__(self, trace: Trace, after_ns: int, may_run: int) -> None:
        super().__init__(trace)
        self._came = np.full(len(trace), np.inf)
        self._end_times = np.full(len(trace), np.inf)
        self._first_ns = self.next_ns
        self._after_ns = self._first_ns + after_ns
        self._inside, self._most, self._now_ns = 0, may_run, self._first_ns

    def take_arrival(self, now: int) -> tuple[int, int] | None:
        """The next arrival, noted."""
        arrival = super().take_arrival(now)
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
        """An end, noted; a retry that was not needed ends too, but never came."""
        if np.isfinite(self._came[row]):
            self._end_times[row] = now
            self._inside -= 1
        super().ended(row, now)

    @property
    def begin_s(self) -> float:
        """When the first request came."""
        return self._first_ns / NS

    def periods(self, period_s: float) -> int:
        """How many periods have passed; at least three, one for each third."""
        return max(3, int((self._now_ns - self._first_ns) / NS / period_s))

    def times(self) -> tuple[Floats, Floats]:
        """When each request that came did so, and when it ended; infinity for those that have not."""
        came = np.isfinite(self._came)
        return self._came[came] / NS, self._end_times[came] / NS
