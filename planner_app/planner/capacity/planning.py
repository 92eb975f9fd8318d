"""Capacity planning under an SLO: the answers of `pagecast plan`, as a function.

    plan(trace, scenario, PlanOptions(slo="ttft_p99<2s,tpot_p95<50ms"))

A plan has an answer for each kind of load: admissible concurrency, highest request rate, users with think
time. An answer has an interval, the outcomes at it and just above it, and the limit that binds. The static
envelope stands beside them.

    envelope.py     1. arithmetic: where the search for users begins
    bisection.py    2. users, by closed loops (`users.py`)
    evidence.py     3. all else, on all cores:
    lasting.py         rates, by long replays, from the rate at which those users were served
    binding.py         replays with twice and half of each limit, to see which one binds
    bisection.py       searches from the answer, with drawn costs and workload, for the interval

The cheap form is `replicates=0, explain=False`: about four replays for users, and two long ones for a rate.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pagecast.planner_app.planner.capacity.binding import LIMITS, Binding
from pagecast.planner_app.planner.capacity.bisection import (
    GROWTH,
    CapacityQuestion,
    Draws,
    LoadSearch,
    LoadTrial,
    amount,
    interval,
    width_error,
)
from pagecast.planner_app.planner.capacity.envelope import Envelope, envelope
from pagecast.planner_app.planner.capacity.evidence import SEARCH, Evidence, Study
from pagecast.planner_app.planner.capacity.options import LoadKind, PlanOptions
from pagecast.planner_app.planner.capacity.plan_cost import PlanCost, plan_cost
from pagecast.planner_app.planner.capacity.replicas import Replicas, replicas
from pagecast.planner_app.planner.capacity.users import requests_per_s, shortened
from pagecast.planner_app.planner.execution.executor import Serial
from pagecast.planner_app.planner.execution.interface import Executor
from pagecast.planner_app.planner.prices import priced
from pagecast.planner_app.planner.slo import Slo, TermVerdict
from pagecast.planner_app.wording.note_sentences import sentence, sentences
from pagecast.planner_app.wording.quantities import seconds
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.draw import half_width_percent
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.note import Caution
from pagecast.sim.replay.notes import idle_note, memory_notes
from pagecast.sim.replay.resample import resample
from pagecast.sim.replica.windows import blocks_per_block
from pagecast.sim.replica.workload import TraceWorkload
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace, nominal_arrival_s

GOOD_REPLICATES = 20  # of which intervals are good enough to decide by
Progress = Callable[[int], None]  # called with the number of searches and explanations done


@dataclass(frozen=True, slots=True)
class Answer:
    """The highest load of one kind that keeps the SLO.

    `value` is in users, or in requests per second; None where no load keeps the SLO. `low` and `high` are the
    90% interval, None without replicates. `at_limit`: the SLO holds at the highest load tried, so more may be
    possible. `at` is the outcome at the answer, `beyond` at the next load above it, which fails. `tried` has
    the outcomes of the forecast's search, ordered by load. `replays` counts the replays of all searches,
    `draws` the searches behind the interval.
    """

    kind: LoadKind
    value: float | None
    low: float | None
    high: float | None
    at_limit: bool
    at: LoadTrial | None
    beyond: LoadTrial | None
    binding: Binding | None
    replays: int
    tried: tuple[LoadTrial, ...]
    draws: int = 0

    @property
    def sentence(self) -> str:
        """Why it is no more than that, in a sentence; empty where the next load breaks a term as usual."""
        if self.value is None and self.beyond is not None:
            least = "one user alone" if self.kind != "rate" else f"{self.beyond.amount:.2g} requests/s"
            terms = " and ".join(
                f"{term.text} can't be kept: {judgment(term)}" for term in self.beyond.broken
            )
            counts = self.beyond.counts.sentence
            return f"{terms} with {least}" + (f": {counts}" if counts else "")
        if self.at_limit and self.value is not None:
            return f"the SLO still holds at {shown(self.kind, self.value)}, the most that was tried"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """As printed in JSON."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "at_limit": self.at_limit,
            "draws": self.draws,
            "says": self.sentence,
            "at": _outcome(self.at),
            "beyond": _outcome(self.beyond),
            "binding": self.binding.to_dict() if self.binding else None,
            "replays": self.replays,
        }


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The load that one replica takes under an SLO, and the number of replicas for a rate.

    `requests_per_s` is the trace's own rate; None where it has none. `replicas` is None where no highest rate
    was asked for, or none was found. `cost` is None without a price. `rejected` counts the requests that are
    rejected at any load. `step_times_percent`: half the width of the 90% interval of step times. `complete`
    is False where it was interrupted when the answers were known, but not their intervals and limits.
    `drawn`: what each search behind an interval has anew.
    """

    trace: str
    requests: int
    rejected: int
    requests_per_s: float | None
    scenario: Scenario
    costs: str
    slo: Slo
    envelope: Envelope
    answers: dict[LoadKind, Answer]
    replicas: Replicas | None
    notes: tuple[str, ...]
    wall_s: float
    cost: PlanCost | None = None
    step_times_percent: float = 0.0
    complete: bool = True
    drawn: str = ""

    @property
    def concurrency(self) -> Answer | None:
        """The admissible concurrency, where it was asked for."""
        return self.answers.get("concurrency")

    @property
    def rejects(self) -> str:
        """One sentence on what is never served, which answers leave out; empty where all is."""
        count, total = self.rejected, self.requests
        return (
            ""
            if not count
            else (
                f"{count:,} of {total:,} requests ({count / total:.1%}) are rejected at any load, "
                "and latencies are of the others: `pagecast replay` tells why."
            )
        )

    @property
    def replays(self) -> int:
        """How many replays the searches took."""
        return sum(answer.replays for answer in self.answers.values())

    def to_dict(self) -> dict[str, Any]:
        """As printed in JSON."""
        return {
            "trace": self.trace,
            "requests": self.requests,
            "requests_per_s": self.requests_per_s,
            "slo": self.slo.text,
            "costs": self.costs,
            "scenario": self.scenario.resolved(),
            "envelope": self.envelope.to_dict(),
            **{kind: answer.to_dict() for kind, answer in self.answers.items()},
            "replicas": self.replicas.to_dict() if self.replicas else None,
            "cost": self.cost.to_dict() if self.cost else None,
            "rejected": {"requests": self.rejected, "of": self.requests},
            "replays": self.replays,
            "wall_s": self.wall_s,
            "step_times_percent": self.step_times_percent,
            "notes": list(self.notes),
        }


def plan(
    trace: Trace,
    scenario: Scenario,
    ask: PlanOptions,
    run: Executor | None = None,
    progress: Progress | None = None,
    *,
    draws: Draws | None = None,
) -> CapacityPlan:
    """Plans as the options say. The stages are those of the module's description.

    `run`: where replays run, by default in this process; the answer does not depend on it. `progress` may
    raise to stop; `steps` gives its total. An interrupt after the answers are known leaves out the rest.
    `draws`: what a replicate has anew, by default the scenario's costs and, unless `ask.fixed_workload`, a
    workload like the trace's.

    Errors: BadInput for a trace, scenario or option that can't be used, or where nothing can be served.
    """
    started = time.perf_counter()
    run = run or Serial()
    level, usd_per_gpu_hour = Slo.optional(ask.slo), _price(ask, scenario)
    work = shortened(trace, ask.most_requests)
    kinds, rate, notes = _kinds(work, ask)
    draws = draws or Draws(workload=None if ask.fixed_workload else resample)
    question = CapacityQuestion(work, scenario, ask, rate or 1.0, scenario.seed, draws)
    scenario.limits()
    rejected = _rejected(work, scenario)
    fits = envelope(work, scenario, level, costs=draws.costs)
    total = steps(len(kinds), ask.replicates)
    tell = progress or (lambda done: None)
    study = Study(question, kinds, fits, run, lambda done: tell(min(done, total)))
    study.search_users()
    complete = True
    try:
        study.gather()
    except KeyboardInterrupt:
        if not study.points.keys() & set(kinds):
            raise
        complete = False
        run.abandon()
    kinds = [kind for kind in kinds if kind in study.points]
    answers = {kind: _answer(question, kind, study.points[kind], study.evidence(kind)) for kind in kinds}
    tell(total)
    cost_model = question.costs_of(None)
    replicas_needed = _replicas(answers.get("rate"), ask.replicas_for or rate, scenario)
    texts = (
        *([] if complete else [Caution("interrupted: what was not found by then is left out")]),
        *notes,
        *_notes(trace, question, answers),
        *([replicas_needed.warning] if replicas_needed and replicas_needed.warning else []),
        *sentences(memory_notes(scenario)),
        *([idle] if (idle := idle_note(work, scenario)) else []),
        sentence(cost_model.expected_error()),
    )
    return CapacityPlan(
        trace.name,
        len(work),
        rejected,
        rate,
        scenario,
        cost_model.name,
        level,
        fits,
        answers,
        replicas_needed,
        texts,
        time.perf_counter() - started,
        _cost(usd_per_gpu_hour, scenario, replicas_needed, answers),
        half_width_percent(cost_model),
        complete,
        _drawn(draws),
    )


def steps(kinds: int, replicates: int) -> int:
    """The number that `progress` is called with at the end: a search counts as `SEARCH` replays."""
    return kinds * (SEARCH + 1 + len(LIMITS) + (SEARCH * (replicates + 1) if replicates else 0))


def _price(ask: PlanOptions, scenario: Scenario) -> float | None:
    """What an hour of the scenario's GPU costs, in USD; None without a price. Errors: BadInput."""
    gpu = find_gpu(scenario.gpu).name
    return priced(ask.price, [gpu]).get(gpu)


