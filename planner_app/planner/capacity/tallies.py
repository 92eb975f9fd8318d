"""Terms of an SLO counted while requests end: whether a term is lost whatever else comes.

Bounds are exact. A percentile is lost when more requests than it may have beyond its bound are beyond it, a
mean when the sum of the values so far exceeds the bound times all requests that may count, a share of good
requests when too few are left to be good. `most` is how many requests may count in the end, at most. Requests
that were rejected or cancelled count as neither: a term is told late at worst, and never wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor, inf

from pagecast.planner_app.planner.slo import Goodput, Latency, Slo
from pagecast.sim.core.request import Request, State
from pagecast.sim.costs.step_costs import StepCosts

_NS = 1e-9
_SLACK = 1 + 1e-9  # sums of floats depend on their order by less
LookupS = Callable[[int], float]


def lookup_of(costs: StepCosts, *, caching: bool) -> LookupS:
    """The seconds that looking up a prompt of so many tokens takes the host (`metrics.prefix_lookup_s`)."""
    plain = costs.arrival_ns(0)
    return lambda tokens: (costs.arrival_ns(tokens) - plain) * _NS if caching else 0.0


def latency_s(request: Request, latency: str, lookup_s: LookupS) -> float | None:
    """A completed request's latency in seconds, as `metrics.request_table` has it; None: it has none."""
    arrival, first, end = (
        at * _NS for at in (request.arrival_ns, request.first_token_ns, request.finished_ns)
    )
    if latency == "ttft":
        return first - arrival
    if latency == "tpot":
        gaps = request.output_tokens - 1
        return (end - first) / gaps if gaps > 0 else None
    if latency == "e2e":
        return end - arrival
    if latency == "decode":
        return end - first
    admitted = request.admitted_ns * _NS
    return first - admitted if latency == "prefill" else admitted - arrival - lookup_s(request.prompt_tokens)


class Tally:
    """Count of one term."""

    def add(self, request: Request) -> None:
        """Counts a request that has ended."""
        raise NotImplementedError

    def lost(self, most: int) -> bool:
        """Whether the term is broken, with at most `most` requests that count."""
        raise NotImplementedError


class _LatencyTally(Tally):
    def __init__(self, term: Latency, lookup_s: LookupS) -> None:
        self._term, self._lookup_s = term, lookup_s
        self._beyond, self._sum_s = 0, 0.0
        self._part = float(term.statistic[1:]) if term.statistic not in ("mean", "max") else None

    def add(self, request: Request) -> None:
        """Counts a completed request."""
        if request.state is not State.FINISHED:
            return
        value = latency_s(request, self._term.latency, self._lookup_s)
        if value is not None:
            self._sum_s += max(value, 0.0)
            bound_s = self._term.bound_s
            self._beyond += value > bound_s if self._term.inclusive else value >= bound_s

    def lost(self, most: int) -> bool:
        """Whether the statistic is beyond its bound."""
        if self._term.statistic == "mean":
            return self._term.latency != "queue" and self._sum_s > self._term.bound_s * most * _SLACK
        if not self._beyond or self._part is None:
            return self._beyond > 0
        # As `slo._percentile`, whose lower neighbour is beyond the bound then.
        return self._beyond >= most - floor(round((most - 1) * self._part / 100, 9))


class _GoodputTally(Tally):
    def __init__(self, term: Goodput, lookup_s: LookupS) -> None:
        self._term, self._lookup_s = term, lookup_s
        self._bad = 0

    def add(self, request: Request) -> None:
        """Counts a request that is not good."""
        if request.state is not State.FINISHED:
            self._bad += 1
            return
        for latency, bound_s, inclusive in self._term.bounds:
            value = latency_s(request, latency, self._lookup_s)
            if value is not None and (value > bound_s if inclusive else value >= bound_s):
                self._bad += 1
                return

    def lost(self, most: int) -> bool:
        """Whether the share of good requests is too small already."""
        return (most - self._bad) * _SLACK < self._term.bound * most


class _PreemptionTally(Tally):
    def __init__(self, most_per_request: float) -> None:
        self._allowed, self._count = most_per_request, 0

    def add(self, request: Request) -> None:
        """Counts a request's preemptions."""
        if request.state is not State.REJECTED:
            self._count += request.preemptions

    def lost(self, most: int) -> bool:
        """Whether there are too many, however many requests come."""
        return self._count > self._allowed * most * _SLACK


def tallies(slo: Slo, lookup_s: LookupS, max_preemption_rate: float = inf) -> Sequence[Tally]:
    """A tally for each term of a level, and one for the preemptions per request where these are bounded."""
    terms: list[Tally] = [
        _LatencyTally(term, lookup_s) if isinstance(term, Latency) else _GoodputTally(term, lookup_s)
        for term in slo.terms
    ]
    return terms if max_preemption_rate == inf else [*terms, _PreemptionTally(max_preemption_rate)]
