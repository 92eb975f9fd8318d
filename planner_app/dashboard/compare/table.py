"""The table and the chart that set pinned views side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from pagecast.planner_app.dashboard.shell.cards import change
from pagecast.planner_app.dashboard.shell.elements import cost_words, plain
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.reports.style import chart, label, line, quantiles
from pagecast.planner_app.wording.quantities import seconds
from pagecast.sim.replay import Result
from pagecast.sim.replay.replicates import summary_figures

_ROWS: dict[str, tuple[str, Callable[[float], str]]] = {
    "TTFT p50": ("ttft_s.p50", seconds),
    "TTFT p99": ("ttft_s.p99", seconds),
    "TPOT p50": ("tpot_s.p50", seconds),
    "TPOT p99": ("tpot_s.p99", seconds),
    "E2E p99": ("e2e_s.p99", seconds),
    "Queue p99": ("queue_s.p99", seconds),
    "Output tokens/s": ("output_tokens_per_s", "{:,.0f}".format),
    "Prefix reuse": ("token_hit_rate", "{:.1%}".format),
    "KV in use at peak": ("peak_kv_usage", "{:.1%}".format),
    "Preemptions": ("preemptions", "{:,.0f}".format),
    "Rejected": ("rejected", "{:,.0f}".format),
}
_SHARES = ("token_hit_rate", "peak_kv_usage")
_LATENCIES = {"TTFT": "ttft_s", "TPOT": "tpot_s"}


def table(results: Mapping[str, Result], views: Mapping[str, PageView], baseline: str) -> pd.DataFrame:
    """One column per view, one row per figure with its change against the baseline, as Markdown texts."""
    figures = {name: summary_figures(result) for name, result in results.items()}
    base = figures.get(baseline, {})
    columns = {}
    for name, result in results.items():
        cells = {"Differs in": _differences(views[name], views.get(baseline, PageView()))}
        cells["KV blocks"] = plain(f"{result.summary['num_gpu_blocks']:,}")
        for title, (figure, words) in _ROWS.items():
            against = None if name == baseline else base.get(figure)
            cells[title] = plain(_cell(figures[name].get(figure), against, words, figure in _SHARES))
        cells["Step costs"] = plain(cost_words(result.summary["costs"]).removeprefix("costs "))
        columns[plain(name) + (" (baseline)" if name == baseline else "")] = cells
    return pd.DataFrame(columns)


def _cell(value: float | None, base: float | None, words: Callable[[float], str], share: bool) -> str:
    if value is None or np.isnan(value):
        return "–"
    if not base or np.isnan(base):
        return words(value)
    return f"{words(value)} ({change(value, base, share=share)})"


def _differences(view: PageView, base: PageView) -> str:
    parts = [
        f"{name} {own}" for name, _, own in view.differences(base) if name not in ("slo", "prices", "upload")
    ]
    return plain(", ".join(parts) or "–")


def distributions(results: Mapping[str, Result], title: str) -> go.Figure:
    """The percent of requests within each TTFT or TPOT, one line per view."""
    name = _LATENCIES[title]
    latencies = {
        view: values[np.isfinite(values)]
        for view, result in results.items()
        if len(values := result.requests[name].to_numpy(np.float64))
    }
    latencies = {view: values for view, values in latencies.items() if len(values)}
    figure = chart(
        f"{title} of requests",
        _winner(latencies),
        "seconds (log)",
        "% of requests within",
        xaxis_type="log",
        yaxis_range=[0, 101],
    )
    for index, (view, values) in enumerate(latencies.items()):
        at, share = quantiles(np.maximum(values, 1e-6))
        figure.add_scatter(x=at, y=share, name=label(view), line=line(index))
    return figure


def _winner(latencies: Mapping[str, np.ndarray]) -> str:
    if not latencies:
        return "No request reached it."
    p99 = {view: float(np.percentile(values, 99)) for view, values in latencies.items()}
    best, worst = min(p99, key=p99.__getitem__), max(p99, key=p99.__getitem__)
    if best == worst or p99[best] == p99[worst]:
        return f"99% of requests are within {seconds(p99[best])}."
    return f"Lowest p99: {best}, {seconds(p99[best])}. Highest: {worst}, {seconds(p99[worst])}."
