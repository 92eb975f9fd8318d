"""Charts of a plan: the loads that were tried, what broke beyond the answer, and the static envelope.

They take what each load came to (`bisection.LoadTrial`) in any order, and the answer with its interval. Needs
plotly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from pagecast.planner_app.reports.style import BLUE, GREEN, GREY, ORANGE, chart, label, line, marker

if TYPE_CHECKING:
    from pagecast.planner_app.planner.capacity.bisection import LoadTrial
    from pagecast.planner_app.planner.slo import TermVerdict

_LEAST, _MOST = 1.0, 1000.0  # percent of a bound, below and beyond which a term is drawn as these


def terms_by_load(
    outcomes: Sequence[LoadTrial], unit: str, answer: float | None, low: float = 0.0, high: float = 0.0
) -> go.Figure:
    """Each term of the SLO in percent of what it may be, at each load tried; 100 is its bound.

    `answer`: the most load that holds, with its interval `low` to `high`; None where none does.
    """
    trials = sorted(outcomes, key=lambda outcome: outcome.amount)
    figure = chart(
        f"What breaks as {unit} grow",
        _breaks(trials, unit, answer),
        f"{unit} (log)",
        "% of the bound (log)",
        xaxis_type="log",
        yaxis_type="log",
        height=400,
    )
    for index, name in enumerate(dict.fromkeys(term.text for outcome in trials for term in outcome.terms)):
        pairs = [
            (outcome.amount, used(term)) for outcome in trials for term in outcome.terms if term.text == name
        ]
        points = [(amount, min(max(share, _LEAST), _MOST)) for amount, share in pairs if share is not None]
        if points:
            at, shares = zip(*points, strict=True)
            figure.add_scatter(
                x=at,
                y=shares,
                name=label(name),
                mode="lines+markers",
                line=line(index),
                marker=marker(index, size=6),
            )
    figure.add_hline(y=100, line={"color": GREY, "width": 2})
    _mark(figure, answer, low, high)
    return figure


def used(term: TermVerdict) -> float | None:
    """Percent of what a term may be: of a latency's bound, or of the share of requests that may be bad."""
    if term.value is None:
        return None
    value, bound = term.value, term.bound
    if ">" in term.text:
        value, bound = 1 - value, 1 - bound
    if bound <= 0:
        return 0.0 if value <= 0 else _MOST
    return 100 * value / bound


def _breaks(trials: Sequence[LoadTrial], unit: str, answer: float | None) -> str:
    if answer is None:
        return "No load that was tried keeps the SLO."
    beyond = next((outcome for outcome in trials if outcome.amount > answer and not outcome.holds), None)
    if beyond is None:
        return f"Every load tried holds, up to {answer:,.4g} {unit}."
    broken = " and ".join(term.text for term in beyond.broken)
    return f"Up to {answer:,.4g} {unit} all stays below 100%; at {beyond.amount:,.4g} {broken} breaks."


def throughput_by_load(
    outcomes: Sequence[LoadTrial], unit: str, answer: float | None, low: float = 0.0, high: float = 0.0
) -> go.Figure:
    """Output tokens per second at each load tried."""
    trials = sorted(outcomes, key=lambda outcome: outcome.amount)
    most = max((outcome.output_tokens_per_s for outcome in trials), default=0.0)
    knee = next((outcome for outcome in trials if outcome.output_tokens_per_s >= 0.95 * most), None)
    caption = "No load was tried."
    if knee is not None:
        caption = (
            f"{knee.amount:,.4g} {unit} reach 95% of the {most:,.0f} output tokens/s seen at most; more of "
            "them add mainly latency."
        )
    figure = chart(
        f"Throughput by {unit}",
        caption,
        f"{unit} (log)",
        "output tokens/s",
        xaxis_type="log",
        yaxis_rangemode="tozero",
        height=400,
    )
    for index, (name, holds) in enumerate((("keeps the SLO", True), ("misses it", False))):
        trials_of_kind = [outcome for outcome in trials if outcome.holds == holds]
        if trials_of_kind:
            figure.add_scatter(
                x=[outcome.amount for outcome in trials_of_kind],
                mode="markers",
                name=name,
                marker=marker(index),
                y=[outcome.output_tokens_per_s for outcome in trials_of_kind],
                customdata=[outcome.requests_per_s for outcome in trials_of_kind],
                hovertemplate="%{x:,.4g}: %{y:,.0f} tokens/s, %{customdata:.3g} requests/s",
            )
    _mark(figure, answer, low, high)
    return figure


def envelope_bars(limits: Mapping[str, int], answer: float | None, low: float, high: float) -> go.Figure:
    """Requests at once that each limit allows by arithmetic, beside what the replays admit."""
    least = min(limits, key=limits.__getitem__) if limits else ""
    caption = f"By arithmetic the first limit is {least}, at {limits[least]:,}." if limits else ""
    if answer is not None and limits:
        caption += f" Replays admit {answer:,.0f}{_part(answer, limits[least])}."
    figure = chart(
        "Static envelope and replays",
        caption,
        "requests at once (log)",
        "",
        height=280,
        xaxis_type="log",
        showlegend=False,
    )
    names, values = list(limits), [max(value, 1) for value in limits.values()]
    looks = [ORANGE if name == least else BLUE for name in names]
    figure.add_bar(
        x=values,
        y=names,
        orientation="h",
        marker_color=looks,
        text=[f"{value:,}" for value in limits.values()],
        insidetextanchor="start",
    )
    if answer is not None:
        bars = {"array": [max(high - answer, 0.0)], "arrayminus": [max(answer - low, 0.0)]}
        figure.add_bar(
            x=[answer],
            y=["replays"],
            orientation="h",
            marker_color=GREEN,
            error_x=bars,
            text=[f"{answer:,.4g}"],
            insidetextanchor="start",
        )
    most = max([*values, high, 10.0])
    figure.update_xaxes(range=[0, math.log10(most) + 0.1])
    figure.update_yaxes(autorange="reversed")
    return figure


def _part(answer: float, most: int) -> str:
    if not most:
        return ""
    why = ": bursts, queues and the SLO take the rest" if answer < most else ""
    return f", {answer / most:.0%} of that{why}"


def _mark(figure: go.Figure, answer: float | None, low: float, high: float) -> None:
    if answer is None:
        return
    if 0 < low < high:
        figure.add_vrect(x0=low, x1=high, fillcolor=GREEN, opacity=0.15, line_width=0)
    figure.add_vline(x=answer, line={"color": GREEN, "dash": "dot", "width": 2})
