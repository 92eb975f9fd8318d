"""Charts of a replay: one function a chart, from the tables of `Result` to a plotly figure.

The HTML reports and the dashboard draw the same ones. Each has units on its axes and a caption that says
what these figures amount to (`style.caption_of`). Needs plotly.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from pagecast.planner_app.reports.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILLION,
    chart,
    line,
    marker,
    peaks,
    quantiles,
)
from pagecast.planner_app.wording.quantities import seconds
from pagecast.sim.replay.metrics import cached_and_uncached
from pagecast.traces.arrays import Floats

TITLES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "e2e_s": "E2E",
    "queue_s": "queue",
    "prefill_s": "prefill",
    "decode_s": "decode",
    "prefix_lookup_s": "prefix lookup",
}
_LEAST_S = 1e-6  # shorter times are drawn as this, for an axis of logarithms has no zero
_WINDOWS = 40


def latencies(requests: pd.DataFrame, names: tuple[str, ...] = ("ttft_s", "tpot_s", "e2e_s")) -> go.Figure:
    """The percent of requests within each latency."""
    figure = chart(
        "Latency of requests",
        _tail(requests),
        "seconds (log)",
        "% of requests within",
        xaxis_type="log",
        yaxis_range=[0, 101],
    )
    for index, name in enumerate(names):
        values = _finite_values(requests, name)
        if len(values):
            at, share = quantiles(np.maximum(values, _LEAST_S))
            figure.add_scatter(x=at, y=share, name=TITLES[name], line=line(index))
    return figure


def _tail(requests: pd.DataFrame) -> str:
    values = _finite_values(requests, "ttft_s")
    if not len(values):
        return "No request was given a token."
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    text = f"Half of the requests have their first token within {seconds(p50)}, 99% within {seconds(p99)}"
    return f"{text} ({p99 / p50:.1f} times as long)." if p50 > 0 else f"{text}."


def where_ttft_goes(requests: pd.DataFrame) -> go.Figure:
    """Mean queue, lookup and prefill of all requests, of the slowest tenth and of the slowest hundredth."""
    got = requests[requests["ttft_s"].notna()].sort_values("ttft_s", kind="stable")
    parts = {"queue": "queue_s", "prefix lookup": "prefix_lookup_s", "prefill": "prefill_s"}
    groups = {"all requests": 1.0, "slowest 10%": 0.1, "slowest 1%": 0.01}
    slices = {name: got.tail(max(round(len(got) * share), 1)) for name, share in groups.items()}
    slow = slices["slowest 1%"]
    total = float(slow["ttft_s"].mean()) if len(slow) else 0.0
    queue = float(slow["queue_s"].mean()) / total if total else 0.0
    caption = "No request was given a token."
    if len(slow):
        advice = (
            "shorter steps, more GPUs or less load"
            if queue > 0.5
            else "shorter prompts, more reuse or a faster GPU"
        )
        caption = f"The slowest 1% spend {queue:.0%} of TTFT in the queue: {advice} would help them most."
    figure = chart("Where TTFT goes", caption, "mean seconds", "", barmode="stack")
    figure.update_yaxes(autorange="reversed")
    for (title, name), color in zip(parts.items(), (VERMILLION, GREY, BLUE), strict=True):
        means = [float(rows[name].mean()) if len(rows) else 0.0 for rows in slices.values()]
        figure.add_bar(x=means, y=list(slices), name=title, orientation="h", marker_color=color)
    return figure


def latency_over_time(requests: pd.DataFrame, name: str = "ttft_s") -> go.Figure:
    """Median and 99th percentile (or maximum, of fewer than 100) of a latency by time of arrival."""
    got = requests[requests[name].notna()]
    title = f"{TITLES[name]} over time"
    if not len(got):
        return chart(title, "No request reached it.", "arrival, seconds", f"{TITLES[name]}, seconds")
    arrival = got["arrival_s"].to_numpy(np.float64)
    count = max(1, min(_WINDOWS, len(got) // 10))
    edges = np.linspace(arrival.min(), arrival.max(), count + 1)
    window = np.clip(np.searchsorted(edges, arrival, "right") - 1, 0, count - 1)
    groups = got[name].groupby(window)
    middle = (edges[:-1] + edges[1:]) / 2
    upper = groups.quantile(0.99)
    worst, usual = int(upper.to_numpy().argmax()), float(upper.median())
    at = float(middle[upper.index[worst]])
    caption = (
        f"The slowest window is around {seconds(at)} (p99 {seconds(float(upper.iloc[worst]))}; in the usual "
        f"window {seconds(usual)}). A curve that keeps rising means more load than the server can serve."
    )
    figure = chart(title, caption, "arrival, seconds", f"{TITLES[name]}, seconds (log)", yaxis_type="log")
    for index, (label, values) in enumerate((("p50", groups.median()), ("p99", upper))):
        figure.add_scatter(
            x=middle[values.index],
            y=np.maximum(values.to_numpy(), _LEAST_S),
            name=label,
            mode="lines+markers",
            line=line(index),
            marker=marker(index, size=5),
        )
    return figure


def cached_and_uncached_ttft(requests: pd.DataFrame) -> go.Figure:
    """Median TTFT with and without a prefix hit, by the number of requests that waited on arrival.

    Hits are more frequent while the queue is short; only equal queues can be compared.
    """
    got = requests[requests["ttft_s"].notna()]
    bins = np.ceil(np.log2(got["queue_depth"].to_numpy(np.float64) + 1)).astype(np.int64)
    hit = got["cached_tokens"].to_numpy() > 0
    depths = np.unique(bins)
    names = [_depths(int(number)) for number in depths]
    figure = chart(
        "TTFT with and without a prefix hit, at equal queue depth",
        _saving(requests),
        "requests waiting on arrival",
        "TTFT, seconds (log)",
        yaxis_type="log",
        scattermode="group",
    )
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=names)
    ttft = got["ttft_s"].to_numpy(np.float64)
    for index, (title, mask) in enumerate((("with a hit (median, bar to p90)", hit), ("without", ~hit))):
        cells = [ttft[mask & (bins == depth)] for depth in depths]
        points = [
            (name, *np.percentile(cell, (50, 90)).tolist(), len(cell))
            for name, cell in zip(names, cells, strict=True)
            if len(cell)
        ]
        if points:
            at, middle, upper, counts = (list(column) for column in zip(*points, strict=True))
            figure.add_scatter(
                x=at,
                y=middle,
                name=title,
                mode="markers",
                marker=marker(index),
                customdata=counts,
                error_y={"array": np.subtract(upper, middle), "arrayminus": [0.0] * len(at)},
                hovertemplate="%{y:.4g} s, of %{customdata:,} requests",
            )
    return figure


def _depths(number: int) -> str:
    low, high = (0, 0) if number == 0 else (2 ** (number - 1), 2**number - 1)
    return f"{low}" if low == high else f"{low}-{high}"


def _saving(requests: pd.DataFrame) -> str:
    cached, uncached = cached_and_uncached(requests)
    with_hit, without = cached["p50"], uncached["p50"]
    if with_hit is None or without is None:
        return "No queue depth saw requests of both kinds: there is nothing to compare fairly."
    ratio = without / with_hit if with_hit else float("inf")
    change = f"{ratio:.1f} times as long" if ratio >= 1.05 else "no longer"
    return (
        f"Weighted to equal queue depths, the median TTFT is {seconds(with_hit)} with a prefix hit and "
        f"{seconds(without)} without: {change}. Prompts of the two kinds may differ in length."
    )


def load_over_time(steps: pd.DataFrame) -> go.Figure:
    """Running and waiting requests over time, the most in each span of it."""
    running, most = (int(steps[name].max()) if len(steps) else 0 for name in ("running", "waiting"))
    waiting_rest = (
        f"{most:,} were left waiting after a step was planned. A queue that does not empty between bursts is "
        "a sign of overload."
        if most
        else "none was left waiting after a step was planned: what arrives during a step waits for its end."
    )
    caption = f"At most {running:,} requests ran at once, and {waiting_rest}"
    figure = chart("Requests over time", caption, "seconds", "requests")
    _lines(figure, steps, {"running": "running", "waiting": "waiting"})
    return figure


def kv_over_time(steps: pd.DataFrame, num_blocks: int) -> go.Figure:
    """Percent of the KV blocks in use over time, and the most."""
    used = 100 * steps["used_blocks"] / max(num_blocks, 1)
    most = float(used.max()) if len(used) else 0.0
    if most > 95:
        advice = "the cache is full at times, and requests wait or are preempted for blocks."
    elif most < 50:
        advice = "more than half of it never held a running request's KV; it serves to keep prefixes."
    else:
        advice = "there is room for somewhat more load."
    figure = chart(
        "KV cache in use over time",
        f"At its peak {most:.0f}% of {num_blocks:,} blocks: {advice}",
        "seconds",
        "% of KV blocks in use",
        yaxis_rangemode="tozero",
    )
    _lines(figure, steps.assign(used=used), {"used": "in use"})
    if most > 50:
        figure.add_hline(y=100, line={"color": GREY, "dash": "dot"})
    return figure


def _lines(figure: go.Figure, steps: pd.DataFrame, columns: dict[str, str]) -> None:
    if not len(steps):
        return
    time_s, until = steps["start_ns"].to_numpy() / 1e9, float(steps["end_ns"].max()) / 1e9
    for index, (name, title) in enumerate(columns.items()):
        at, value = peaks(time_s, steps[name].to_numpy(np.float64), until)
        figure.add_scatter(x=at, y=value, name=title, line=line(index, shape="hv", width=1.5))


def step_time(steps: pd.DataFrame) -> go.Figure:
    """Seconds that went into decode-only steps, into steps with prompt chunks, and into none."""
    sums = _busy_s(steps)
    total = sum(sums.values()) or 1.0
    caption = (
        f"The replica idles {sums['idle'] / total:.0%} of the time; in "
        f"{sums['prompts and decodes'] / total:.0%} of it decodes wait for prompts in the same step, which "
        "is what makes TPOT uneven."
    )
    figure = chart("Where the replica's time goes", caption, "seconds", "", height=240)
    figure.update_layout(showlegend=False)
    figure.update_yaxes(autorange="reversed")
    figure.add_bar(
        x=list(sums.values()),
        y=list(sums),
        orientation="h",
        marker_color=[BLUE, PURPLE, VERMILLION, GREY],
        text=[f"{value / total:.0%}" for value in sums.values()],
        textposition="auto",
    )
    return figure


def _busy_s(steps: pd.DataFrame) -> dict[str, float]:
    start, end = (steps[name].to_numpy(np.float64) / 1e9 for name in ("start_ns", "end_ns"))
    busy = end - np.maximum(start, np.concatenate([[0.0], end])[:-1])
    prompts, decodes = steps["prefill_n"].to_numpy() > 0, steps["decode_n"].to_numpy() > 0
    sums = {
        "decode only": float(busy[~prompts].sum()),
        "prompts and decodes": float(busy[prompts & decodes].sum()),
        "prompts only": float(busy[prompts & ~decodes].sum()),
    }
    sums["idle"] = max(float(end[-1] - start[0]) - sum(sums.values()), 0.0) if len(steps) else 0.0
    return sums


def step_tokens(steps: pd.DataFrame, max_num_batched_tokens: int) -> go.Figure:
    """Tokens computed in a step over time, of prompts and of decodes, the most in each span of it."""
    most = int((steps["prefill_tokens"] + steps["decode_n"]).max()) if len(steps) else 0
    full = most >= max_num_batched_tokens
    caption = f"The fullest step computed {most:,} of at most {max_num_batched_tokens:,} tokens: " + (
        "the token budget binds at times, and prompts are cut into chunks."
        if full
        else "the token budget never binds."
    )
    figure = chart("Tokens per step", caption, "seconds", "tokens in a step (log)", yaxis_type="log")
    if len(steps):
        # A logarithm has no zero: none at all is drawn below one.
        visible = pd.DataFrame({name: steps[name].clip(lower=0.5) for name in ("prefill_tokens", "decode_n")})
        visible = visible.assign(start_ns=steps["start_ns"], end_ns=steps["end_ns"])
        _lines(figure, visible, {"prefill_tokens": "prompt tokens", "decode_n": "decode tokens"})
        figure.update_yaxes(range=[-0.1, float(np.log10(max(most, 2))) + 0.2])
    return figure


def hits_by_length(requests: pd.DataFrame) -> go.Figure:
    """Prompt tokens found in the cache and computed, by the length of the prompt."""
    got = requests[requests["admitted_s"].notna()]
    bins = np.floor(np.log2(np.maximum(got["input_tokens"].to_numpy(np.float64), 1))).astype(np.int64)
    sums = got[["input_tokens", "cached_tokens"]].groupby(bins).sum()
    names = [f"{2 ** int(number):,}+" for number in sums.index]
    total, cached = int(sums["input_tokens"].sum()), int(sums["cached_tokens"].sum())
    caption = (
        f"{cached / total:.0%} of all prompt tokens were found in the cache and not computed."
        if total
        else "No request was admitted."
    )
    figure = chart(
        "Prompt tokens by length of prompt",
        caption,
        "prompt length, tokens (from)",
        "prompt tokens",
        barmode="stack",
    )
    figure.update_xaxes(type="category")
    hits = sums["cached_tokens"].to_numpy()
    figure.add_bar(x=names, y=hits, name="found in the cache", marker_color=GREEN)
    rest = sums["input_tokens"].to_numpy() - hits
    figure.add_bar(x=names, y=rest, name="computed", marker={"color": ORANGE, "pattern": {"shape": "/"}})
    return figure


def replay_charts(
    requests: pd.DataFrame, steps: pd.DataFrame, num_blocks: int, max_num_batched_tokens: int
) -> list[go.Figure]:
    """All charts of a replay, the most telling first; those over steps only where steps were kept."""
    figures = [
        latencies(requests),
        where_ttft_goes(requests),
        latency_over_time(requests),
        cached_and_uncached_ttft(requests),
        hits_by_length(requests),
    ]
    if len(steps):
        figures += [
            load_over_time(steps),
            kv_over_time(steps, num_blocks),
            step_time(steps),
            step_tokens(steps, max_num_batched_tokens),
        ]
    return figures


def _finite_values(requests: pd.DataFrame, name: str) -> Floats:
    values = requests[name].to_numpy(np.float64)
    return np.asarray(values[np.isfinite(values)], np.float64)
