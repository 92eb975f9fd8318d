"""The parts of TTFT for requests with and without a prefix hit."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from pagecast.planner_app.reports.style import BLUE, PURPLE, VERMILLION, chart
from pagecast.planner_app.wording.quantities import seconds

_PARTS = {
    "queue": ("queue_s", VERMILLION, ""),
    "prefix lookup": ("prefix_lookup_s", PURPLE, "x"),
    "prefill, first token included": ("prefill_s", BLUE, "/"),
}
_PATTERN = {"fillmode": "overlay", "fgcolor": "#FFFFFF", "solidity": 0.15}
# What the simulator knows no time for is said, not drawn as a zero.
_ABSENT = "No time is shown for a first decode step (the step that ends a prompt gives the first token)."
_LOADS = "The queue includes loads from host memory."


def ttft_parts(requests: pd.DataFrame, *, tiers: bool = False) -> go.Figure:
    """Mean queue, lookup and prefill of requests with a prefix hit, and of those without.

    `tiers`: there is a host tier, whose loads requests wait for in the queue.
    """
    got = requests[requests["ttft_s"].notna()]
    hit = got["cached_tokens"] > 0
    groups = {
        f"{name} ({len(rows):,})": rows
        for name, rows in (("with a prefix hit", got[hit]), ("without", got[~hit]))
        if len(rows)
    }
    caption = " ".join((_conclusion(got[hit], got[~hit]), *([_LOADS] if tiers else []), _ABSENT))
    figure = chart("What TTFT is made of", caption, "mean seconds", "", barmode="stack", height=260)
    figure.update_yaxes(autorange="reversed")
    for title, (name, color, pattern) in _PARTS.items():
        means = [float(rows[name].mean()) for rows in groups.values()]
        figure.add_bar(
            x=means,
            y=list(groups),
            name=title,
            orientation="h",
            marker={"color": color, "pattern": {"shape": pattern, **_PATTERN}},
            hovertemplate="%{x:.4g} s",
        )
    return figure


def _conclusion(hit: pd.DataFrame, missed: pd.DataFrame) -> str:
    got = hit if len(hit) else missed
    if not len(got):
        return "No request was given a token."
    if not len(hit) or not len(missed):
        which = "found a prefix in the cache" if len(hit) else "found nothing in the cache"
        return f"Every request {which}; mean TTFT {seconds(float(got['ttft_s'].mean()))}."
    part = max(_PARTS, key=lambda title: float(missed[_PARTS[title][0]].mean()))
    return (
        f"Mean TTFT is {seconds(float(hit['ttft_s'].mean()))} with a hit and "
        f"{seconds(float(missed['ttft_s'].mean()))} without, where most of it is {part.split(',')[0]}."
    )
