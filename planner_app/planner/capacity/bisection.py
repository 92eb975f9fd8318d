"""Search for the highest load that keeps an SLO: bisection over replays.

All loads of a search use the same server and workload, with the same step costs, noise and texts (common
random numbers), so that two replays differ by the load alone.

Users wait for their answers, so a short replay is enough for them. Requests at a rate do not wait: rates are
tried in long replays, and lowered while the backlog keeps growing (`lasting.py`). That search begins at the
rate at which the users of the first search were served.

Replays stop as soon as their outcome is decided (`watched.py`), which changes no answer. The interval comes
from further searches, each with step costs, noise and, if asked for, the workload drawn again; for a rate by
brief loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, floor, inf, log

import numpy as np
import pandas as pd
from pagecast.planner_app.planner.capacity import lasting
from pagecast.planner_app.planner.capacity.largest import LargestStep, largest, settle
from pagecast.planner_app.planner.capacity.lasting import Lasting, LongLoad
from pagecast.planner_app.planner.capacity.options import LoadKind, PlanOptions
from pagecast.planner_app.planner.capacity.tallies import lookup_of, tallies
from pagecast.planner_app.planner.capacity.users import (
    Load,
    LoadReplay,
    LoadSize,
    Tallies,
    requests_per_s,
    serve,
)
from pagecast.planner_app.planner.served import RequestCounts
from pagecast.planner_app.planner.slo import Slo, TermVerdict, excess, served_terms
from pagecast.sim.costs.calibration.draw import draw
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replay.replicates import Workload
from pagecast.sim.replay.room import Room
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

GRID = 1.01  # factor between neighbouring rates
# Steps of `GRID` from the trace's rate to a ten-thousandth of it, or to ten thousand times it.
MOST_STEPS = 925
MOST_USERS = 8192
KEPT_UP = 0.95  # least share of the offered requests that must end in a short load
GROWTH = 0.2  # most growth to come of the requests in the server, at the end of a long load
CONFIDENCE = 0.9
_WAITING = 4  # most users, in multiples of `max_num_seqs`: more users only wait
_LONGEST_STRIDE = 24  # steps of `GRID` from a rate that holds easily to the next one tried
_SEEDS = 1_000_003  # distance between the seeds of two plans, so that no two share a draw's seed


@dataclass(frozen=True, slots=True)
class LoadTrial:
    """Outcome of one load: the SLO's terms, preemptions per request and counts of the requests measured.

    `amount` is the number of users, or the offered requests per second. `requests_per_s` and
    `output_tokens_per_s` count what ended in the settled time (`LoadReplay`); `ttft_mean_s` is of requests
    that got a token. `stopped`: a term was lost before the end, and figures are of the requests until then.
    `room`: the limits that were not met, where that was asked for.
    """

    amount: float
    holds: bool
    terms: tuple[TermVerdict, ...]
    preemption_rate: float
    requests_per_s: float
    output_tokens_per_s: float
    counts: RequestCounts = field(default_factory=RequestCounts)
    stopped: bool = False
    ttft_mean_s: float = inf
    room: Room | None = field(default=None, compare=False)

    @property
    def requests(self) -> int:
        """How many requests were measured."""
        return self.counts.requests

    @property
    def broken(self) -> tuple[TermVerdict, ...]:
        """The terms that don't hold."""
        return tuple(term for term in self.terms if not term.holds)


@dataclass(frozen=True, slots=True)
class Ask:
    """One search of a question: the kind of load, the first step, and how fine.

    `draw` numbers the draw of costs and workload; None is the forecast, which draws nothing. `lasts`: search
    with long loads. `brief`: with brief ones.
    """

    kind: LoadKind
    draw: int | None = None
    start: int = 0
    step: int = 1
    resolution: int = 1
    verify: bool = True
    lasts: bool = False
    brief: bool = False


