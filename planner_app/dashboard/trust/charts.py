"""Charts of a calibration: its errors, also on runs left out, and how far a replay leaves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from pagecast.planner_app.reports.style import BLUE, GREY, VERMILLION, chart, label, line, marker
from pagecast.sim.costs.calibration.file import Calibration
from pagecast.sim.replay import Result

_SUMMED, _HALF, _MOST = "their summed time (signed)", "half of the steps within", "nine in ten within"


@dataclass(frozen=True, slots=True)
class Reach:
    """The most that a replay asked of a calibration in one respect, and the most that was fitted."""

    name: str
    most: int
    fitted: int

    @property
    def inside(self) -> bool:
        """Whether the fit covers it."""
        return self.most <= self.fitted


def reach(calibration: Calibration, result: Result) -> list[Reach]:
    """How far a replay goes in each respect in which the fit is bounded."""
    fitted, steps = calibration.fitted, result.steps
    accepted_rows = result.requests[result.requests["state"] != "rejected"]
    context = (
        int((accepted_rows["input_tokens"] + accepted_rows["output_tokens"]).max())
        if len(accepted_rows)
        else 0
    )
    tokens = int((steps["prefill_tokens"] + steps["decode_n"]).max()) if len(steps) else 0
    requests = int(steps["decode_n"].max()) if len(steps) else 0
    pairs = {
        "tokens in a step": (tokens, fitted.get("tokens", calibration.knots[-1])),
        "requests decoding in a step": (requests, fitted.get("decode_requests", 0)),
        "context of a request, tokens": (context, fitted.get("decode_context", 0)),
    }
    return [Reach(name, most, bound) for name, (most, bound) in pairs.items() if bound]


def reach_chart(reaches: list[Reach]) -> go.Figure:
    """The largest values of the replay, in percent of the largest that were fitted."""
    beyond = [each for each in reaches if not each.inside]
    names = ", ".join(f"{each.name} {each.most:,} (fitted: {each.fitted:,})" for each in beyond)
    caption = (
        f"Beyond the line the error is unknown: {names}."
        if beyond
        else "All of this replay lies within what was fitted (the line)."
    )
    figure = chart(
        "How far the replay reaches",
        caption,
        "most in the replay, % of the most fitted",
        "",
        height=210,
        showlegend=False,
        margin={"l": 60, "r": 16, "t": 8, "b": 52},
    )
    figure.update_yaxes(autorange="reversed", type="category")
    figure.add_bar(
        x=[100 * each.most / each.fitted for each in reaches],
        y=[each.name for each in reaches],
        orientation="h",
        textposition="auto",
        text=[f"{each.most:,} of {each.fitted:,}" for each in reaches],
        marker={
            "color": [BLUE if each.inside else VERMILLION for each in reaches],
            "pattern": {"shape": ["" if each.inside else "/" for each in reaches]},
        },
    )
    figure.add_vline(x=100, line={"color": GREY, "dash": "dot", "width": 2})
    return figure


def regions(calibration: Calibration) -> go.Figure:
    """Fit against measurement by region of batch shape."""
    rows = calibration.regions
    kinds = [row for row in rows if row["region"] not in ("all steps", "pure decode", "with prompts")]
    worst = max(kinds, key=lambda row: abs(row["error_percent"]), default=None)
    caption = "The file holds no errors by region."
    if worst is not None:
        caption = (
            f"Summed over a region's steps the fit is off by {worst['error_percent']:+.1f}% at most "
            f"({worst['region']}). Single steps stray more; over a run their errors average out."
        )
    return _errors("The fit by region of batch shape", caption, rows, [row["region"] for row in rows])


def left_out(calibration: Calibration) -> go.Figure:
    """Errors on each run that the fit of the others had not seen."""
    rows = calibration.cross_validation
    whole = [row for row in rows if row.get("steps of") == "all"]
    caption = "No run was left out of the fit, so that its error on another run is unknown."
    if whole:
        worst = max(whole, key=lambda row: abs(row["error_percent"]))
        caption = (
            f"Forecast by the other runs alone, {worst['run']} was off by {worst['error_percent']:+.1f}% in "
            "total step time: what to expect of a run that was never seen."
        )
    names = [f"{row['run']}: {row['steps of']}" for row in rows]
    return _errors("Runs left out of the fit", caption, rows, names)


def _errors(title: str, caption: str, rows: list[dict[str, Any]], names: list[str]) -> go.Figure:
    figure = chart(title, caption, "error of fitted step times, %", "", height=max(240, 26 * len(rows) + 120))
    figure.update_yaxes(autorange="reversed", type="category")
    figure.add_vline(x=0, line={"color": GREY, "width": 2})
    labels = [label(name) for name in names]
    series = ((_SUMMED, "error_percent"), (_HALF, "p50_percent"), (_MOST, "p90_percent"))
    for index, (word, field) in enumerate(series):
        figure.add_scatter(
            x=[row.get(field) for row in rows],
            y=labels,
            name=word,
            mode="markers",
            marker=marker(index),
            customdata=[[row.get("steps", 0), row.get("time_percent", 0)] for row in rows],
            hovertemplate="%{x:.2f}%, of %{customdata[0]:,} steps with %{customdata[1]:.1f}% of the time",
        )
    return figure


def matrix_curve(calibration: Calibration) -> go.Figure:
    """Fitted time of a step's matrix work by its tokens, with the spread of the resampled fits."""
    knots, curve = np.array(calibration.knots), np.array(calibration.curve_ns) / 1e6
    knee = int(knots[int(np.argmax(curve > 1.25 * curve[0]))]) if np.any(curve > 1.25 * curve[0]) else 0
    caption = f"One token takes {curve[0]:.1f} ms, {knots[-1]:,} take {curve[-1]:.0f} ms. " + (
        f"Up to about {knee:,} tokens per step costs what reading the weights costs: batching is nearly free."
        if knee
        else "The time hardly grows with the tokens."
    )
    figure = chart(
        "Matrix work of a step, as fitted",
        caption,
        "tokens in the step (log)",
        "milliseconds (log)",
        xaxis_type="log",
        yaxis_type="log",
    )
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(dtick="D2")
    if calibration.replicates:
        curves = np.array([row[: len(knots)] for row in calibration.replicates]) / 1e6
        low, high = np.percentile(curves, (5, 95), axis=0)
        figure.add_scatter(
            x=np.append(knots, knots[::-1]),
            y=np.append(high, low[::-1]),
            fill="toself",
            mode="lines",
            line={"width": 0},
            fillcolor="rgba(0,114,178,0.3)",
            hoverinfo="skip",
            name="90% of refits",
        )
    figure.add_scatter(
        x=knots, y=curve, name="fit", mode="lines+markers", line=line(0), marker=marker(0, size=5)
    )
    return figure
