"""Loads on a server: N users who wait for their answers, or a trace at a multiple of its rate.

A closed loop hands the trace's sessions (or single requests) to users in order, each to the next free user. A
scaled trace has its arrival times divided. A trace that is too short is repeated; each copy has texts and
sessions of its own. Only requests that arrive in the settled time are measured:

    closed loop   from the time when as many sessions have ended as there are users, to the start of the last
                  one. Requests that were rejected for the load end none
    scaled rate   from a tenth of the time, or after the length of a long session if that is later, to the
                  start of the last session

Users who are rejected back off (`ClosedLoop`), and go on with other requests. Where rejections use up so many
sessions that the rest are too few to measure, the load is replayed with more. One that does not settle with
eight times as many is measured as a whole.

A brief load has fewer requests, for comparisons of servers by loads that are equally brief. The highest rate
is found by long loads (`lasting.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np
import pandas as pd
from pagecast.planner_app.planner.capacity.options import LoadKind
from pagecast.planner_app.planner.capacity.tallies import Tally
from pagecast.planner_app.planner.capacity.watched import (
    TimedWatch,
    UsersWatch,
    WatchedArrivals,
    WatchedUsers,
    replay_watched,
)
from pagecast.planner_app.planner.served import rejected_for_load
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replay import Result
from pagecast.sim.replay.clients import Arrivals, ClosedLoop
from pagecast.sim.scenario import Scenario
from pagecast.traces.arrays import Flags, Floats
from pagecast.traces.chains import Chains
from pagecast.traces.operations import mix, scale, select
from pagecast.traces.schema import Trace, nominal_arrival_s

LEAST_TURNS = 3  # sessions for each user of a closed loop, the first of which is warm-up
_LONGER = (1, 2, 4, 8)  # times as many sessions, tried in turn where rejections use them up
WARM_UP = 0.1  # of a scaled trace's time
LEAST_LENGTHS = 5  # of long sessions, that a scaled trace lasts
ENOUGH_LENGTHS = 12  # where `most_requests` allows: served sessions last longer than their own pauses
_LONG = 90  # percentile of sessions' lengths that counts as long
_TOO_MANY = 10  # times `most_requests`, beyond which a scaled trace is not made longer
BRIEF_TURNS = 2  # sessions for each user of a brief closed loop
BRIEF_LENGTHS = 3  # of long sessions, that a brief scaled trace lasts
_BRIEF_PART, _BRIEF_LEAST = 4, 500  # a brief load has a part of `most_requests`, of many
Tallies = Callable[[], Sequence[Tally]]  # makes those of one replay


@dataclass(frozen=True, slots=True)
class Load:
    """A load: a number of users without (`concurrency`) or with think time (`users`), or a rate.

    `amount` of a `rate` is a multiple of the trace's own rate, not requests per second.
    """

    kind: LoadKind
    amount: float
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadSize:
    """How many requests a load has: `most_requests` bounds how often a short trace is played over."""

    most_requests: int = 4000
    brief: bool = False

    @property
    def requests(self) -> int:
        """`most_requests`, or the part of it that a brief load has."""
        most = self.most_requests
        return max(most // _BRIEF_PART, min(most, _BRIEF_LEAST)) if self.brief else most

    @property
    def turns(self) -> int:
        """Sessions for each user of a closed loop, at least."""
        return BRIEF_TURNS if self.brief else LEAST_TURNS

    @property
    def lengths(self) -> tuple[int, int]:
        """Lengths of a long session that a scaled trace lasts: at least, and where that is allowed."""
        return (BRIEF_LENGTHS, BRIEF_LENGTHS) if self.brief else (LEAST_LENGTHS, ENOUGH_LENGTHS)


@dataclass(frozen=True, slots=True)
class LoadReplay:
    """Replay of a load. `measured` are the requests that arrived in the settled time, `from_s` to `to_s`.

    `kept_up`: requests that ended in the settled time, divided by those that arrived in it: below 1 where a
    queue grows. None for users, who wait for their answers, and for long loads, which measure the growth of
    the backlog instead.
    `lost`: it was stopped when a term was lost, so that some requests of the settled time are missing; the
    numbers of these terms, in the order of their tallies.
    """

    result: Result
    measured: pd.DataFrame
    from_s: float
    to_s: float
    kept_up: float | None = None
    lost: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Length of the settled time."""
        return self.to_s - self.from_s

    @property
    def ended(self) -> pd.DataFrame:
        """The requests that completed in the settled time."""
        requests = self.result.requests
        done = requests["state"].to_numpy() == "completed"
        within = _within(requests["finished_s"].to_numpy(np.float64), self.from_s, self.to_s)
        ended: pd.DataFrame = requests[done & within]
        return ended


