"""Charts of the Fleet page: hits per router, and TTFT over time with a replica lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from pagecast.planner_app.dashboard.fleet.study import FleetRun, FleetStudy
from pagecast.planner_app.reports.fleet_charts import NamedRun
from pagecast.planner_app.reports.style import BLUE, GREY, chart, label, line
from pagecast.planner_app.wording.quantities import counted, seconds, share
from pagecast.traces.arrays import Floats

_SPANS = 60  # parts of the time for which TTFT is shown
_WORSE = 1.2  # times the highest TTFT without the loss: more than chance
_SOON = 3  # spans after the loss within which its effect must begin


def hits_per_router(table: pd.DataFrame) -> go.Figure:
    """Share of prompt tokens that each router found cached."""
    fastest: Any = table.sort_values("ttft_p99_s", kind="stable").iloc[0]
    words = f"Lowest TTFT p99: {fastest['router']}, {seconds(fastest['ttft_p99_s'])}."
    if table["token_hit_rate"].notna().all():
        best: Any = table.sort_values("token_hit_rate", ascending=False, kind="stable").iloc[0]
        words = f"Most hits: {best['router']}, {share(best['token_hit_rate'])}. {words}"
    else:
        words = f"Hits are unknown, for the trace has no contents. {words}"
    figure = chart("Hits per router", words, "", "prompt tokens found cached", yaxis_tickformat=".0%")
    figure.add_bar(
        x=[label(name) for name in table["router"]],
        y=table["token_hit_rate"],
        marker_color=BLUE,
        text=[f"TTFT p99<br>{seconds(value)}" for value in table["ttft_p99_s"]],
        textangle=0,
        hovertemplate="%{y:.1%}, %{text}<extra>%{x}</extra>",
    )
    return figure


def a_replicas_death(study: FleetStudy) -> go.Figure:
    """TTFT p90 by arrival with and without the loss of a replica."""
    assert study.lost is not None and study.loss_s is not None
    figure = chart(
        "One replica's death", death_in_words(study), "seconds", "TTFT p90, seconds (log)", yaxis_type="log"
    )
    for index, (name, run) in enumerate(_runs(study)):
        times, values = ttft_over_time(run)
        figure.add_scatter(
            x=times,
            y=values,
            name=name,
            mode="lines",
            line=line(index),
            hovertemplate=f"%{{y:.3g}} s at %{{x:.4g}} s<extra>{label(name)}</extra>",
        )
    figure.add_vline(x=study.loss_s, line={"color": GREY, "dash": "dot"}, annotation_text="lost")
    return figure


def death_in_words(study: FleetStudy) -> str:
    """The effect of the loss: requests sent again, TTFT, and the time until TTFT is as without it."""
    assert study.lost is not None and study.loss_s is not None
    fleet = study.lost.summary["fleet"]
    before, after = (run.summary["ttft_s"]["p99"] for run in (study.run, study.lost))
    sent = f"{counted(fleet['retries'], 'request')} sent again"
    rejected = study.lost.summary["rejected"] - study.run.summary["rejected"]
    refused = f", {rejected:,} rejected" if rejected > 0 else ""
    recovered = recovery_s(study)
    until = "; TTFT does not recover"
    if recovered is not None:
        until = f"; TTFT recovers after {seconds(recovered)}"
    if recovered == 0:
        until = ": no more than it differs by chance"
    return f"{sent}{refused}; TTFT p99 {seconds(after)} instead of {seconds(before)}{until}."


def recovery_s(study: FleetStudy) -> float | None:
    """Seconds from the loss until TTFT p90 is within what it is without it; None: it never is.

    0: the loss shows no more than chance does. Each span is compared with the highest of the replays without
    the loss; its effect is the spans in a row that are above, from one soon after the loss on.
    """
    assert study.lost is not None and study.loss_s is not None
    edges = _edges(study.run)
    without = np.fmax.reduce([_p90(run, edges) for run in (study.run, *study.others)])
    with_loss = _p90(study.lost, edges)
    spans = np.flatnonzero(~np.isnan(without + with_loss) & (edges[1:] > study.loss_s))
    worse = (with_loss > _WORSE * without)[spans]
    if not worse[:_SOON].any():
        return 0.0
    first = int(np.argmax(worse))
    back = np.flatnonzero(~worse[first:])
    return float(edges[spans[first + back[0]]] - study.loss_s) if len(back) else None


def ttft_over_time(run: FleetRun) -> tuple[Floats, Floats]:
    """The middles of spans of time, and TTFT p90 of the requests that arrived in each."""
    edges = _edges(run)
    return (edges[1:] + edges[:-1]) / 2, _p90(run, edges)


def _edges(run: FleetRun) -> Floats:
    return np.linspace(0.0, float(run.requests["arrival_s"].max()) + 1e-9, _SPANS + 1)


def _p90(run: FleetRun, edges: Floats) -> Floats:
    rows = run.requests[run.requests["ttft_s"].notna()]
    arrival_s = rows["arrival_s"].to_numpy(np.float64)
    spans = np.clip(np.searchsorted(edges, arrival_s, "right") - 1, 0, _SPANS - 1)
    by_span = rows["ttft_s"].groupby(spans).quantile(0.9)
    return by_span.reindex(range(_SPANS)).to_numpy(np.float64)


def named(study: FleetStudy) -> list[NamedRun]:
    """The study's runs for charts over time."""
    return [(name, run.timeline, run.summary) for name, run in _runs(study)]


def _runs(study: FleetStudy) -> list[tuple[str, FleetRun]]:
    if study.lost is None:
        return [("the fleet", study.run)]
    return [("no loss", study.run), ("one replica lost", study.lost)]
