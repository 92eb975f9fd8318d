"""Host time of n-gram speculation: looking up n-grams, laying out a step in chunks, comparing tokens.

It is spent between steps, for every request of a step. A calibration has it from runs with n-grams. Where it
had none, each kernel family states what its engine takes (`KernelFamily.lookup_ns`).
"""

from __future__ import annotations

from pagecast.sim.costs.calibration.calibrated import CalibratedCosts, option_costs
from pagecast.sim.costs.families.registry import family
from pagecast.sim.costs.step_costs import StepCosts


def lookup_ns(costs: StepCosts) -> int:
    """Nanoseconds per request of a step; 0 where nobody has measured it."""
    if not isinstance(costs, CalibratedCosts):
        return 0
    measured = option_costs(costs).lookup_ns
    return family(costs.calibration.shape.family).lookup_ns if measured is None else round(measured)