@dataclass(frozen=True, slots=True)
class _Server:
    """A server that is replayed: what it costs, what is kept, and what stops a replay early."""

    scenario: Scenario
    costs: StepCosts | None
    keep_steps: bool
    tallies: Tallies | None
    room: bool

    def replay(
        self, work: Trace, clients: Callable[[Trace], Arrivals], watch: TimedWatch | UsersWatch | None
    ) -> Result:
        return replay_watched(
            work,
            self.scenario,
            clients,
            watch,
            costs=self.costs,
            keep_steps=self.keep_steps,
            room=self.room,
        )


def serve(
    trace: Trace,
    scenario: Scenario,
    load: Load,
    *,
    costs: StepCosts | None = None,
    size: LoadSize | None = None,
    keep_steps: bool = False,
    tallies: Tallies | None = None,
    room: bool = False,
) -> LoadReplay:
    """Replays a load. With `tallies` it stops as soon as its outcome is decided. Errors: BadInput.

    `room`: find which limits are not met until then.
    """
    size, server = size or LoadSize(), _Server(scenario, costs, keep_steps, tallies, room)
    if load.kind == "rate":
        return _serve_rate(scaled(trace, load.amount, size), server)
    think_s = None if load.kind == "concurrency" else load.think_s
    return _serve_users(trace, int(load.amount), think_s, size, server)


def _serve_rate(work: Trace, server: _Server) -> LoadReplay:
    chains, watch = Chains.of(work), None
    if server.tallies is not None:
        # When the settled time begins, and which sessions are long, shows at the end. This much is in it.
        begins = nominal_arrival_s(work)[chains.first]
        middle = float(begins.min() + (begins.max() - begins.min()) / 2)
        watch = TimedWatch(len(work), server.tallies(), middle, inf)
    result = server.replay(work, _arrivals(watch), watch)
    requests = result.requests
    if watch is not None and watch.lost:
        end = float(requests["finished_s"].max())
        return replace(_measured(result, middle, end), lost=watch.lost)
    arrival = _by_row(requests, "arrival_s", len(work))
    start, end = _settled_at_a_rate(arrival, chains)
    offered = int(_within(arrival, start, end).sum())
    endings = _within(requests["finished_s"].to_numpy(np.float64), start, end).sum()
    return _measured(result, start, end, float(endings / max(offered, 1)))


def _arrivals(watch: TimedWatch | None) -> Callable[[Trace], Arrivals]:
    return Arrivals if watch is None else lambda trace: WatchedArrivals(trace, watch)


