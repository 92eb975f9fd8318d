"""Users that a server admits: one search, behind `plan`, `tune` and the dashboard."""

from __future__ import annotations

from pagecast.planner_app.planner.capacity.bisection import Ask, CapacityQuestion, LoadSearch
from pagecast.planner_app.planner.capacity.envelope import Envelope, envelope
from pagecast.planner_app.planner.capacity.options import LoadKind, PlanOptions
from pagecast.planner_app.planner.capacity.users import shortened
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace


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
