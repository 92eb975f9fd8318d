"""The report of a curve: throughput against what a user sees, in one picture."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from pagecast.planner_app.planner.curve import HEADER, Curve, CurvePoint
from pagecast.planner_app.reports.html_page import HtmlTable, Section, SummaryCard, page
from pagecast.planner_app.reports.scenario_section import scenario_section
from pagecast.planner_app.reports.style import chart, line, marker
from pagecast.planner_app.wording.note_sentences import sentences


def curve_report(curve: Curve) -> str:
    """The page of a curve."""
    result, points = curve.result, curve.points
    best = max(points, key=lambda point: point.per_gpu)
    server = f"{best.gpus} x {result.scenario.gpu} with {result.scenario.model}"
    lead = f"{server}: up to {best.per_gpu:,.0f} tokens/s per GPU, at concurrency {best.concurrency:,}."
    cards = [
        SummaryCard("Most throughput", f"{best.per_gpu:,.0f}", "tokens/s per GPU"),
        SummaryCard("at concurrency", f"{best.concurrency:,}"),
    ]
    sections = [
        Section(
            "By concurrency",
            [picture(points), HtmlTable("", HEADER, [point.row for point in points])],
        ),
        scenario_section(result.scenario, str(result.summary["costs"])),
    ]
    return page(f"Throughput of {result.trace}", lead, cards, sections, sentences(result.notes))


def picture(points: Sequence[CurvePoint]) -> go.Figure:
    """Tokens per second and GPU against tokens per second and user; each point is a concurrency."""
    drawn = [point for point in points if point.per_user is not None]
    figure = chart(
        "Throughput against latency",
        "Each point is a concurrency: more of it, and the server does more while each user gets less.",
        "output tokens/s per user",
        "output tokens/s per GPU",
        height=420,
    )
    figure.add_scatter(
        x=[point.per_user for point in drawn],
        y=[point.per_gpu for point in drawn],
        text=[str(point.concurrency) for point in drawn],
        textposition="top right",
        mode="lines+markers+text",
        line=line(0),
        marker=marker(0, size=8),
        showlegend=False,
    )
    return figure