def _serve_users(
    trace: Trace, users: int, think_s: float | None, size: LoadSize, server: _Server
) -> LoadReplay:
    seed = server.scenario.seed
    for times in _LONGER:
        work = enough_for(trace, users, size, times)
        chains, watch = Chains.of(work), None
        clients: Callable[[Trace], Arrivals] = lambda trace: ClosedLoop(trace, users, think_s, seed)  # noqa: E731
        if server.tallies is not None and not work.integers("retry").any():
            watch = UsersWatch(len(work), server.tallies(), chains, users)
            clients = _watched_users(users, think_s, seed, watch)
        result = server.replay(work, clients, watch)
        if watch is not None and watch.cut:
            start, end = watch.settled_s
            lost_at = float(result.requests["finished_s"].max())
            return replace(_measured(result, start, min(end, lost_at)), lost=watch.lost)
        rejected = rejected_for_load(result.requests)
        arrival = _by_row(result.requests, "arrival_s", len(work))
        finished = _by_row(result.requests[~rejected], "finished_s", len(work))
        if not np.isfinite(finished).any():  # nobody was served, which no longer load changes
            break
        start, end = _settled_with_users(arrival, finished, chains, users)
        begun = _spans(chains, arrival)[0]
        if not rejected.any() or _within(begun, start, end).sum() >= users:
            return _measured(result, start, end)
    return _measured(result, float(np.nanmin(arrival)), float(np.nanmax(arrival)))


def _watched_users(
    users: int, think_s: float | None, seed: int, watch: UsersWatch
) -> Callable[[Trace], Arrivals]:
    return lambda trace: WatchedUsers(trace, users, think_s, seed, watch)


def _measured(result: Result, start: float, end: float, kept_up: float | None = None) -> LoadReplay:
    """What arrived in the settled time; all where nothing did."""
    within = _within(result.requests["arrival_s"].to_numpy(np.float64), start, end)
    requests = result.requests[within] if within.any() else result.requests
    return LoadReplay(result, requests, start, end, kept_up)


def _within(times: Floats, start: float, end: float) -> Flags:
    return np.asarray((times >= start) & (times <= end), dtype=np.bool_)


def shortened(trace: Trace, most_requests: int) -> Trace:
    """The first sessions of a trace, whole, with about `most_requests` requests; all of a short one."""
    if len(trace) <= most_requests:
        return trace
    chains = Chains.of(trace)
    return _first(trace, chains, _sessions_within(chains, most_requests))


def enough_for(trace: Trace, users: int, size: LoadSize, times: int = 1) -> Trace:
    """As many of the trace's sessions as give each user `size.turns`, or as `size.requests` allows.

    `times`: so many times as many.
    """
    chains = Chains.of(trace)
    count = len(chains.first)
    sessions = times * max(size.turns * users, _sessions_within(chains, size.requests))
    if sessions <= count:
        return trace if sessions == count else _first(trace, chains, sessions)
    copies = repeated(trace, ceil(sessions / count))
    return _first(copies, Chains.of(copies), sessions)


def scaled(trace: Trace, rate: float, size: LoadSize) -> Trace:
    """The trace at `rate` times its rate, lasting as long as the trace where `size.requests` allows that.

    At least as long as a few of its sessions do, and as some more where that is allowed: as long as sessions
    find a server emptier than it will be, less ends than is offered, as if it did not keep up.
    Errors: BadInput for a trace without a rate.
    """
    period_s = period(trace)
    longest_s = long_s(trace)
    most_s = size.requests / len(trace) * period_s / rate
    least, enough = size.lengths
    wanted_s = max(period_s, period_s / rate, enough * longest_s)
    lasts_s = max(min(wanted_s, most_s), min(least * longest_s, _TOO_MANY * most_s))
    copies = repeated(trace, ceil(lasts_s * rate / period_s), period_s)
    chains = Chains.of(copies)
    begins = nominal_arrival_s(copies)[chains.first]
    keep = max(2, int((begins < begins.min() + lasts_s * rate).sum()))
    return scale(_first(copies, chains, keep), rate)


def at_rate(trace: Trace, rate: float) -> Trace:
    """The trace with its arrivals scaled to so many requests per second. Errors: BadInput."""
    return scale(trace, rate / requests_per_s(trace))


def lasting_at(trace: Trace, rate: float, most_requests: int) -> Trace:
    """The trace at so many requests per second, repeated as `scaled` says. Errors: BadInput."""
    return scaled(trace, rate / requests_per_s(trace), LoadSize(most_requests))


