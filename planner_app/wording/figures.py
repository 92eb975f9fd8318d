"""Figures as people read them: their names, their values and their axes.

Names come in two forms: a summary's `ttft_s.p99`, and the flat `ttft_p99_s` of tables of trials.
"""

from __future__ import annotations

import re

from pagecast.planner_app.wording.quantities import seconds

_TITLES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "e2e": "E2E",
    "ttft_cached": "TTFT with a hit",
    "ttft_uncached": "TTFT without a hit",
    "output_tokens_per_s": "output tokens/s",
    "peak_kv_usage": "KV in use at peak",
    "token_hit_rate": "prefix hit rate",
    "gpus": "GPUs",
    "usd_per_hour": "cost per hour",
    "usd_per_million_output_tokens": "cost of a million output tokens",
}
_UNITS = {
    "output_tokens_per_s": "output tokens/s",
    "usd_per_hour": "USD/hour",
    "gpus": "GPUs",
    "usd_per_million_output_tokens": "USD per million output tokens",
    "token_hit_rate": "prefix hit rate, share",
    "peak_kv_usage": "KV in use at peak, share",
}
_FLAT = re.compile(r"(\w+)_(mean|max|p\d+)_s")


def title(name: str) -> str:
    """A figure's name: `TTFT p90` for `ttft_s.p90` and `ttft_p90_s`, `evicted blocks` for others."""
    stem, statistic = _parts(name)
    words = _TITLES.get(stem, stem.replace("_", " "))
    return f"{words} {statistic}" if statistic else words


def axis(name: str) -> str:
    """The same with its unit."""
    return _UNITS.get(name, f"{title(name)}, seconds" if is_duration(name) else title(name))


def shown(name: str, value: float | None) -> str:
    """A figure's value: a duration for names in `_s`, else a plain number; `-` for none."""
    if value is None or value != value:
        return "-"
    if is_duration(name):
        return seconds(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.4g}"


def is_duration(name: str) -> bool:
    """Whether a figure is a number of seconds."""
    stem = name.partition(".")[0]
    return stem.endswith("_s") and not stem.endswith("per_s")


def _parts(name: str) -> tuple[str, str]:
    """The figure without its unit, and the statistic of it."""
    flat = _FLAT.fullmatch(name)
    if flat is not None:
        return flat[1], flat[2]
    stem, _, statistic = name.partition(".")
    return stem.removesuffix("_s") if is_duration(name) else stem, statistic
