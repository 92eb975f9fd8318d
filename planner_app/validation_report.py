"""The validation report: one HTML page with a table and charts, which needs no network and no script."""

from __future__ import annotations

from html import escape

import numpy as np
import numpy.typing as npt
from pagecast.sim.forecast import Forecast, Row
from pagecast.sim.outcome import LATENCIES, Timeline

Floats = npt.NDArray[np.float64]
Points = list[tuple[float, float]]

_TITLES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "End to end", "queue_s": "Queue"}
_FORECAST, _MEASURED = "#0b63c5", "#d1600a"
_STYLE = f"""
body {{ font: 15px/1.45 system-ui, sans-serif; color: #1b1f24; background: #fff; margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #d9dee4; }}
th:first-child, td:first-child {{ text-align: left; }}
tr.missed td {{ background: #fff1e0; }}
figure {{ display: inline-block; margin: 1rem 1rem 0 0; }}
figcaption {{ font-weight: 600; }}
svg text {{ font: 11px system-ui, sans-serif; fill: #49525c; }}
.forecast {{ color: {_FORECAST}; }} .measured {{ color: {_MEASURED}; }}
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _MOST_POINTS = 440, 220, 56, 28, 400


def page(found: Forecast) -> str:
    """The whole page."""
    coverage = found.coverage()
    held = ""
    if coverage["figures"]:
        held = (
            f"<p>{100 * (coverage['covered'] or 0):.0f}% of {coverage['figures']} measurements lie in their "
            f"90% interval; half of the intervals are within &plusmn;"
            f"{coverage['median_half_width_percent']:.1f}%.</p>"
        )
    charts = "".join(
        _figure(
            f"{_TITLES[name]}: share of requests within, by seconds",
            _quantiles(found.predicted.latencies[name]),
            _quantiles(found.measured.latencies[name]),
            log=True,
        )
        for name in LATENCIES
    )
    for title, key in (("Running requests over time, seconds", "running"), ("Waiting requests", "waiting")):
        charts += _figure(
            title, _load(found.predicted.timeline, key), _load(found.measured.timeline, key), log=False
        )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(found.run)}: forecast and "
        f"measurement</title><style>{_STYLE}</style><h1>{escape(found.run)}</h1>"
        f"<p><span class=forecast>Forecast</span> with costs {escape(found.costs)}, beside what was "
        f"<span class=measured>measured</span>. {escape(found.expected_error)}</p>{held}"
        f"{_table(found.rows)}{charts}</html>\n"
    )


def _table(rows: tuple[Row, ...]) -> str:
    head = "".join(
        f"<th>{title}</th>"
        for title in ("", "forecast", "measured", "error", "90% interval", "per 1% of step time")
    )
    body = ""
    for row in rows:
        bounds = "" if row.low is None or row.high is None else f"{row.low:.4g} to {row.high:.4g}"
        slope = "" if row.sensitivity is None else f"{row.sensitivity:+.1f}%"
        error = f"{row.error_percent:+.2f}%"
        cells = (row.name, f"{row.predicted:.5g}", f"{row.measured:.5g}", error, bounds, slope)
        marks = " class=missed" if row.covered is False else ""
        body += f"<tr{marks}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"


def _quantiles(values: Floats) -> Points:
    if not len(values):
        return []
    shares = np.linspace(0, 1, min(len(values), _MOST_POINTS))
    points = np.maximum(np.quantile(values, shares), 1e-6)
    return list(zip(points.tolist(), shares.tolist(), strict=True))


def _load(timeline: Timeline, key: str) -> Points:
    times, counts = timeline.time_s, getattr(timeline, key)
    chosen = np.unique(np.linspace(0, max(len(times) - 1, 0), _MOST_POINTS).astype(np.int64))
    return list(zip(times[chosen].tolist(), counts[chosen].tolist(), strict=True)) if len(times) else []


def _figure(title: str, forecast: Points, measured: Points, *, log: bool) -> str:
    """One chart of two lines; the measured one is drawn below."""
    everything = forecast + measured
    if not everything:
        return ""
    xs = np.array([x for x, _ in everything])
    xs = np.log10(xs) if log else xs
    low, high = float(xs.min()), float(max(xs.max(), xs.min() + 1e-9))
    top = max(max(y for _, y in everything), 1e-9)

    def place(x: float, y: float) -> str:
        share = ((float(np.log10(x)) if log else x) - low) / (high - low)
        down = _HEIGHT - _BOTTOM - y / top * (_HEIGHT - 40)
        return f"{_LEFT + share * (_WIDTH - _LEFT - 8):.1f},{down:.1f}"

    lines = "".join(
        f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="'
        + " ".join(place(x, y) for x, y in points)
        + '"/>'
        for points, color in ((measured, _MEASURED), (forecast, _FORECAST))
        if points
    )
    labels = ""
    for share in (0.0, 0.5, 1.0):
        at = low + share * (high - low)
        x, y = place(10**at if log else at, 0).split(",")
        labels += f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="middle">{10**at if log else at:.3g}</text>'
        y = place(10**low if log else low, share * top).split(",")[1]
        labels += f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{share * top:.3g}</text>'
    axis = f'<path d="M{_LEFT},12V{_HEIGHT - _BOTTOM}H{_WIDTH - 4}" fill="none" stroke="#8c959f"/>'
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{axis}{lines}{labels}</svg></figure>'
    )
