"""How far to trust a calibration, in sentences: on runs left out and beyond what was fitted."""

from __future__ import annotations

from typing import Any

from pagecast.sim.costs.calibration.file import RECORDING, SEGMENT, Calibration

# Three recordings of one load whose step times lay 1.3% apart had mean TTFTs 20% apart.
SATURATION = "near saturation 1% of step time can move TTFT by 20%"
_WINDOWS = " Layers with a sliding window are charged for the whole context, which is too much beyond it."
MEASURED_TRANSFER = (
    "measured once, from Qwen3-8B to Qwen3-0.6B on one H200: mean TPOT 12% and mean TTFT 24% too long"
)


def expected_error(calibration: Calibration) -> str:
    """What was fitted, and the error on a run that was left out of the fit: the worst of them."""
    made = calibration.made_for
    if "transferred_from" in made:
        return (
            f"Step costs carried over from {made['transferred_from']} to {made['model']} on {made['gpu']}: "
            f"expect errors of {100 * calibration.noise.level_sd:.0f}% in step time ({MEASURED_TRANSFER}); "
            f"{SATURATION}.{_WINDOWS if made.get('sliding_windows') else ''}"
        )
    whole = next((row for row in calibration.regions if row["region"] == "all steps"), {})
    return (
        f"Step costs fitted to {whole.get('steps', 'unknown')} steps of {made.get('engine')} "
        f"{made.get('engine_version')} with {made.get('model')} on {made.get('gpu')}: "
        f"{_left_out(calibration)}; {SATURATION}."
    )


def _left_out(calibration: Calibration) -> str:
    rows = [row for row in calibration.cross_validation if row.get("steps of") == "all"]
    if not rows:
        return "no run was left out of the fit to check it, so that the error on another run is unknown"
    names = {source["run"] for source in calibration.provenance.get("runs", [])}

    def what(row: dict[str, Any]) -> str:
        return str(row.get("left out") or (RECORDING if row["run"] in names else SEGMENT))

    said = [
        f"{words} left out was off by up to {max(abs(row['error_percent']) for row in mine):.1f}% in total "
        f"step time, {max(row['p50_percent'] for row in mine):.1f}% in a single step (median)"
        for part, words in ((RECORDING, "a recording"), (SEGMENT, "a kind of load (a segment of the sweep)"))
        if (mine := [row for row in rows if what(row) == part])
    ]
    return f"forecast by the others alone, {' and '.join(said)}"


def outside(
    calibration: Calibration, longest_context: int, most_tokens: int, most_requests: int, block_size: int
) -> str:
    """One sentence naming where a replay left what was fitted, else "". See `Calibrated.outside`."""
    fitted, found = calibration.fitted, []
    tokens = fitted.get("tokens", calibration.knots[-1])
    if most_tokens > tokens:
        found.append(f"steps of up to {most_tokens:,} tokens (fitted: {tokens:,})")
    if most_requests > fitted.get("decode_requests", most_requests):
        found.append(f"{most_requests:,} requests in a step (fitted: {fitted['decode_requests']:,})")
    context = fitted.get("decode_context", longest_context)
    if longest_context > context:
        prompt = fitted.get("prompt_context", 0)
        found.append(
            f"contexts of up to {longest_context:,} tokens (fitted: {context:,} in decode, "
            f"{prompt:,} in prompts)"
        )
    made_with = calibration.made_for.get("block_size")
    if made_with is not None and block_size != made_with:
        found.append(f"a block size of {block_size:,} (fitted: {made_with:,})")
    if not found:
        return ""
    return f"Beyond what these step costs were fitted to, where their error is unknown: {', '.join(found)}."
