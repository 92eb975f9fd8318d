"""Figures as people read them: their names and their values."""

from __future__ import annotations

from pagecast.planner_app import console

_TITLES = {
    "ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E", "queue_s": "queue", "prefill_s": "prefill",
    "decode_s": "decode", "prefix_lookup_s": "prefix lookup", "ttft_cached_s": "TTFT with a hit",
    "ttft_uncached_s": "TTFT without a hit", "output_tokens_per_s": "output tokens/s",
    "makespan_s": "makespan", "prefill_avoided_s": "prefill avoided", "peak_kv_usage": "KV in use at peak",
    "token_hit_rate": "prefix hit rate",
}  # fmt: skip


def title(name: str) -> str:
    """A figure's name: `TTFT p90` for `ttft_s.p90`, `reused prefix tokens` for `reused_prefix_tokens`."""
    stem, _, statistic = name.partition(".")
    said = _TITLES.get(stem, stem.replace("_", " "))
    return f"{said} {statistic}" if statistic else said


def shown(name: str, value: float | None) -> str:
    """A figure's value: a duration for names in `_s`, else a plain number; `-` for none."""
    if value is None or value != value:
        return "-"
    stem = name.partition(".")[0]
    if stem.endswith("_s") and not stem.endswith("per_s"):
        return console.seconds(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.4g}"
