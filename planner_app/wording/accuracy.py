"""Sentences on the accuracy of a forecast beside its recorded run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pagecast.planner_app.wording.note_sentences import sentences
from pagecast.sim.costs.measured.corrections import Corrections
from pagecast.sim.runs.block_count import BlockCount
from pagecast.sim.runs.forecast import Forecast, ForecastRow

NINETY = 1.645  # standard deviations to either side that hold 90% of a normal distribution
_BULK, _TAIL = ("mean", "p50", "p90"), ("p99",)
_LEAST_COVERED = 0.8  # of measurements, for intervals to be relied on
_STEEP = 10.0  # percent that a figure changes by within 1% of step time, from which on it is no forecast


def accuracy_sentences(forecast: Forecast) -> tuple[str, ...]:
    """Errors, the share of intervals that hold, the figure that step time changes most, the block count."""
    blocks = "" if forecast.blocks is None else blocks_sentence(forecast.blocks)
    parts = (_errors(forecast), _coverage(forecast), _steep(forecast), blocks)
    return tuple(part for part in parts if part)


def expected_error(forecast: Forecast) -> str:
    """The error to expect of the step costs, and all that qualifies the comparison."""
    return " ".join(sentences(forecast.notes))


def as_json(forecast: Forecast) -> dict[str, Any]:
    """The forecast as printed in JSON, with sentences for its notes."""
    return {**forecast.as_dict(), "expected_error": expected_error(forecast)}


def blocks_sentence(blocks: BlockCount) -> str:
    """The KV block count predicted from model and GPU, beside the run's own."""
    if blocks.error_percent is None:
        return (
            f"KV blocks: {blocks.predicted:,} predicted from model and GPU alone; the {blocks.measured:,} of "
            "this run were set by hand and check nothing."
        )
    return (
        f"KV blocks: {blocks.predicted:,} predicted from model and GPU alone, {blocks.measured:,} measured "
        f"({blocks.error_percent:+.1f}%)."
    )


def corrections_lines(corrections: Corrections) -> list[str]:
    """Fitted corrections, each with its 90% interval and what was learnt of it, and errors of the fit."""
    lines = []
    for source in corrections.sources:
        errors = ", ".join(
            f"{key.upper()} {source[f'{key}_percent_before']:+.1f}% before, "
            f"{source[f'{key}_percent_after']:+.1f}% after"
            for key in ("tpot", "e2e", "ttft", "decode", "prompt")
            if f"{key}_percent_before" in source
        )
        what = "requests, mean error" if "tpot_percent_before" in source else "steps, median error"
        lines.append(f"{source['name']}, {source['requests']:,} {what}: {errors}")
    titles = ("host time that each step adds", "decode steps", "steps with prompts")
    for at, title in enumerate(titles):
        sd, prior = corrections.sd[at], corrections.prior_sd[at]
        learnt = "little" if sd > 0.7 * prior else "something" if sd > 0.3 * prior else "much"
        if at == 0:
            middle, reach = corrections.step_s * 1e3, NINETY * sd
            figures = f"{middle:+.2f} ms, {middle - reach:+.2f} to {middle + reach:+.2f}"
        else:
            middle = (corrections.decode, corrections.prompt)[at - 1]
            low, high = (middle * math.exp(sign * NINETY * sd) for sign in (-1, 1))
            figures = f"x {middle:.3f}, {low:.3f} to {high:.3f}"
        lines.append(f"{title}: {figures} (90%); these results say {learnt} of it")
    return lines


def _errors(forecast: Forecast) -> str:
    rows = {row.name: row for row in forecast.rows}

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


def _coverage(forecast: Forecast) -> str:
    coverage = forecast.coverage()
    share, width = coverage["covered"], coverage["median_half_width_percent"]
    if share is None or width is None:
        return ""
    text = (
        f"{forecast.run}: {100 * share:.0f}% of {coverage['figures']} measurements lie in their 90% "
        f"interval. The median interval is {2 * width:.1f}% of the measured value wide "
        f"(half-width {width:.1f}%); many are wider on one side."
    )
    if share < _LEAST_COVERED:
        text += f" Fewer than {_LEAST_COVERED:.0%} do: do not rely on the intervals of this run."
    return text


def _steep(forecast: Forecast) -> str:
    def reach(row: ForecastRow) -> float:
        return max(map(abs, row.range_percent or (0.0,)))

    latencies = [row for row in forecast.rows if row.name.startswith(("ttft_s.", "e2e_s.", "tpot_s."))]
    steepest = max(latencies, key=reach)
    if reach(steepest) < _STEEP:
        return ""
    latency, _, statistic = steepest.name.partition(".")
    low, high = steepest.range_percent or (0.0, 0.0)
    return (
        "Close to saturation: a change of up to 1% in step time changes "
        f"{latency.removesuffix('_s').upper()} {statistic} by {low:+.0f} to {high:+.0f}%, and two recordings "
        "of one load can differ by more. Use the interval, not the single figure."
    )
