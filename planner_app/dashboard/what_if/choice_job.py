"""Job of the two cards that come first, apart from what draws them: its process starts in half the time."""

from __future__ import annotations

from typing import Any

from pagecast.planner_app.planner.tune.choice import Choice, choose
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace


def choice_job(
    trace: Trace, scenario: Scenario, knob: str, slo: str, lasting: bool, *, progress: Any
) -> Choice:
    """`choose` with progress."""

    def tell(done: int, total: int) -> None:
        progress((done, total, "replays"))

    return choose(trace, scenario, knob, slo, tell, lasting=lasting)
