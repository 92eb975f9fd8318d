"""Charts of a forecast beside the run it forecasts: one function a chart. Needs plotly."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from pagecast.planner_app.reports.style import (
    BLUE,
    GREY,
    VERMILLION,
    chart,
    label,
    line,
    marker,
    peaks,
    quantiles,
)
from pagecast.planner_app.wording.figures import title
from pagecast.planner_app.wording.quantities import seconds
from pagecast.sim.runs.forecast import Forecast, ForecastRow

_LEAST_S = 1e-6  # shorter times are drawn as this, for an axis of logarithms has no zero


def errors(forecast: Forecast) -> go.Figure:
    """Each figure's error in percent of what was measured, with its 90% interval."""
    rows = [row for row in forecast.rows if row.measured and np.isfinite(row.predicted) and row.measured > 0]
    coverage = forecast.coverage()
    worst = max(rows, key=lambda row: abs(row.error_percent), default=None)
    caption = "Nothing could be compared."
    if worst is not None:
        text = ""
        if coverage["figures"]:
            inside = f"{coverage['inside']} of {coverage['figures']}"
            text = f"{inside} intervals hold the measurement (the line at 0). "
        caption = f"{text}The largest error is {worst.error_percent:+.1f}%, of {title(worst.name)}."
    figure = chart(
        "Error of each figure",
        caption,
        "forecast against measurement, %",
        "",
        height=max(260, 24 * len(rows) + 110),
    )
    figure.update_yaxes(autorange="reversed", type="category")
    figure.add_vline(x=0, line={"color": GREY, "width": 2})
    for index, (name, is_inside) in enumerate((("measurement inside", True), ("measurement outside", False))):
        points = [row for row in rows if (row.covered is not False) == is_inside]
        if points:
            figure.add_scatter(
                x=[row.error_percent for row in points],
                y=[label(title(row.name)) for row in points],
                name=name,
                mode="markers",
                marker=marker(index),
                error_x=_bars(points),
            )
    order = [label(title(row.name)) for row in rows]
    figure.update_yaxes(categoryorder="array", categoryarray=order)
    return figure


def _bars(rows: list[ForecastRow]) -> dict[str, object]:
    def percent(value: float | None, row: ForecastRow) -> float:
        return abs((row.predicted if value is None else value) - row.predicted) / row.measured * 100

    upper, lower = [percent(row.high, row) for row in rows], [percent(row.low, row) for row in rows]
    return {"array": upper, "arrayminus": lower, "thickness": 1.5}


def distribution(forecast: Forecast, latency: str) -> go.Figure:
    """The percent of requests within each latency, forecast and measured."""
    forecast_values, real = forecast.predicted.latencies[latency], forecast.measured.latencies[latency]
    name = title(latency)
    caption = f"No {name} to compare."
    if len(forecast_values) and len(real):
        shares = (50, 99)
        pairs = zip(shares, np.percentile(forecast_values, shares), np.percentile(real, shares), strict=True)
        parts = (
            f"p{share} {seconds(float(a))} against {seconds(float(b))} measured" for share, a, b in pairs
        )
        caption = f"Forecast: {', '.join(parts)}. Where the lines part, the forecast is off."
    figure = chart(
        f"{name[0].upper()}{name[1:]}: forecast and measurement",
        caption,
        "seconds (log)",
        "% of requests within",
        xaxis_type="log",
        yaxis_range=[0, 101],
    )
    for index, (who, values) in enumerate((("measured", real), ("forecast", forecast_values))):
        if len(values):
            at, share = quantiles(np.maximum(values, _LEAST_S))
            figure.add_scatter(x=at, y=share, name=who, line=_line(index))
    return figure


def load(forecast: Forecast, key: str) -> go.Figure:
    """How many requests were `running` or `waiting` over time, forecast and measured."""
    most = [
        int(max(getattr(side.timeline, key), default=0)) for side in (forecast.predicted, forecast.measured)
    ]
    caption = f"At most {most[0]:,} forecast, {most[1]:,} measured. A lasting gap means wrong step times."
    figure = chart(f"{key.capitalize()} requests over time", caption, "seconds", "requests")
    for index, (who, side) in enumerate((("measured", forecast.measured), ("forecast", forecast.predicted))):
        times = side.timeline.time_s
        if len(times):
            at, values = peaks(times, getattr(side.timeline, key), float(times[-1]))
            figure.add_scatter(x=at, y=values, name=who, line=_line(index, shape="hv"))
    return figure


def _line(index: int, **more: object) -> dict[str, object]:
    """Measured is drawn below and solid, the forecast dashed above it."""
    return {**line(index), "color": (VERMILLION, BLUE)[index], **more}
