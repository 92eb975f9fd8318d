"""How accurate a forecast was, in sentences for people who do not read tables of percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pagecast.sim.machine.block_count import BlockCount
from pagecast.sim.runs.forecast import Forecast, ForecastRow

_BULK, _TAIL = ("mean", "p50", "p90"), ("p99",)
_LEAST_COVERED = 0.8  # of measurements, for intervals to be believed
_STEEP = 10.0  # percent of change within 1% of step time from which a figure is a matter of luck


def sentences(found: Forecast) -> tuple[str, ...]:
    """What was near, how often intervals held, what is not to be trusted, and the block count."""
    said = (_errors(found), _coverage(found), _steep(found), *_blocks(found.blocks))
    return tuple(sentence for sentence in said if sentence)


def blocks_sentence(blocks: BlockCount) -> str:
    """The block count expected from model and GPU alone, beside the run's own."""
    if blocks.error_percent is None:
        return (
            f"KV blocks: this run's {blocks.measured:,} were set by hand, so that they check nothing; "
            f"{blocks.predicted:,} are expected to fit, from model and GPU alone."
        )
    return (
        f"KV blocks: {blocks.predicted:,} expected from model and GPU alone, {blocks.measured:,} measured "
        f"({blocks.error_percent:+.1f}%)."
    )


def _blocks(blocks: BlockCount | None) -> tuple[str, ...]:
    return () if blocks is None else (blocks_sentence(blocks),)


def _errors(found: Forecast) -> str:
    rows = {row.name: row for row in found.rows}

    def worst(names: Iterable[str], statistics: Iterable[str]) -> str:
        errors = [abs(rows[f"{name}.{key}"].error_percent) for name in names for key in statistics]
        finite = [error for error in errors if math.isfinite(error)]
        return f"{max(finite):.1f}%" if finite else "an unknown part"

    steady = ("tpot_s", "e2e_s")
    return (
        f"Forecast and measurement differ by up to {worst(steady, _BULK)} in TPOT and E2E (mean, p50, p90; "
        f"p99: {worst(steady, _TAIL)}), {worst(['ttft_s'], _BULK)} in TTFT (p99: {worst(['ttft_s'], _TAIL)}) "
        f"and {abs(rows['makespan_s'].error_percent):.1f}% in makespan."
    )


def _coverage(found: Forecast) -> str:
    coverage = found.coverage()
    share, width = coverage["covered"], coverage["median_half_width_percent"]
    if share is None or width is None:
        return ""
    told = (
        f"{found.run}: {100 * share:.0f}% of {coverage['figures']} measurements lie in their 90% interval; "
        f"the median interval spans {2 * width:.1f}% of the measured value (half-width {width:.1f}%; many "
        "reach further to one side)."
    )
    if share < _LEAST_COVERED:
        told += " Fewer than 80%: these costs know less of this run than they claim; trust no interval here."
    return told


def _steep(found: Forecast) -> str:
    def reach(row: ForecastRow) -> float:
        return max(map(abs, row.range_percent or (0.0,)))

    latencies = [row for row in found.rows if row.name.startswith(("ttft_s.", "e2e_s.", "tpot_s."))]
    steepest = max(latencies, key=reach)
    if reach(steepest) < _STEEP:
        return ""
    latency, _, statistic = steepest.name.partition(".")
    low, high = steepest.range_percent or (0.0, 0.0)
    return (
        "Close to saturation: step times within 1%, less than two recordings of one load may differ by, move "
        f"{latency.removesuffix('_s').upper()} {statistic} by {low:+.0f} to {high:+.0f}%; go by its "
        "interval, not by its figure."
    )
