"""Choice of a scenario's step costs: by name, from a file, or the best tier that covers it (`auto`).

The tiers are calibrated (fitted to recordings of the set-up), measured (composed of operations measured on
the GPU) and roofline (published rates).
"""

from __future__ import annotations

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.file import Calibration, all_shipped, load, own
from pagecast.sim.costs.calibration.misfit import difference, misfit, misfits
from pagecast.sim.costs.calibration.scaled import CorrectedCosts
from pagecast.sim.costs.calibration.shape import CPU
from pagecast.sim.costs.calibration.target import Target
from pagecast.sim.costs.measured.corrections import MEASURED, Corrections, read_corrections
from pagecast.sim.costs.measured.costs import MeasuredCosts
from pagecast.sim.costs.measured.missing import NotMeasured
from pagecast.sim.costs.step_costs import StepCosts

AUTO = "auto"
ROOFLINE = "roofline"
_OTHERS = "calibrate this set-up, or give --costs measured or auto"


def choose(name: str, target: Target) -> StepCosts:
    """The costs called `name`: "measured", "roofline", a shipped calibration, a file, or "auto".

    "auto" is the newest shipped calibration that fits engine, model and GPU. Where none does it is what
    measured operations give, and where they lack something the roofline. Errors: BadInput for an unknown
    name, or a calibration for something else.
    """
    if name == ROOFLINE:
        return target.roofline()
    if name == MEASURED:
        return measured(target)
    if (corrections := read_corrections(own(name) or name)) is not None:
        return _corrected(corrections, target)
    if name != AUTO:
        return costs_for(load(name), target)
    calibrations = all_shipped()
    fits = [calibration for calibration in calibrations if misfit(calibration, target) is None]
    if fits:
        return costs_for(max(fits, key=_version), target)
    return _uncalibrated(target, misfits(calibrations, target))


def costs_for(calibration: Calibration, target: Target) -> CalibratedCosts:
    """The calibration's costs for `target`. Errors: BadInput naming what differs."""
    differs = difference(calibration, target)
    if differs is None:
        return CalibratedCosts(calibration, pipeline_depth=target.pipeline_depth)
    if calibration.made_for.get("gpu") == CPU:
        raise BadInput(
            f"calibration {calibration.name} was made on a CPU: no GPU to plan for is one; "
            "calibrate on the GPU, or give other costs"
        )
    raise BadInput(f"calibration {calibration.name} is {differs}: {_OTHERS}")


def measured(target: Target, corrections: Corrections | None = None) -> MeasuredCosts:
    """Measured operations, corrected or not. Errors: BadInput naming what was not measured."""
    try:
        return target.measured(corrections=corrections)
    except NotMeasured as missing:
        raise BadInput(f"no measured costs: {missing}; use --costs roofline or auto") from None


def _corrected(corrections: Corrections, target: Target) -> StepCosts:
    """Errors: BadInput for corrections of another set-up."""
    for name, value in target.identity.items():
        fit_value = corrections.made_for.get(name)
        same = fit_value == value
        if name == "kv_cache_dtype" and isinstance(fit_value, str):  # "auto" may be what the other one names
            sizes = {target.model.kv_element_bytes(dtype) for dtype in (fit_value, str(value))}
            same = len(sizes) == 1
        if not same:
            raise BadInput(
                f"corrections {corrections.name} are for {name} {fit_value}, not {value}: {_OTHERS}"
            )
    if corrections.base == MEASURED:
        return measured(target, corrections)
    return CorrectedCosts(choose(corrections.base, target), corrections)


def _uncalibrated(target: Target, near: tuple[tuple[str, str], ...]) -> StepCosts:
    """Measured operations, or the roofline with what they lack."""
    try:
        return target.measured(near)
    except NotMeasured as missing:
        return target.roofline(near, unmeasured=str(missing))


def _version(calibration: Calibration) -> tuple[int, ...]:
    text = str(calibration.made_for.get("engine_version"))
    return tuple(int(part) if part.isdigit() else 0 for part in text.split("."))