def _kinds(trace: Trace, ask: PlanOptions) -> tuple[list[LoadKind], float | None, list[str]]:
    """The kinds of load to plan for, the trace's own rate, and a note where it has none.

    Errors: BadInput where a rate was asked for and the trace has none.
    """
    all_kinds: list[LoadKind] = list(ask.kinds) if ask.kinds is not None else ["concurrency", "rate"]
    if ask.kinds is None and ask.think_time is not None:
        all_kinds.append("users")
    try:
        return all_kinds, requests_per_s(trace), []
    except BadInput as error:
        if ask.kinds is not None and "rate" in all_kinds:
            raise
        return [kind for kind in all_kinds if kind != "rate"], None, [f"no highest rate: {error}"]


def _replicas(answer: Answer | None, rate: float | None, scenario: Scenario) -> Replicas | None:
    if answer is None or answer.value is None or rate is None:
        return None
    return replicas(rate, answer.value, (answer.low, answer.high), scenario.tensor_parallel_size)


def _cost(
    usd_per_gpu_hour: float | None,
    scenario: Scenario,
    replicas_needed: Replicas | None,
    answers: dict[LoadKind, Answer],
) -> PlanCost | None:
    if usd_per_gpu_hour is None:
        return None
    most = answers.get("rate") or answers.get("concurrency")
    at = None if most is None else most.at
    return plan_cost(usd_per_gpu_hour, scenario.tensor_parallel_size, replicas_needed, at)


