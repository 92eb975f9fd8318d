"""Choice of a scenario's step costs: by name, from a file, or the best tier that covers it (`auto`).

The tiers are calibrated (fitted to recordings of the set-up), measured (composed of operations measured on
the GPU) and roofline (published rates).
"""

from __future__ import annotations

from math import log

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.file import MEASURED as HOST_MEASURED
from pagecast.sim.costs.calibration.file import Calibration, all_shipped, load
from pagecast.sim.costs.calibration.shape import CPU, identity
from pagecast.sim.costs.calibration.target import Target
from pagecast.sim.costs.calibration.transfer import costs_for, difference
from pagecast.sim.costs.measured.corrections import Corrections, read_corrections
from pagecast.sim.costs.measured.costs import MeasuredCosts
from pagecast.sim.costs.measured.missing import NotMeasured
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.machine.models import model as find_model

AUTO = "auto"
ROOFLINE = "roofline"
MEASURED = "measured"
TRANSFERRED = ", transferred"  # what the name of carried costs ends in


def choose(name: str, target: Target, *, transfer: bool = False) -> StepCosts:
    """The costs called `name`: "measured", "roofline", a shipped calibration, a file, or "auto".

    "auto" is the shipped calibration that fits engine, model and GPU. Where none does it is what measured
    operations give, and where they lack something the roofline; or with `transfer` the nearest calibration of
    the engine, carried over. `expected_error` has the origin.
    A name that a replay printed for carried costs is taken as well. Errors: BadInput for an unknown name, or
    a calibration for something else unless `transfer` allows it.
    """
    if name == ROOFLINE:
        return target.roofline()
    if name == MEASURED:
        return measured(target)
    if (corrections := read_corrections(name)) is not None:
        return _corrected(corrections, target, transfer=transfer)
    if name != AUTO:
        return costs_for(load(name.removesuffix(TRANSFERRED)), target, transfer=transfer)
    calibrations = all_shipped()
    fits = [calibration for calibration in calibrations if misfit(calibration, target) is None]
    if fits:
        return costs_for(max(fits, key=_version), target, transfer=transfer)
    carried = [calibration for calibration in calibrations if _can_be_carried(calibration, target)]
    if not transfer or not carried:
        return _uncalibrated(target, misfits(calibrations, target), transferable=bool(carried))
    nearest = min(carried, key=lambda calibration: _distance(calibration, target))
    return costs_for(nearest, target, transfer=True)


def measured(target: Target, corrections: Corrections | None = None) -> MeasuredCosts:
    """Measured operations, corrected or not. Errors: BadInput naming what was not measured."""
    try:
        return target.measured(corrections=corrections)
    except NotMeasured as missing:
        raise BadInput(f"no measured costs: {missing}; use --costs roofline or auto") from None


def _corrected(corrections: Corrections, target: Target, *, transfer: bool) -> StepCosts:
    """Errors: BadInput for corrections of another set-up, unless `transfer`."""
    for name, value in target.identity.items():
        fit_value = corrections.made_for.get(name)
        same = fit_value == value
        if name == "kv_cache_dtype" and isinstance(fit_value, str):  # "auto" may be what the other one names
            sizes = {target.model.kv_element_bytes(dtype) for dtype in (fit_value, str(value))}
            same = len(sizes) == 1
        if not same and not transfer:
            raise BadInput(
                f"corrections {corrections.name} are for {name} {fit_value}, not {value}: calibrate this "
                "set-up, or carry them over (--transfer-costs; rougher)"
            )
    return measured(target, corrections)


def _uncalibrated(target: Target, near: tuple[tuple[str, str], ...], *, transferable: bool) -> StepCosts:
    """Measured operations, or the roofline with what they lack."""
    try:
        return target.measured(near)
    except NotMeasured as missing:
        return target.roofline(near, transferable=transferable, unmeasured=str(missing))


def misfits(calibrations: list[Calibration], target: Target) -> tuple[tuple[str, str], ...]:
    """Names of calibrations and why each does not fit: two at most, of the same engine and model first."""

    def near(calibration: Calibration) -> tuple[object, ...]:
        made_for = calibration.made_for
        other_sharding = made_for.get("tensor_parallel_size", 1) != target.tensor_parallel_size
        unlike, other_gpu, weight, _, steps = _distance(calibration, target)
        return made_for.get("engine") != target.engine, unlike, other_gpu, other_sharding, weight, steps

    nearest = sorted(calibrations, key=near)[:2]
    return tuple((calibration.name, str(misfit(calibration, target))) for calibration in nearest)


def _can_be_carried(calibration: Calibration, target: Target) -> bool:
    """Efficiencies are an engine's own; a CPU's say nothing of a GPU."""
    made_for = calibration.made_for
    return made_for.get("engine") == target.engine and made_for.get("gpu") != CPU


def _distance(calibration: Calibration, target: Target) -> tuple[bool, bool, float, tuple[int, ...], int]:
    """Another model is further off than another GPU; of other models, one of much other weight; then age.

    Of equals, that which was fitted to fewer steps.
    """
    made_for = calibration.made_for
    weight = find_model(str(made_for["model"])).weight_bytes() / target.model.weight_bytes()
    return (
        made_for.get("model_shape") != identity(target.model),
        find_gpu(str(made_for["gpu"])).name != target.gpu.name,
        abs(log(weight)),
        tuple(-part for part in _version(calibration)),
        -sum(int(run["steps"]) for run in calibration.provenance.get("runs", [])),
    )


def misfit(calibration: Calibration, target: Target) -> str | None:
    """Why a calibration is not for `target`; None where it is.

    One made from synchronous runs alone does not know what planning ahead hides.
    """
    engine = calibration.made_for.get("engine")
    if (differs := difference(calibration, target)) is not None:
        return differs
    if engine != target.engine:
        return f"for engine {engine}, not {target.engine}"
    if target.pipeline_depth and calibration.host.source == HOST_MEASURED:
        return "for synchronous scheduling alone (--no-async-scheduling)"
    return None


def _version(calibration: Calibration) -> tuple[int, ...]:
    text = str(calibration.made_for.get("engine_version"))
    return tuple(int(part) if part.isdigit() else 0 for part in text.split("."))