@dataclass(frozen=True, slots=True)
class LoadSearch:
    """Result of a search: `at` is the outcome at the answer, `beyond` at the lowest load tried above it.

    `tried` has all outcomes, ordered by load.
    """

    kind: LoadKind
    answer: LargestStep
    at: LoadTrial | None
    beyond: LoadTrial | None
    tried: tuple[LoadTrial, ...]

    @property
    def value(self) -> int | None:
        """The answer's step; None where no load holds."""
        return self.answer.value

    @property
    def crossing(self) -> float:
        """The amount at which the worst term reaches its bound, between the answer and the load beyond it.

        The answer itself where they are neighbours, or the term leaps from nothing; 0 where no load holds.
        """
        if self.at is None:
            return 0.0
        if self.beyond is None or (self.kind != "rate" and self.beyond.amount <= self.at.amount + 1):
            return self.at.amount
        low, high = (max(map(excess, trial.terms), default=0.0) for trial in (self.at, self.beyond))
        if not 0 < low <= 1 < high < inf:
            return self.at.amount
        part = log(1 / low) / log(high / low)
        return self.at.amount * float((self.beyond.amount / self.at.amount) ** part)


@dataclass(frozen=True, slots=True)
class Draws:
    """What a draw has anew.

    `costs` replaces the scenario's; `draw_costs`: whether draws differ by them. `workload` makes a draw's
    trace, as for `replicates.Study`; None: the same trace.
    """

    costs: StepCosts | None = None
    draw_costs: bool = True
    workload: Workload | None = None


