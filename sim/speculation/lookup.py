"""Host time of n-gram speculation: looking up n-grams, laying out a step in chunks, comparing tokens.

It is spent between steps, for every request of a step, and once more where a step has prompts. A calibration
has it from runs with n-grams. Where it had none, each kernel family states what its engine takes.
"""

from __future__ import annotations

from dataclasses import replace

from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.draw import with_lookup_drawn
from pagecast.sim.costs.calibration.option_costs import OptionCosts
from pagecast.sim.costs.families.registry import family
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.speculation.costs import NO_LOOKUP, Lookup


def lookup_of(costs: StepCosts) -> Lookup:
    """Nanoseconds per request, and per step with prompts; 0 where nobody has measured them."""
    if not isinstance(costs, CalibratedCosts):
        return NO_LOOKUP
    options = costs.calibration.options
    if options.lookup_ns is None:
        kernels = family(costs.calibration.shape.family)
        options = replace(
            OptionCosts(),
            lookup_ns=float(kernels.lookup_ns),
            lookup_prompt_ns=float(kernels.lookup_prompt_ns),
            lookup_sd=kernels.lookup_sd,
        )
    drawn = with_lookup_drawn(costs, options)
    return Lookup(round(drawn.lookup_ns or 0.0), round(drawn.lookup_prompt_ns or 0.0))
