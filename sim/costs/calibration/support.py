"""Tier of step costs that a set-up gets with `auto`, and what keeps it from a better one."""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.choose import ROOFLINE
from pagecast.sim.costs.calibration.draw import half_width_percent
from pagecast.sim.costs.calibration.file import Calibration, all_shipped
from pagecast.sim.costs.calibration.misfit import misfit
from pagecast.sim.costs.calibration.target import Target
from pagecast.sim.costs.measured.corrections import MEASURED
from pagecast.sim.costs.measured.missing import NotMeasured

CALIBRATED = "calibrated"
IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True)
class Support:
    """A set-up's tier: calibrated, measured, roofline or impossible.

    `detail` names the calibration, the operations, or what is missing.
    `half_width_percent` is half the width of the 90% interval of its step times; None where there are none.
    """

    model: str
    gpu: str
    engine: str
    tensor_parallel_size: int
    tier: str
    detail: str
    half_width_percent: float | None = None


def support(target: Target, calibrations: list[Calibration] | None = None) -> Support:
    """The tier of `target`; `calibrations` are the shipped ones, read here where they are not given."""
    tier, detail, width = _tier(target, all_shipped() if calibrations is None else calibrations)
    return Support(
        target.model.name,
        target.gpu.name,
        target.engine,
        target.tensor_parallel_size,
        tier,
        detail,
        None if width is None else round(width, 1),
    )


def _tier(target: Target, calibrations: list[Calibration]) -> tuple[str, str, float | None]:
    try:
        target.model.check_tensor_parallel(target.tensor_parallel_size)
        for calibration in calibrations:
            if misfit(calibration, target) is None:
                return CALIBRATED, calibration.name, half_width_percent(CalibratedCosts(calibration))
        try:
            costs = target.measured()
        except NotMeasured as missing:
            return ROOFLINE, str(missing), half_width_percent(target.roofline())
        table = costs.operations.table
        return MEASURED, f"{table.engine} {table.version}", half_width_percent(costs)
    except BadInput as error:
        return IMPOSSIBLE, str(error), None
