"""Choice of a scenario's step costs: by name, from a file, the roofline, or the best fit (`auto`)."""

from __future__ import annotations

from math import log

from pagecast.sim.costs.calibration.file import Calibration, load, shipped
from pagecast.sim.costs.calibration.shape import CPU, identity
from pagecast.sim.costs.calibration.target import Target
from pagecast.sim.costs.calibration.transfer import costs_for, difference
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.machine.models import model as find_model

AUTO = "auto"
ROOFLINE = "roofline"
TRANSFERRED = ", transferred"  # what the name of carried costs ends in


def choose(name: str, target: Target, *, transfer: bool = False) -> StepCosts:
    """The costs called `name`: "roofline", a shipped calibration, a file, or "auto".

    "auto" is the shipped calibration that fits engine, model and GPU. Where none does it is the roofline, or
    with `transfer` the nearest calibration of the engine, carried over; its `expected_error` has its origin.
    A name that a replay printed for carried costs is taken as well. Errors: BadInput for an unknown name, or
    a calibration for something else unless `transfer` allows it.
    """
    if name == ROOFLINE:
        return target.roofline()
    if name != AUTO:
        return costs_for(load(name.removesuffix(TRANSFERRED)), target, transfer=transfer)
    found = [Calibration.load(path) for path in shipped().values()]
    fits = [calibration for calibration in found if _misfit(calibration, target) is None]
    if fits:
        return costs_for(max(fits, key=_version), target, transfer=transfer)
    carried = [calibration for calibration in found if _can_be_carried(calibration, target)]
    if not transfer or not carried:
        return target.roofline(misfits(found, target), transferable=bool(carried))
    nearest = min(carried, key=lambda calibration: _distance(calibration, target))
    return costs_for(nearest, target, transfer=True)


def misfits(found: list[Calibration], target: Target) -> tuple[tuple[str, str], ...]:
    """Names of calibrations and why each does not fit: two at most, of the same engine and model first."""

    def near(calibration: Calibration) -> tuple[bool, bool]:
        made = calibration.made_for
        return made.get("engine") != target.engine, made.get("model_shape") != identity(target.model)

    nearest = sorted(found, key=near)[:2]
    return tuple((calibration.name, str(_misfit(calibration, target))) for calibration in nearest)


def _can_be_carried(calibration: Calibration, target: Target) -> bool:
    """Efficiencies are an engine's own; a CPU's say nothing of a GPU."""
    made = calibration.made_for
    return made.get("engine") == target.engine and made.get("gpu") != CPU


def _distance(calibration: Calibration, target: Target) -> tuple[bool, bool, float, tuple[int, ...]]:
    """Another model is further off than another GPU; of other models, one of much other weight; then age."""
    made = calibration.made_for
    weight = find_model(str(made["model"])).weight_bytes() / target.model.weight_bytes()
    return (
        made.get("model_shape") != identity(target.model),
        find_gpu(str(made["gpu"])).name != target.gpu.name,
        abs(log(weight)),
        tuple(-part for part in _version(calibration)),
    )


def _misfit(calibration: Calibration, target: Target) -> str | None:
    engine = calibration.made_for.get("engine")
    return difference(calibration, target) or (
        None if engine == target.engine else f"for engine {engine}, not {target.engine}"
    )


def _version(calibration: Calibration) -> tuple[int, ...]:
    text = str(calibration.made_for.get("engine_version"))
    return tuple(int(part) if part.isdigit() else 0 for part in text.split("."))
