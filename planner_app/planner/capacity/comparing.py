"""Plans of several servers beside each other: fields of the scenario that differ, and a plan for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.planning import CapacityPlan, plan
from pagecast.planner_app.planner.execution.interface import Executor
from pagecast.planner_app.planner.sweep.space import Point, parse_space
from pagecast.planner_app.planner.sweep.trial import at, check_memory
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace


@dataclass(frozen=True, slots=True)
class Compared:
    """One server by its fields that differ, and its plan; without one, the `reason` that it can't serve."""

    point: Point
    plan: CapacityPlan | None
    reason: str = ""

    @property
    def keeps(self) -> bool:
        """Whether some load keeps the SLO."""
        return self.plan is not None and all(each.value is not None for each in self.plan.answers.values())

    @property
    def price(self) -> tuple[float, float]:
        """USD per hour for the rate, or GPUs without prices; of those alike, the same by a replica's most."""
        found = self.plan
        if found is None or not self.keeps:
            return inf, inf
        cost, need = found.cost, found.replicas
        gpus = found.scenario.tensor_parallel_size
        most = next((each.value for each in found.answers.values() if each.value), 0.0)
        if cost is not None:
            return (cost.usd_per_hour or 0.0), (cost.at_most_load or inf)
        return (0.0 if need is None else need.gpus), gpus / most if most else inf

    def to_dict(self) -> dict[str, Any]:
        """As printed in JSON."""
        return {"at": self.point, "reason": self.reason, "plan": self.plan and self.plan.to_dict()}


def best(rows: Sequence[Compared]) -> Compared | None:
    """The cheapest server that keeps the SLO; None where none does."""
    return min((row for row in rows if row.keeps), key=lambda row: row.price, default=None)


def compare(
    trace: Trace,
    scenario: Scenario,
    ask: PlanOptions,
    settings: Sequence[str],
    run: Executor,
    progress: Callable[[int], None],
) -> tuple[list[Compared], bool]:
    """Plans for every server of a grid (`gpu=H100,B200`), in its order; whether it came to its end.

    An interrupt leaves the plans that were made. Errors: BadInput for what no scenario could have.
    """
    points = parse_space(settings, scenario).grid()
    found: dict[int, Compared] = {}
    for number, row in run.until_interrupt(partial(_planned, trace, scenario, ask), points):
        found[number] = row
        progress(len(found))
        if row.plan is not None and not row.plan.complete:  # interrupted, in this process
            return [found[number] for number in sorted(found)], False
    return [found[number] for number in sorted(found)], len(found) == len(points)


def _planned(trace: Trace, scenario: Scenario, ask: PlanOptions, point: Point) -> Compared:
    try:
        own = at(scenario, point)
        check_memory(own)
        return Compared(point, plan(trace, own, ask))
    except BadInput as error:
        return Compared(point, None, str(error))
