"""Limits of a calibration: its errors on runs left out of the fit, and the range that was fitted."""

from __future__ import annotations

from typing import Any

from pagecast.sim.costs.calibration.file import RECORDING, SEGMENT, Calibration
from pagecast.sim.note import CautionNote, Note

# Three recordings of one load whose step times lay 1.3% apart had mean TTFTs 20% apart.
SATURATION_TTFT_PERCENT = 20


def expected_error(calibration: Calibration, *, not_ahead: bool = False) -> Note:
    """A note on what was fitted, and on the worst error on a run left out of the fit.

    `not_ahead`: steps are planned ahead, and no run with asynchronous scheduling was fitted.
    """
    made_for = calibration.made_for
    whole = next((row for row in calibration.regions if row["region"] == "all steps"), {})
    return Note(
        "calibrated_costs",
        engine=made_for.get("engine"),
        engine_version=made_for.get("engine_version"),
        model=made_for.get("model"),
        gpu=made_for.get("gpu"),
        steps=whole.get("steps"),
        left_out=_left_out(calibration),
        saturation_ttft_percent=SATURATION_TTFT_PERCENT,
        not_ahead=not_ahead,
    )


def _left_out(calibration: Calibration) -> dict[str, tuple[float, float]]:
    """Error in total step time and median error of a step (percent), the worst, by what was left out."""
    rows = [row for row in calibration.cross_validation if row.get("steps of") == "all"]
    names = {source["run"] for source in calibration.provenance.get("runs", [])}

    def part(row: dict[str, Any]) -> str:
        return str(row.get("left out") or (RECORDING if row["run"] in names else SEGMENT))

    worst = {}
    for name in (RECORDING, SEGMENT):
        part_rows = [row for row in rows if part(row) == name]
        if part_rows:
            total = max(abs(row["error_percent"]) for row in part_rows)
            worst[name] = (total, max(row["p50_percent"] for row in part_rows))
    return worst


def outside(
    calibration: Calibration, longest_context: int, most_tokens: int, most_requests: int, block_size: int
) -> Note | None:
    """A note on each figure of a replay that is beyond the fitted range. See `CalibratedCosts.outside`."""
    fitted = calibration.fitted
    left: dict[str, tuple[int, ...]] = {}
    tokens = fitted.get("tokens", calibration.knots[-1])
    if most_tokens > tokens:
        left["tokens"] = (most_tokens, tokens)
    if most_requests > fitted.get("decode_requests", most_requests):
        left["requests"] = (most_requests, fitted["decode_requests"])
    context = fitted.get("decode_context", longest_context)
    if longest_context > context:
        left["context"] = (longest_context, context, fitted.get("prompt_context", 0))
    made_with = calibration.made_for.get("block_size")
    if made_with is not None and block_size != made_with:
        left["block_size"] = (block_size, made_with)
    return CautionNote("outside_fit", **left) if left else None
