"""Check that the engine would start with a view's scenario: else its figures mean nothing."""

from __future__ import annotations

from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.core.errors import BadInput


def start_problem(view: PageView) -> str:
    """Why the engine is expected not to start; empty where it does, or where that is told elsewhere."""
    try:
        budget = view.scenario().budget()
    except BadInput:
        return ""
    if budget is None or budget.out_of_memory is None:
        return ""
    return sentence(budget.out_of_memory)