def _first(trace: Trace, chains: Chains, count: int) -> Trace:
    """The first `count` sessions of a trace."""
    return trace if count >= len(chains.first) else select(trace, np.flatnonzero(chains.chain < count))


def _sessions_within(chains: Chains, most_requests: int) -> int:
    """How many sessions have `most_requests` requests together; at least one."""
    sizes = np.cumsum(np.bincount(chains.chain))
    return max(1, int(np.searchsorted(sizes, most_requests, side="right")))


def repeated(trace: Trace, copies: int, period_s: float | None = None) -> Trace:
    """A trace so many times over, a period after each other; contents of copies are strangers."""
    if copies <= 1:
        return trace
    if period_s is None:  # in a closed loop only the order counts
        period_s = float(nominal_arrival_s(trace).max()) + 1.0
    arrival = trace.seconds("arrival_s")
    layers = [
        replace(trace, requests=trace.requests.assign(arrival_s=arrival + number * period_s))
        for number in range(copies)
    ]
    return mix(layers, name=trace.name)


def period(trace: Trace) -> float:
    """Seconds until a trace's sessions (or single requests) might begin anew at the same rate.

    Errors: BadInput where all start at once, or there is but one.
    """
    begins = nominal_arrival_s(trace)[Chains.of(trace).first]
    span = float(begins.max() - begins.min())
    if not span:
        raise BadInput(
            f"{trace.name}: all requests start at once, so that it has no rate to scale; plan for users"
        )
    return span * len(begins) / (len(begins) - 1)


def requests_per_s(trace: Trace) -> float:
    """A trace's own rate: all requests of the sessions that start in a second."""
    return len(trace) / period(trace)


def requests_per_s_of_all(trace: Trace) -> float:
    """Mean requests per second from a trace's first arrival to its last, if serving takes no time.

    Sessions that pause go on after the last has begun. So this is below `requests_per_s`, far below where
    sessions last longer than the time in which they begin.
    """
    times = nominal_arrival_s(trace)
    span = float(np.nanmax(times) - np.nanmin(times))
    return (len(trace) - 1) / span if span else inf


def long_s(trace: Trace) -> float:
    """How long a trace's long sessions last if serving takes no time; 0 for single requests."""
    begins, ends = _spans(Chains.of(trace), nominal_arrival_s(trace))
    return float(np.percentile(ends - begins, _LONG))


def _by_row(requests: pd.DataFrame, name: str, rows: int) -> Floats:
    """A column of served requests for all rows of their trace; NaN for retries that were not sent."""
    times = np.full(rows, np.nan)
    times[requests["row"].to_numpy()] = requests[name].to_numpy(np.float64)
    return times


def _spans(chains: Chains, times: Floats) -> tuple[Floats, Floats]:
    """The first and the last time of each chain that has one, in the order of the chains."""
    first, last = (np.full(len(chains.first), np.nan) for _ in range(2))
    np.fmin.at(first, chains.chain, times)
    np.fmax.at(last, chains.chain, times)
    sent = np.isfinite(first)
    return first[sent], last[sent]


def _settled_at_a_rate(arrival: Floats, chains: Chains) -> tuple[float, float]:
    begins, ends = _spans(chains, arrival)
    first, last = float(begins.min()), float(begins.max())
    long = float(np.percentile(ends - begins, _LONG))
    return first + max(WARM_UP * (last - first), min(long, (last - first) / 2)), last


def _settled_with_users(arrival: Floats, finished: Floats, chains: Chains, users: int) -> tuple[float, float]:
    taken_s = float(_spans(chains, arrival)[0].max())
    ends = _spans(chains, finished)[1]
    warm = min(users, len(ends)) - 1
    return min(float(np.partition(ends, warm)[warm]), taken_s), taken_s
