"""Charts of the Load page: TTFT, goodput and cost against load, one line per GPU."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from pagecast.planner_app.reports.style import GREY, chart, label, line, marker
from pagecast.planner_app.wording.quantities import seconds

_OFFERED = "requests per second offered to one replica"


def ttft_against_load(table: pd.DataFrame, bound_s: float | None) -> go.Figure:
    """TTFT p99 of each GPU at each load; `bound_s`: the SLO's bound on it, drawn as a line."""
    figure = chart(
        "TTFT against load",
        _knees(table, bound_s),
        _OFFERED,
        "TTFT p99, seconds (log)",
        yaxis_type="log",
        xaxis_rangemode="tozero",
    )
    _lines(figure, table, "ttft_p99_s", "%{y:.3g} s at %{x:.3g}/s")
    if bound_s is not None:
        figure.add_hline(y=bound_s, line={"color": GREY, "dash": "dot"}, annotation_text="SLO")
    return figure


def goodput_against_load(table: pd.DataFrame) -> go.Figure:
    """Requests per second that keep the SLO's bounds, of each GPU at each load."""
    figure = chart(
        "Goodput against load",
        _best_goodput(table),
        _OFFERED,
        "requests per second within the SLO",
        xaxis_rangemode="tozero",
        yaxis_rangemode="tozero",
    )
    most = float(table["requests_per_s"].max())
    figure.add_scatter(
        x=[0, most],
        y=[0, most],
        name="all of them",
        mode="lines",
        line={"color": GREY, "dash": "dot", "width": 1},
        hoverinfo="skip",
    )
    _lines(figure, table, "goodput_per_s", "%{y:.3g} of %{x:.3g} requests per second")
    return figure


def cost_against_load(table: pd.DataFrame) -> go.Figure:
    """USD per million output tokens (column `usd_per_million`), of each GPU at each load."""
    figure = chart(
        "Cost against load",
        _cheapest(table),
        _OFFERED,
        "$ per million output tokens (log)",
        yaxis_type="log",
        xaxis_rangemode="tozero",
    )
    _lines(figure, table, "usd_per_million", "$%{y:.3g} at %{x:.3g}/s")
    return figure


def _lines(figure: go.Figure, table: pd.DataFrame, name: str, words: str) -> None:
    for index, (gpu, rows) in enumerate(table.groupby("gpu", sort=False)):
        points = rows[rows[name].notna()]
        figure.add_scatter(
            x=points["requests_per_s"],
            y=points[name],
            name=label(gpu),
            mode="lines+markers",
            line=line(index),
            marker=marker(index),
            hovertemplate=f"{words}<extra>{label(gpu)}</extra>",
        )


def _knees(table: pd.DataFrame, bound_s: float | None) -> str:
    """The highest load tried at which each GPU keeps the bound."""
    if bound_s is None:
        return "The steep part of a line is where requests queue: plan for a load left of it."
    parts = []
    for gpu, rows in table.groupby("gpu", sort=False):
        within_bound = rows[rows["ttft_p99_s"] <= bound_s]
        most = (
            f"up to {within_bound['requests_per_s'].max():.3g}/s" if len(within_bound) else "at no load tried"
        )
        parts.append(f"{gpu} {most}")
    return f"TTFT p99 stays within {seconds(bound_s)}: {'; '.join(parts)}. Plan for a load left of the bend."


def _best_goodput(table: pd.DataFrame) -> str:
    rows = table[table["goodput_per_s"].notna()]
    if not len(rows):
        return "No GPU can run the scenario."
    best: Any = rows.sort_values("goodput_per_s", ascending=False, kind="stable").iloc[0]
    return (
        f"Most requests within the SLO: {best['goodput_per_s']:.3g}/s on {best['gpu']}, of "
        f"{best['requests_per_s']:.3g}/s offered. Where a line leaves the dotted one, more load is served "
        "outside the SLO: add replicas there."
    )


def _cheapest(table: pd.DataFrame) -> str:
    rows = table[table["usd_per_million"].notna()]
    if "meets" in rows:
        rows = rows[rows["meets"].astype(bool)]
    if not len(rows):
        return "No GPU with a price keeps the SLO at a load tried."
    best: Any = rows.sort_values("usd_per_million", kind="stable").iloc[0]
    return (
        f"Cheapest within the SLO: ${best['usd_per_million']:.2f} on {best['gpu']} at "
        f"{best['requests_per_s']:.3g}/s. A GPU costs the same idle or busy, so the cost falls with load."
    )
