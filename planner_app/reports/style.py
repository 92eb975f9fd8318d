"""Style of every chart: one palette, one template, and the numbers of captions. Needs plotly.

Colours are Okabe and Ito's (https://jfly.uni-koeln.de/color/), those that stand out from white and from
black alike; lines also differ in dash and points in symbol, for those who see no colours. Text, grid and
background are left to the page, which may be dark.
"""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from pagecast.traces.arrays import Floats

BLUE, VERMILLION, GREEN, PURPLE, GREY, ORANGE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#8A8F98",
    "#B78900",
)
COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, GREY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")
MOST_POINTS = 600  # of a line over time or over shares: more can't be told apart on a screen

_GRID = "rgba(128,128,128,0.25)"
_AXIS = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": "#8A8F98", "automargin": True, "ticks": ""}
TEMPLATE = go.layout.Template(
    layout={
        "colorway": COLORS,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#8A8F98", "activecolor": BLUE},
        "margin": {"l": 60, "r": 16, "t": 44, "b": 52},
        "hoverlabel": {"namelength": -1},
        "colorscale": {"sequential": "Cividis"},
    }
)


def chart(title: str, caption: str, x: str, y: str, **layout: Any) -> go.Figure:
    """An empty figure with its axes named. The title and the caption stand in `layout.meta`, for the page
    (or the dashboard) sets them in its own type; `caption_of` and `title_of` give them back."""
    figure = go.Figure()
    meta = {"title": title, "caption": caption}
    fixed = {"template": TEMPLATE, "xaxis_title": x, "yaxis_title": y, "meta": meta}
    figure.update_layout(**{"height": 340, **fixed, **layout})
    return figure


def title_of(figure: go.Figure) -> str:
    """The chart's subject, in a few words."""
    return str((figure.layout.meta or {}).get("title", ""))


def caption_of(figure: go.Figure) -> str:
    """The conclusion from the chart, in a sentence or two."""
    return str((figure.layout.meta or {}).get("caption", ""))


def label(text: object) -> str:
    """A user's word as a label: plotly reads HTML tags in labels, so they are spelt out."""
    return escape(str(text), quote=False)


def line(index: int, **more: Any) -> dict[str, Any]:
    """The colour and dash of line number `index`."""
    return {
        "color": COLORS[index % len(COLORS)],
        "dash": DASHES[index % len(DASHES)],
        "width": 2,
        **more,
    }


def marker(index: int, **more: Any) -> dict[str, Any]:
    """The colour and symbol of the points of series number `index`."""
    return {
        "color": COLORS[index % len(COLORS)],
        "symbol": SYMBOLS[index % len(SYMBOLS)],
        "size": 8,
        **more,
    }


def quantiles(values: Floats) -> tuple[Floats, Floats]:
    """Values (ascending) and the percent of all that are at most as large, at most `MOST_POINTS` of each."""
    shares = np.linspace(0, 1, min(max(len(values), 2), MOST_POINTS))
    return np.quantile(values, shares), 100 * shares


def peaks(time_s: Floats, values: Floats, until_s: float) -> tuple[Floats, Floats]:
    """A step function's highest value in each of at most `MOST_POINTS` spans of time.

    `values[i]` holds from `time_s[i]` (ascending) to the next; a long run keeps its spikes.
    """
    if len(time_s) <= MOST_POINTS:
        return np.append(time_s, until_s), np.append(values, values[-1:])
    edges = np.linspace(time_s[0], until_s, MOST_POINTS + 1)[:-1]
    bins = np.clip(np.searchsorted(edges, time_s, "right") - 1, 0, MOST_POINTS - 1)
    highest = values[np.maximum(np.searchsorted(time_s, edges, "right") - 1, 0)].astype(np.float64)
    np.maximum.at(highest, bins, values)
    return edges, highest
