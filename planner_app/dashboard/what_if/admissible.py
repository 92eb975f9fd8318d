"""Admissible concurrency for the cards: the static envelope at once, the planner's answer from jobs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from pagecast.planner_app.dashboard.shell.jobs import Results, results
from pagecast.planner_app.dashboard.shell.replays import trace_for
from pagecast.planner_app.dashboard.shell.state import Session
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.planner.capacity.envelope import Envelope, binds, envelope
from pagecast.planner_app.planner.capacity.options import LEAST_REPLICATES, PlanOptions
from pagecast.planner_app.planner.capacity.planning import Answer, plan, steps
from pagecast.planner_app.planner.slo import Slo
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

POINT, INTERVAL, BASE = "concurrency", "concurrency interval", "baseline concurrency"
_envelopes = Results(most=64)


@dataclass(frozen=True, slots=True)
class Admissible:
    """Users at once that keep the SLO (0: not even one), its 90% interval, and a word on what binds."""

    users: int
    low: float | None
    high: float | None
    sentence: str


def envelope_of(view: PageView, trace: Trace) -> Envelope | None:
    """The static envelope; None where the SLO can't be read."""
    try:
        limits: Envelope = _envelopes.make(
            (view["slo"], *view.key()), lambda: envelope(trace, view.scenario(), Slo.optional(view["slo"]))
        )
    except BadInput:
        return None
    return limits


def known_of(view: PageView) -> Admissible | None:
    """The best answer that is in for a view: with its interval, or the number alone."""
    answer: Admissible | None = results.get(key(view, INTERVAL)) or results.get(key(view, POINT))
    return answer


def ask(own: Session, view: PageView, trace: Trace, slot: str) -> Admissible | None:
    """The result of the job in slot `POINT` or `INTERVAL`, or None; the second waits for the first."""
    if slot == INTERVAL and results.get(key(view, POINT)) is None:
        return None
    answer: Admissible | None = own.ask(
        slot, key(view, slot), concurrency_job, trace, view.scenario(), view["slo"], slot == INTERVAL
    )
    return answer


def ask_baseline(own: Session, pinned: PageView) -> Admissible | None:
    """The baseline's answer, its number alone if need be. Nothing where its trace can't be had."""
    admissible = known_of(pinned)
    if admissible is not None:
        return admissible
    try:
        trace = trace_for(own, pinned)
    except BadInput:
        return None
    answer: Admissible | None = (
        None
        if trace is None
        else own.ask(
            BASE, key(pinned, POINT), concurrency_job, trace, pinned.scenario(), pinned["slo"], False
        )
    )
    return answer


def key(view: PageView, slot: str) -> Hashable:
    """The key of a job's result."""
    return (slot, view["slo"], *view.key())


def concurrency_job(
    trace: Trace, scenario: Scenario, slo: str, with_interval: bool, *, progress: Any
) -> Admissible:
    """The answer of `pagecast plan` for the concurrency alone."""
    replicates = LEAST_REPLICATES if with_interval else 0
    total = steps(1, replicates)
    result = plan(
        trace,
        scenario,
        PlanOptions(slo=slo, kinds=("concurrency",), replicates=replicates, explain=with_interval),
        progress=lambda done: progress((done, total, "searches")),
    ).concurrency
    assert result is not None
    return Admissible(int(result.value or 0), result.low, result.high, _sentence(result))


def _sentence(answer: Answer) -> str:
    if answer.sentence:
        return answer.sentence
    broken = " and ".join(term.text for term in answer.beyond.broken) if answer.beyond else ""
    text = f"one more user breaks {broken}" if broken else ""
    return f"{text}; {binds(answer.binding.limit)}" if answer.binding and text else text
