"""Charts of fleets: replicas over time, and requests per replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from pagecast.planner_app.reports.style import BLUE, chart, label, line
from pagecast.planner_app.wording.quantities import counted, share
from pagecast.sim.fleet.figures import ready_over_time

NamedRun = tuple[str, pd.DataFrame, dict[str, Any]]
"""A fleet's name, its timeline and its summary."""


def replicas_over_time(runs: Sequence[NamedRun]) -> go.Figure:
    """How many replicas take requests at each time; the caption is of the first run."""
    _, timeline, summary = runs[0]
    most = int(ready_over_time(timeline)["replicas"].max())
    words = f"{counted(most, 'replica')} at most; {summary['fleet']['gpu_hours']:.2f} GPU hours."
    figure = chart(
        "Replicas over time", words, "seconds", "replicas that take requests", yaxis_rangemode="tozero"
    )
    for index, (name, events, figures) in enumerate(runs):
        table = ready_over_time(events)
        end_s = max(float(figures["makespan_s"]), float(table["time_s"].max()))
        figure.add_scatter(
            x=[*table["time_s"], end_s],
            y=[*table["replicas"], table["replicas"].iloc[-1]],
            name=label(name),
            mode="lines",
            line=line(index, shape="hv"),
            hovertemplate=f"%{{y}} at %{{x:.4g}} s<extra>{label(name)}</extra>",
        )
    return figure


def requests_per_replica(fleet: dict[str, Any]) -> go.Figure:
    """How many requests ended on each replica, of a summary's `fleet`."""
    words = f"The busiest replica did {fleet['imbalance']:.2f} times an even share of the work."
    figure = chart("Requests per replica", words, "", "requests")
    rows = fleet["by_replica"]
    figure.add_bar(
        x=[label(row["replica"]) for row in rows],
        y=[row["requests"] for row in rows],
        marker_color=BLUE,
        text=[f"{share(row['token_hit_rate'])} hits" for row in rows],
        hovertemplate="%{y:,} requests, %{text}<extra>%{x}</extra>",
    )
    return figure
