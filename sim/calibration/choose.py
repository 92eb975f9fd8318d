"""Which step costs a scenario gets: by name, from a file, from first principles, or what fits best."""

from __future__ import annotations

from pagecast.sim.calibration.file import Calibration, load, shipped
from pagecast.sim.calibration.shape import identity
from pagecast.sim.calibration.target import Target
from pagecast.sim.calibration.transfer import costs_for, difference
from pagecast.sim.costs import StepCosts

AUTO = "auto"
ROOFLINE = "roofline"


def choose(name: str, target: Target, *, transfer: bool = False) -> StepCosts:
    """The costs called `name`: "roofline", a shipped calibration, a file, or "auto".

    "auto" is the shipped calibration that fits engine, model and GPU, or the roofline where none does.
    Errors: BadInput for an unknown name, or a calibration for something else unless `transfer` allows it.
    """
    if name == ROOFLINE:
        return target.roofline()
    if name != AUTO:
        return costs_for(load(name), target, transfer=transfer)
    found = [Calibration.load(path) for path in shipped().values()]
    fits = [calibration for calibration in found if _misfit(calibration, target) is None]
    if not fits:
        return target.roofline(why_none(found, target))
    return costs_for(max(fits, key=_version), target, transfer=transfer)


def why_none(found: list[Calibration], target: Target) -> str:
    """What keeps each calibration from fitting, those of the same engine and model first, two at most."""

    def near(calibration: Calibration) -> tuple[bool, bool]:
        made = calibration.made_for
        return made.get("engine") != target.engine, made.get("model_shape") != identity(target.model)

    nearest = sorted(found, key=near)[:2]
    reasons = [f"{calibration.name} is {_misfit(calibration, target)}" for calibration in nearest]
    return f"No shipped calibration fits ({'; '.join(reasons) or 'there is none'})."


def _misfit(calibration: Calibration, target: Target) -> str | None:
    engine = calibration.made_for.get("engine")
    return difference(calibration, target) or (
        None if engine == target.engine else f"for engine {engine}, not {target.engine}"
    )


def _version(calibration: Calibration) -> tuple[int, ...]:
    text = str(calibration.made_for.get("engine_version"))
    return tuple(int(part) if part.isdigit() else 0 for part in text.split("."))
