"""Which step costs a scenario gets: by name, from a file, from first principles, or what fits best."""

from __future__ import annotations

from pagecast.sim.calibration.file import Calibration, load, shipped
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
    calibration = fitting(target) if name == AUTO else None if name == ROOFLINE else load(name)
    return target.roofline() if calibration is None else costs_for(calibration, target, transfer=transfer)


def fitting(target: Target) -> Calibration | None:
    """The shipped calibration that fits, the newest engine version first; None where none does."""
    found = [Calibration.load(path) for path in shipped().values()]
    fits = [
        calibration
        for calibration in found
        if calibration.made_for.get("engine") == target.engine and difference(calibration, target) is None
    ]
    return max(fits, key=_version, default=None)


def _version(calibration: Calibration) -> tuple[int, ...]:
    text = str(calibration.made_for.get("engine_version"))
    return tuple(int(part) if part.isdigit() else 0 for part in text.split("."))