def _answer(question: CapacityQuestion, kind: LoadKind, point: LoadSearch, evidence: Evidence) -> Answer:
    answer, unit = point.answer, question.rate if kind == "rate" else 1.0
    replays = answer.tried + evidence.replays
    if answer.value is None:
        return Answer(kind, None, None, None, False, None, point.beyond, None, replays, point.tried)
    value = unit * amount(kind, answer.value)
    low = high = None
    if evidence.draws:
        low, high = interval(
            evidence.draws, value, [unit * amount(kind, step) for step in answer.doubtful or ()]
        )
    return Answer(
        kind,
        value,
        low,
        high,
        answer.at_limit,
        point.at,
        point.beyond,
        evidence.binding,
        replays,
        point.tried,
        len(evidence.draws),
    )


def _rejected(trace: Trace, scenario: Scenario) -> int:
    """How many requests are rejected at any load. Errors: BadInput where all are."""
    limits = scenario.limits(blocks_per_block(TraceWorkload(trace), scenario))
    prompt, output = trace.integers("input_tokens").tolist(), trace.integers("output_tokens").tolist()
    reasons = [why for why in map(limits.refusal, prompt, output) if why]
    if len(reasons) == len(trace):
        raise BadInput(
            f"{trace.name}: none of its {len(trace):,} requests can be served (the first: {reasons[0]}); "
            "raise max_model_len, or leave more memory for KV"
        )
    return len(reasons)


