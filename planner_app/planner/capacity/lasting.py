"""Long loads: a trace at one rate, repeated many times, to see whether the server keeps up.

A short load can hide overload: the batch still fills up, and the cache does not yet evict what it needs. So
the trace is repeated, each copy one period after the one before. In a server that keeps up, the number of
requests in it comes to rest: it grows ever less from period to period. In one that does not, it goes on
growing. So the growth over the last three spans of equal periods is carried on, as a geometric series, to
where it would come to rest. A replay whose backlog runs away, or that breaks the SLO, is stopped early.

A load at rest is over: every further period would be like the last ones. So it ends when each of its settled
periods keeps the SLO by more than they differ, and with the growth that may come yet. Only a load whose
outcome is in doubt lasts to its end. `thorough` loads last twice as long, and to their end wherever they
hold: what the shorter ones are compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

import numpy as np
import pandas as pd
from pagecast.planner_app.planner.capacity.users import Load, LoadReplay, Tallies, long_s, period, repeated
from pagecast.planner_app.planner.capacity.watched import (
    Enough,
    TimedWatch,
    WatchedArrivals,
    replay_watched,
)
from pagecast.sim.core.request import Request
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replica.arrivals import NS
from pagecast.sim.scenario import Scenario
from pagecast.traces.arrays import Floats
from pagecast.traces.operations import scale
from pagecast.traces.schema import Trace

TIMES = 3  # least requests, in multiples of those of a short load
THOROUGH = 2  # times as many in a thorough load, and so times as long
LEAST_PERIODS = 6
LENGTHS = 12  # least duration, in lengths of a long session, unless `MOST_TIMES` is reached first
MOST_TIMES = 10  # most requests, in multiples of those of a short load
AWAY = 3.0  # a load runs away at this multiple of the most requests in the server before, or that may run
_FEW = 4.0  # least mean number of requests that growth is relative to
_AT_REST = 0.02  # most change of the mean number of requests in the server from period to period, at rest
# A series of growths that slow down less is cut there: a trend is not known any better. From span to span of
# a thorough load, and from one to the next of those that are half as long.
_SLOWEST = 0.8
_SLOWEST_OF_SHORT = _SLOWEST ** (1 / THOROUGH)
_SECOND = 1e-9
_REST_PERIODS = 4  # least periods of a load at rest
_LOOKS = 10  # rest is looked for after each period, beyond so many after each tenth more
Worst = Callable[[pd.DataFrame], float]  # the worst term of requests, in multiples of its bound


@dataclass(frozen=True, slots=True)
class Lasting:
    """A repeated trace: `trace` has `copies` of it, each `period_s` seconds after the one before."""

    trace: Trace
    copies: int
    period_s: float
    thorough: bool = False

    @classmethod
    def of(cls, trace: Trace, rate: float, most_requests: int, *, thorough: bool = False) -> Lasting:
        """Repeats a trace often enough for loads of about `rate` times its own."""
        period_s, times = period(trace), TIMES * (THOROUGH if thorough else 1)
        repeats = max(times * most_requests / len(trace), LENGTHS * long_s(trace) * rate / period_s)
        copies = ceil(max(min(repeats, MOST_TIMES * most_requests / len(trace)), LEAST_PERIODS))
        return cls(repeated(trace, copies, period_s), copies, period_s, thorough)


@dataclass(frozen=True, slots=True)
class LongLoad:
    """Outcome of a long load. `served` is None where it was stopped: it ran away, or broke the SLO (`lost`).

    `growth`: by how much the mean number of requests in the server would still grow, as a share; at least 0.
    `most_ended_per_s`: requests that ended per second, in the best period until a term was lost. `lost` has
    the requests until then.
    """

    served: LoadReplay | None
    growth: float
    most_ended_per_s: float
    lost: LoadReplay | None = None

    def holds(self, most: float) -> bool:
        """Whether it was served to its end, and the backlog grows by at most the share `most`."""
        return self.served is not None and self.growth <= most


def serve_long(
    work: Lasting,
    scenario: Scenario,
    load: Load,
    *,
    costs: StepCosts | None = None,
    tallies: Tallies | None = None,
    worst: Worst | None = None,
    stops: bool = True,
    room: bool = False,
) -> LongLoad:
    """Serves a long load at `load.amount` times the trace's rate. Errors: BadInput.

    With `tallies` it stops as soon as a term of theirs is lost, or all is measured, unless `stops` is False;
    with `worst` also where it is at rest. `room`: find which limits are not met until then.
    """
    trace, period_s = scale(work.trace, load.amount), work.period_s / load.amount
    watch = _BacklogWatch(trace, tallies, work, period_s, scenario.max_num_seqs, worst)
    watch.stops = stops and tallies is not None
    clients = partial(WatchedArrivals, watch=watch)
    result = replay_watched(trace, scenario, clients, watch, costs=costs, room=room)
    arrival = result.requests["arrival_s"].to_numpy(np.float64)
    measured = result.requests[(arrival >= watch.from_s) & (arrival <= watch.to_s)]
    served = LoadReplay(
        result,
        measured if len(measured) else result.requests,
        watch.from_s,
        watch.to_s,
        lost=watch.lost if watch.stops else (),
    )
    if watch.away or (watch.lost and watch.stops):
        return _lasted(
            None, watch, period_s, watch.periods(period_s, watch.now_s), served if watch.lost else None
        )
    return _lasted(served, watch, period_s, watch.rested or work.copies)


def _lasted(
    served: LoadReplay | None,
    watched: _BacklogWatch,
    period_s: float,
    periods: int,
    lost: LoadReplay | None = None,
) -> LongLoad:
    edges = watched.begin_s + period_s * np.arange(periods + 1, dtype=np.float64)
    growth = growth_to_come(watched.within(edges), watched.slowest)
    endings = watched.times()[1]
    if watched.lost:  # what came after that changes no guess, whether it was replayed or not
        lost_s = watched.lost_ns / NS
        edges, endings = edges[: watched.periods(period_s, lost_s) + 1], endings[endings < lost_s]
    return LongLoad(served, growth, float(np.histogram(endings, edges)[0].max()) / period_s, lost)


def growth_to_come(within: list[float], slowest: float = _SLOWEST) -> float:
    """By how much a backlog still grows after its last periods, as a share of it; 0 where it shrinks.

    `within`: the mean number of requests in the server in each period, at least three. The last half of the
    periods is taken in three spans.
    """
    span = max(len(within) // 6, 1)
    first, second, third = (float(np.mean(within[len(within) - (3 - at) * span :][:span])) for at in range(3))
    before, last = second - first, third - second
    if last <= 0 or third <= first:
        return 0.0
    slowing = min(last / before, slowest) if before > 0 else slowest
    return last * slowing / (1 - slowing) / max(third, _FEW)


def _in_system(arrived: Floats, endings: Floats, start: float, end: float) -> float:
    """Mean number of requests in the server between two times, in seconds."""
    return float(np.clip(np.minimum(endings, end) - np.maximum(arrived, start), 0, None).sum()) / (
        end - start
    )


class _BacklogWatch(TimedWatch):
    """Watch that records when requests came and ended, and stops the replay of a load that runs away.

    In the first two periods it only records. A load runs away (`away`) when the requests in the server exceed
    `AWAY` times their peak in that time, or `AWAY` times `may_run`. Without tallies nothing else stops it.
    """

    def __init__(
        self,
        trace: Trace,
        tallies: Tallies | None,
        work: Lasting,
        period_s: float,
        may_run: int,
        worst: Worst | None,
    ) -> None:
        begin_s = float(trace.seconds("arrival_s")[trace.integers("after") < 0].min())
        self.begin_s = round(begin_s * NS) / NS
        self.from_s = self.begin_s + work.copies // 3 * period_s
        self.to_s = self.begin_s + work.copies * period_s
        super().__init__(len(trace), tallies() if tallies is not None else (), self.from_s, self.to_s)
        self.away = False
        self.rested = 0  # periods until a load is at rest
        self._period_s, self._worst = period_s, None if work.thorough else worst
        self.slowest = _SLOWEST if work.thorough else _SLOWEST_OF_SHORT
        self._edge = _REST_PERIODS  # periods until rest is looked for next
        self._values: dict[int, float] = {}  # worst term by period, of those whose requests have ended
        self._came_ns: dict[int, int] = {}
        self._ended_ns: dict[int, int] = {}
        self._after_ns = round((self.begin_s + 2 * period_s) * NS)
        self._most, self._now_ns = may_run, round(self.begin_s * NS)

    def arrived(self, row: int, arrival_ns: int) -> None:
        # Raises `Enough` where the backlog has run away.
        super().arrived(row, arrival_ns)
        self._came_ns[row] = self._now_ns = arrival_ns
        inside = len(self._came_ns) - len(self._ended_ns)
        if arrival_ns < self._after_ns:
            self._most = max(self._most, inside)
        elif inside > AWAY * self._most:
            self.away = True
            raise Enough
        if (
            self._worst is not None
            and not self.lost
            and arrival_ns * _SECOND >= self.begin_s + self._edge * self._period_s
        ):
            periods = self._edge
            self._edge += max(periods // _LOOKS, 1)
            self._look_for_rest(periods, self._worst)

    def _look_for_rest(self, periods: int, worst: Worst) -> None:
        """Ends the load where its settled periods were alike, and all that came in them has ended.

        One more such period, as far from them as they are from each other, must keep the SLO as well.
        """
        edges = self.begin_s + self._period_s * np.arange(periods + 1, dtype=np.float64)
        before, last = self.within(edges[-3:])
        grows = abs(last - before) / max(last, _FEW)
        first = max(periods // 3, 1)
        settled = edges[first:-1]
        came, endings = self.times()
        if grows > _AT_REST or (endings[(came >= settled[0]) & (came <= settled[-1])] == np.inf).any():
            return
        self._judge_periods(edges, first, worst)
        values = [value for at, value in self._values.items() if at >= first]
        growth = grows * self.slowest / (1 - self.slowest)
        if values and (2 * max(values) - min(values)) * (1 + growth) ** 2 < 1:
            self.rested, self.from_s, self.to_s = periods, float(settled[0]), float(settled[-1])
            self.cut = True
            raise Enough

    def _judge_periods(self, edges: Floats, first: int, worst: Worst) -> None:
        """Judges the periods between `edges` from the `first` to the last but one, which have ended."""
        new = [at for at in range(first, len(edges) - 2) if at not in self._values]
        requests = self.requests_so_far()
        period = np.searchsorted(edges, requests["arrival_s"].to_numpy(np.float64), "right") - 1
        order = np.argsort(period, kind="stable")
        begins = np.searchsorted(period[order], np.arange(len(edges)))
        for at in new:
            rows = order[begins[at] : begins[at + 1]]
            if len(rows):
                self._values[at] = worst(requests.iloc[rows])

    def ended(self, request: Request, now: int) -> None:
        self._ended_ns[request.index] = now
        super().ended(request, now)

    def periods(self, period_s: float, end_s: float) -> int:
        """How many periods have passed by a time; at least three."""
        return max(3, int((end_s - self.begin_s) / period_s))

    @property
    def now_s(self) -> float:
        """When the last request came."""
        return self._now_ns / NS

    def within(self, edges: Floats) -> list[float]:
        """Mean number of requests in the server between each two of the times."""
        came, endings = self.times()
        return [_in_system(came, endings, *edges[at : at + 2]) for at in range(len(edges) - 1)]

    def times(self) -> tuple[Floats, Floats]:
        """When each request that came did so, and when it ended; infinity for those that have not."""
        ends = self._ended_ns
        came = np.array(list(self._came_ns.values()), dtype=np.float64) / NS
        return came, np.array([ends.get(row, np.inf) for row in self._came_ns], dtype=np.float64) / NS
