"""Jobs of the two cards that come first, apart from what draws them: so their process starts faster."""

from __future__ import annotations

from typing import Any

from pagecast.planner_app.planner.tune.choice import BLOCK_SIZE, HBM, Choice, Known, choose
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

Answer = Choice | str  # a choice, or one sentence that says why there is none


def first_choices(trace: Trace, scenario: Scenario, slo: str, *, progress: Any) -> dict[str, Answer]:
    """Both choices by brief loads: the replays that they have in common are made once."""
    known = Known()

    def chosen(knob: str) -> Answer:
        try:
            return choose(trace, scenario, knob, slo, _telling(progress), lasting=False, known=known)
        except BadInput as error:
            return str(error)

    return {knob: chosen(knob) for knob in (BLOCK_SIZE, HBM)}


def lasting_choice(trace: Trace, scenario: Scenario, knob: str, slo: str, *, progress: Any) -> Choice:
    """One choice by long loads."""
    return choose(trace, scenario, knob, slo, _telling(progress))


def _telling(progress: Any) -> Any:
    return lambda done, total: progress((done, total, "replays"))
