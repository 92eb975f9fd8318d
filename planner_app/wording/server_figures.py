"""Figures of a server and of a forecast beside it, by name, as tables show them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pagecast.planner_app.wording.quantities import seconds

_TITLES = {
    "requests_per_s": "requests/s",
    "prompt_tokens_per_s": "prompt tokens/s",
    "output_tokens_per_s": "output tokens/s",
    "running": "running",
    "waiting": "waiting",
    "kv_usage": "KV use",
    "hit_rate": "hit rate",
    "preemptions": "preemptions",
    "num_gpu_blocks": "KV blocks",
}
_MEANS = ("ttft_s", "tpot_s", "e2e_s")
_AGREES_PERCENT = 10.0  # by which means of latencies may be off in a forecast that agrees
_SHARES = ("kv_usage", "hit_rate")
_COUNTS = ("preemptions", "num_gpu_blocks")


def title(name: str) -> str:
    """A figure's name in a table: `ttft_s.p99` is TTFT p99, `ttft_s` the mean."""
    if name in _TITLES:
        return _TITLES[name]
    latency, _, statistic = name.partition(".")
    return f"{latency.removesuffix('_s').upper()} {statistic or 'mean'}"


def figure(name: str, value: float | None) -> str:
    """A figure with its unit."""
    if value is None or not math.isfinite(value):
        return "-"
    if name in _SHARES:
        return f"{value:.1%}"
    if name in _COUNTS:
        return f"{value:,.0f}"
    if name.endswith("_per_s") or name in ("running", "waiting"):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return seconds(value)


def percent(value: float | None) -> str:
    """A difference."""
    return "-" if value is None or not math.isfinite(value) else f"{value:+z.1f}%"


def verdict(errors: Iterable[tuple[str, float | None]]) -> str:
    """Whether a forecast agrees, of figures and their errors in percent: judged by the means of latencies."""
    means = {
        name: error
        for name, error in errors
        if name.removesuffix(".mean") in _MEANS and error is not None and math.isfinite(error)
    }
    if not means:
        return "nothing to compare: no mean of a latency is known on both sides"
    told = ", ".join(f"{title(name)} {percent(error)}" for name, error in means.items())
    most = max(map(abs, means.values()))
    if most <= _AGREES_PERCENT:
        return f"agrees: means within {max(math.ceil(most), 1)}% (forecast: {told})"
    return f"differs (forecast: {told})"
