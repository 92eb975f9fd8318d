"""The load that a server takes: one search for users and one for rates, behind every advice."""

from __future__ import annotations

from dataclasses import replace

from pagecast.planner_app.planner.capacity.bisection import (
    MOST_STEPS,
    Ask,
    CapacityQuestion,
    LoadSearch,
    LoadTrial,
    step_of,
)
from pagecast.planner_app.planner.capacity.envelope import Envelope, envelope
from pagecast.planner_app.planner.capacity.options import LoadKind, PlanOptions
from pagecast.planner_app.planner.capacity.users import Load, requests_per_s, shortened
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

NEAR = 2  # steps of `GRID` to which a rate is found


def users_ask(question: CapacityQuestion, kind: LoadKind, fits: Envelope) -> Ask:
    """Users begin at the static envelope, and are found to a fiftieth."""
    start = min(max(fits.concurrency, 1), question.most_users)
    return Ask(kind, None, start, max(start // 4, 1), max(start // 50, 1), verify=False)


def question_of(trace: Trace, scenario: Scenario, ask: PlanOptions) -> CapacityQuestion:
    """The question that `plan` asks for users."""
    return CapacityQuestion(shortened(trace, ask.most_requests), scenario, ask, seed=scenario.seed)


def admitted(question: CapacityQuestion) -> LoadSearch:
    """The users without think time that keep the SLO, as `plan` finds them. Errors: BadInput."""
    fits = envelope(question.trace, question.scenario, question.slo, costs=question.draws.costs)
    return question.search(users_ask(question, "concurrency", fits))


def rate_ask(question: CapacityQuestion, users: LoadTrial | None) -> Ask:
    """A rate begins where the most users without think time were served; at the least where none were."""
    rate = 0.0 if users is None else users.requests_per_s
    start = step_of(rate / question.rate) if rate else -MOST_STEPS
    return Ask("rate", start=start, resolution=NEAR, lasts=True)


def keeps_rate(trace: Trace, scenario: Scenario, slo: str) -> bool:
    """Whether a server keeps an SLO in a long load at a trace's own rate, as `plan` judges a rate.

    A replay of the trace alone may end before a queue that grows shows. True where the trace has no rate.
    """
    question = question_of(trace, scenario, PlanOptions(slo=slo))
    try:
        rate = requests_per_s(question.trace)
    except BadInput:
        return True
    return replace(question, rate=rate).serve_long(Load("rate", 1.0)).holds