def _notes(trace: Trace, question: CapacityQuestion, answers: dict[LoadKind, Answer]) -> list[str]:
    texts, work, draws, replicates = [*trace.notes], question.trace, question.draws, question.ask.replicates
    if len(work) < len(trace):
        texts.append(f"planned with the first {len(work):,} of {len(trace):,} requests, whole sessions")
    rate, retries = answers.get("rate"), int(work.integers("retry").sum())
    if rate is not None and retries:
        texts.append(
            f"request rates count the {retries:,} retries of this trace, "
            "which are sent only where they are needed"
        )
    if rate is not None and rate.at is not None:
        texts.append(
            f"the highest request rate was tried on a long load: {len(work):,} requests repeated, "
            f"{rate.at.requests:,} of them after a warm-up. After it the backlog may grow by at most "
            f"{GROWTH:.0%} until it comes to rest"
        )
    together = _most_together(work)
    if rate is not None and rate.value is None and together > 1:
        texts.append(
            f"up to {together:,} requests of this trace arrive at the same instant, and do so at any rate: "
            "they wait for each other even where nobody else is served"
        )
    if replicates:
        texts.append(
            f"90% intervals from {replicates} searches with {_drawn(draws)} drawn again. Their width may be "
            f"off by a factor of {width_error(replicates):.2g}; {_narrower(replicates)}"
        )
    return texts


def _drawn(draws: Draws) -> str:
    """What each search behind an interval has anew."""
    names = [*(["costs"] if draws.draw_costs else []), "noise", *(["traffic"] if draws.workload else [])]
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _narrower(replicates: int) -> str:
    """What makes intervals better, or narrower."""
    if replicates < GOOD_REPLICATES:
        return f"--replicates {GOOD_REPLICATES} makes better ones"
    return "a calibration on your GPU and a longer trace make them narrower"


def _most_together(trace: Trace) -> int:
    """The most requests that arrive at one instant."""
    return int(np.unique(nominal_arrival_s(trace), return_counts=True)[1].max())


def judgment(term: TermVerdict) -> str:
    """A term's value as people read it: `ttft_p99 is 1.9 s`."""
    name = "goodput" if term.text.startswith("goodput") else re.split("[<>]", term.text)[0]
    if term.value is None:
        return f"no request has a {name}"
    if name == "kept_up":
        return f"{term.value:.1%} of the offered requests ended"
    if name == "served":
        return f"{term.value:.1%} of the offered requests were served"
    if name == "backlog_growth":
        return f"the backlog would grow by {term.value:.0%} after a long load"
    if name == "preemptions":
        return f"{term.value:.2g} preemptions per request"
    if name == "goodput":
        return f"goodput is {term.value:.1%}"
    return f"{name} is {seconds(term.value)}"


def shown(kind: LoadKind, value: float) -> str:
    """An amount of load as people read it."""
    if kind == "rate":
        return f"{value:.3g} requests/s"
    return f"{value:,.0f} user" + ("s" if value != 1 else "")


def _outcome(outcome: LoadTrial | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    return {
        "amount": outcome.amount,
        "holds": outcome.holds,
        "terms": [term._asdict() for term in outcome.terms],
        "preemption_rate": outcome.preemption_rate,
        "requests_per_s": outcome.requests_per_s,
        "output_tokens_per_s": outcome.output_tokens_per_s,
        "stopped": outcome.stopped,
        **outcome.counts.to_dict(),
    }