@dataclass(frozen=True, slots=True)
class CapacityQuestion:
    """A trace, a server and an SLO. Searches of it are independent, and may run anywhere.

    `rate` is the trace's own, in requests per second; a draw's workload has another. `seed`: of the draws.
    `draws` may replace the scenario's costs. `rooms`: find for each load which limits it does not meet.
    """

    trace: Trace
    scenario: Scenario
    ask: PlanOptions
    rate: float = 1.0
    seed: int = 0
    draws: Draws = field(default_factory=Draws)
    rooms: bool = False

    @property
    def slo(self) -> Slo:
        """The level; without one, a level of no terms."""
        return Slo.optional(self.ask.slo)

    @property
    def think_s(self) -> float:
        """The users' mean pause."""
        return self.ask.think_time or 0.0

    @property
    def most_users(self) -> int:
        """Users at which a search gives up: more than a multiple of those that may run only wait."""
        return self.ask.most_users or min(_WAITING * self.scenario.max_num_seqs, MOST_USERS)

    def search(self, ask: Ask) -> LoadSearch:
        """The largest load that holds, in steps: users, or powers of `GRID` of the workload's own rate."""
        return self._of_draw(ask)._search(ask)

    def _of_draw(self, ask: Ask) -> CapacityQuestion:
        """The question with a draw's own seed, its workload, and that workload's own rate."""
        if ask.draw is None:
            return self
        seed = self.seed * _SEEDS + ask.draw
        question = replace(self, scenario=self.scenario.changed(seed=seed))
        if self.draws.workload is None:
            return question
        trace = self.draws.workload(self.trace, seed)
        return replace(question, trace=trace, rate=requests_per_s(trace) if ask.kind == "rate" else self.rate)

    def _search(self, ask: Ask) -> LoadSearch:
        bounds = limits(ask.kind, self.most_users)
        outcomes: dict[int, LoadTrial] = {}
        if ask.lasts:
            answer = self._settle(ask, bounds, outcomes)
        else:

            def holds(at: int) -> bool:
                load = Load(ask.kind, amount(ask.kind, at), self.think_s)
                outcomes[at] = self.judge(load, self.serve(load, ask.draw, brief=ask.brief))
                return outcomes[at].holds

            answer = largest(
                holds,
                bounds,
                start=ask.start,
                step=partial(_distance, outcomes, ask.step),
                resolution=ask.resolution,
                verify=ask.verify,
                # Without an SLO only preemptions count, whose number wanders about its bound.
                prudent=ask.kind != "rate" and not self.slo.terms,
                guess=partial(_interpolated, outcomes),
            )
        at = None if answer.value is None else outcomes[answer.value]
        above = [step for step in outcomes if answer.value is None or step > answer.value]
        beyond = outcomes[min(above)] if above else None
        return LoadSearch(ask.kind, answer, at, beyond, tuple(outcomes[step] for step in sorted(outcomes)))

    def _settle(self, ask: Ask, bounds: tuple[int, int], outcomes: dict[int, LoadTrial]) -> LargestStep:
        """Searches by long loads. Where one fails, the rate at which its requests ended is the next guess."""
        thorough = self.ask.thorough
        work = Lasting.of(self.trace, amount("rate", ask.start), self.ask.most_requests, thorough=thorough)
        costs = self.costs_of(ask.draw)
        settling: dict[int, float] = {}

        def holds(at: int) -> bool:
            load = Load("rate", amount("rate", at))
            lasted = self._serve_long(work, load, costs)
            settling[at] = lasted.most_ended_per_s / self.rate
            outcomes[at] = self.judge_lasted(load, lasted)
            return outcomes[at].holds

        def guess(at: int) -> int:
            return max(step_of(settling[at]), bounds[0])

        def stride_up(at: int) -> int:
            far = max(map(excess, outcomes[at].terms), default=0.0)
            return min(step_of(1 / far) // 2, _LONGEST_STRIDE) if far else _LONGEST_STRIDE

        return settle(
            holds,
            guess,
            bounds,
            start=ask.start,
            resolution=ask.resolution,
            stride_up=stride_up,
        )

    def serve_long(self, load: Load) -> LoadTrial:
        """The outcome of one long load at a rate, as a search with `Ask.lasts` judges it."""
        work = Lasting.of(self.trace, load.amount, self.ask.most_requests, thorough=self.ask.thorough)
        return self.judge_lasted(load, self._serve_long(work, load, self.costs_of(None)))

    def _serve_long(self, work: Lasting, load: Load, costs: StepCosts) -> LongLoad:
        return lasting.serve_long(
            work,
            self.scenario,
            load,
            costs=costs,
            tallies=self._tallies("rate", costs, count=True),
            worst=self._worst,
            stops=self.ask.early_stops,
            room=self.rooms,
        )

    def _worst(self, requests: pd.DataFrame) -> float:
        """The worst term of requests at a rate, in multiples of its bound."""
        return max(map(excess, self.slo.verdict(requests).terms), default=0.0)

    def costs_of(self, number: int | None) -> StepCosts:
        """The costs of a draw, with their noise at its beginning."""
        plain = self.draws.costs or self.scenario.step_costs()
        return plain if number is None or not self.draws.draw_costs else draw(plain, number, self.seed)

    def serve(
        self, load: Load, draw: int | None = None, *, brief: bool = False, whole: bool = False
    ) -> LoadReplay:
        """A replay of one load, with the costs of a draw. `whole`: to its end, with its steps."""
        costs = self.costs_of(draw)
        return serve(
            self.trace,
            self.scenario,
            load,
            costs=costs,
            size=LoadSize(self.ask.most_requests, brief),
            keep_steps=whole,
            tallies=self._tallies(load.kind, costs, whole=whole),
            room=self.rooms,
        )

    def _tallies(
        self, kind: LoadKind, costs: StepCosts, *, whole: bool = False, count: bool = False
    ) -> Tallies | None:
        """Those that stop a replay: of the level's terms, and of preemptions with users who do not think.

        None without early stops, unless they are to `count` anyway.
        """
        if not self.ask.early_stops and not count:
            return None
        if whole:
            return tuple
        lookup = lookup_of(costs, caching=self.scenario.enable_prefix_caching)
        most = self.ask.max_preemption_rate if kind == "concurrency" else inf
        return partial(tallies, self.slo, lookup, most)

    def judged_by(self, terms: frozenset[str]) -> CapacityQuestion:
        """The question whose replays stop for these terms alone."""
        slo = ",".join(term.text for term in self.slo.terms if term.text in terms)
        most = self.ask.max_preemption_rate if any(text.startswith("preemptions") for text in terms) else inf
        return replace(self, ask=self.ask.model_copy(update={"slo": slo, "max_preemption_rate": most}))

    def judge(self, load: Load, served: LoadReplay) -> LoadTrial:
        """The outcome of a load from its replay: SLO, preemptions (`concurrency` only) and `kept_up`."""
        requests = served.measured
        not_rejected = requests[requests["state"] != "rejected"]
        preempted = float(not_rejected["preemptions"].sum()) / max(len(not_rejected), 1)
        terms = self.slo.verdict(requests).terms if self.slo.terms else served_terms(requests)
        count = len(self.slo.terms)
        terms = tuple(
            _lost(term) if at in served.lost and at < count else term for at, term in enumerate(terms)
        )
        if load.kind == "concurrency":
            text, most = f"preemptions<={self.ask.max_preemption_rate:g}", self.ask.max_preemption_rate
            term = TermVerdict(text, preempted, most, preempted <= most)
            terms = (*terms, _lost(term) if count in served.lost else term)
        if served.kept_up is not None:
            kept_up = served.kept_up
            terms = (*terms, TermVerdict(f"kept_up>={KEPT_UP}", kept_up, KEPT_UP, kept_up >= KEPT_UP))
        endings, seconds = served.ended, served.seconds
        ttft = requests["ttft_s"].to_numpy(np.float64)
        ttft = ttft[np.isfinite(ttft)]
        return LoadTrial(
            amount=load.amount * self.rate if load.kind == "rate" else load.amount,
            holds=not served.lost and all(term.holds for term in terms),
            terms=terms,
            preemption_rate=preempted,
            requests_per_s=len(endings) / seconds if seconds else 0.0,
            output_tokens_per_s=float(endings["output_tokens"].sum()) / seconds if seconds else 0.0,
            counts=RequestCounts.of(requests),
            stopped=bool(served.lost),
            ttft_mean_s=float(ttft.mean()) if len(ttft) else inf,
            room=served.result.room,
        )

    def judge_lasted(self, load: Load, lasted: LongLoad) -> LoadTrial:
        """The outcome of a long load; of one that ran away, only the growth of its backlog."""
        if lasted.lost is not None:
            return self.judge(load, lasted.lost)
        grows = TermVerdict(f"backlog_growth<={GROWTH}", lasted.growth, GROWTH, lasted.holds(GROWTH))
        if lasted.served is None:
            rate = lasted.most_ended_per_s
            return LoadTrial(load.amount * self.rate, False, (grows,), 0.0, rate, 0.0, stopped=True)
        outcome = self.judge(load, lasted.served)
        return replace(outcome, terms=(*outcome.terms, grows), holds=outcome.holds and grows.holds)


def _lost(term: TermVerdict) -> TermVerdict:
    """A term that is lost whatever else comes, though the requests so far may still keep it."""
    if term.value is None or not term.holds:
        return term._replace(holds=False)
    return term._replace(holds=False, value=term.bound)


def _interpolated(outcomes: dict[int, LoadTrial], good: int, bad: int) -> int | None:
    """Where the worst term of two outcomes, in multiples of its bound, reaches it; None: nobody can tell."""
    low, high = (max(map(excess, outcomes[at].terms), default=0.0) for at in (good, bad))
    if not low <= 1 < high < inf:
        return None
    return good + floor((1 - low) / (high - low) * (bad - good))


def _distance(outcomes: dict[int, LoadTrial], most: int, at: int) -> int:
    """Steps from an outcome to where its worst term would reach its bound if it grew with the load.

    At most `most`: latencies grow faster than that where a queue begins.
    """
    far = max(map(excess, outcomes[at].terms), default=0.0)
    return most if far == 0 else min(ceil(at * abs(1 - 1 / far)), most)


def step_of(rate: float) -> int:
    """The highest step at or below a multiple of the trace's own rate."""
    return floor(log(rate) / log(GRID)) if rate > 0 else -MOST_STEPS


def amount(kind: LoadKind, at: int) -> float:
    """The load at a step: a number of users, or times the trace's rate."""
    return GRID**at if kind == "rate" else float(at)


def limits(kind: LoadKind, most_users: int) -> tuple[int, int]:
    """The first and the last step of a search."""
    return (-MOST_STEPS, MOST_STEPS) if kind == "rate" else (1, most_users)


def interval(
    amounts: Sequence[float], forecast: float, doubtful: Sequence[float] = ()
) -> tuple[float, float]:
    """The 90% prediction interval of one more draw, widened to hold the forecast and the steps in doubt.

    `amounts` are the draws' answers. Student's t on their logarithms. Where a draw has no answer (0), the
    lower end is 0.
    """
    positive = np.array([value for value in amounts if value > 0])
    low = high = forecast
    if len(positive) >= 2:
        from scipy import stats  # half a second, which point answers don't need

        logs = np.log(positive)
        spread = logs.std(ddof=1) * np.sqrt(1 + 1 / len(positive))
        half = stats.t.ppf(0.5 + CONFIDENCE / 2, len(positive) - 1) * spread
        low, high = float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))
    if len(positive) < len(amounts):
        low = 0.0
    return min(low, forecast, *doubtful), max(high, forecast, *doubtful)


def width_error(draws: int) -> float:
    """The factor by which the spread of so many draws may be too small, at 90% (chi-square)."""
    from scipy import stats

    return float(np.sqrt((draws - 1) / stats.chi2.ppf((1 - CONFIDENCE) / 2, draws - 1)))
