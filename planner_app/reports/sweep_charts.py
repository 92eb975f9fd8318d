"""Charts of many scenarios side by side: what they trade, what each knob does. Needs plotly.

They take plain tables with a row per trial (columns as `study.Swept.table` has them), so that sweeps, tuning
and the dashboard share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from pagecast.planner_app.planner.directions import more_is_better
from pagecast.planner_app.reports.style import GREY, VERMILLION, chart, label, line, marker
from pagecast.planner_app.wording.figures import axis, shown, title

_STAR = {"symbol": "star", "size": 15, "color": VERMILLION, "line": {"width": 1, "color": GREY}}
_HOVER = "%{text}<br>%{x:.4g}, %{y:.4g}"


def trade_off(
    table: pd.DataFrame, x: str, y: str, knobs: Sequence[str], chosen: int | None = None
) -> go.Figure:
    """Each trial at two of its figures; those on the front, those that miss the SLO, the choice.

    `table` needs `number`, `meets`, `on_front`, the knobs and both figures; `chosen` is a trial's number.
    """
    ran = table[table[x].notna() & table[y].notna()]
    front = ran[ran["on_front"]].sort_values([x, y])
    caption = (
        f"{int(ran['meets'].sum()):,} of {len(ran):,} trials keep the SLO. On the front "
        f"({len(front):,}) no other trial is as good in every objective and better in one."
    )
    figure = chart(f"{_first_up(title(y))} against {title(x)}", caption, axis(x), axis(y), height=420)
    kinds = {
        "misses the SLO": ~ran["meets"] & ~ran["on_front"],
        "keeps it": ran["meets"] & ~ran["on_front"],
        "on the front": ran["on_front"],
    }
    looks: tuple[dict[str, Any], ...] = (
        {"color": GREY, "symbol": "x", "size": 7},
        marker(0, symbol="circle-open"),
        marker(2, symbol="diamond", size=10),
    )
    for (name, mask), look in zip(kinds.items(), looks, strict=True):
        rows = ran[mask]
        if len(rows):
            figure.add_scatter(
                x=rows[x],
                y=rows[y],
                name=name,
                mode="markers",
                marker=look,
                text=points(rows, knobs),
                hovertemplate=_HOVER,
            )
    picked = ran[ran["number"] == chosen]
    if len(picked):
        figure.add_scatter(
            x=picked[x],
            y=picked[y],
            name="cheapest",
            mode="markers",
            marker=_STAR,
            text=points(picked, knobs),
            hovertemplate=_HOVER,
        )
    _spread(figure.update_xaxes, ran[x])
    _spread(figure.update_yaxes, ran[y])
    return figure


def points(table: pd.DataFrame, knobs: Sequence[str]) -> list[str]:
    """The knobs of each trial, as text for labels: `block_size 16, gpu H200`."""
    rows = table[list(knobs)].to_dict("records")
    return [label(", ".join(f"{name} {value}" for name, value in row.items())) for row in rows]


def against_knob(table: pd.DataFrame, knob: str, figures: Sequence[str], chosen: object = None) -> go.Figure:
    """Figures of one unit against a knob: the median over the trials with each value, and their range.

    `chosen` marks a value of the knob that is recommended.
    """
    rows = table.dropna(subset=[name for name in figures if name in table])
    groups = rows.groupby(rows[knob].map(_plain), sort=False)
    values: list[Any] = list(groups.groups)
    numeric = all(isinstance(value, int | float) for value in values)
    values = sorted(values) if numeric else values
    caption = _best(groups, figures[0], knob)
    has_mark = chosen is not None and _plain(chosen) in values
    figure = chart(
        f"{_first_up(title(figures[0]))} against {knob}",
        caption + (" The dotted line is the chosen value." if has_mark else ""),
        knob.replace("_", " "),
        axis(figures[0]),
    )
    for index, name in enumerate(figures):
        spread = groups[name].agg(["median", "min", "max"]).loc[values]
        middle = spread["median"].to_numpy(np.float64)
        bars = {"array": spread["max"] - middle, "arrayminus": middle - spread["min"], "thickness": 1}
        at = values if numeric else [label(value) for value in values]
        mode = "lines+markers" if numeric else "markers"
        figure.add_scatter(
            x=at, y=middle, name=title(name), mode=mode, line=line(index), marker=marker(index), error_y=bars
        )
    if numeric and len(values) > 1 and min(values) > 0 and max(values) / min(values) >= 4:
        ticks = values[:: -(-len(values) // 8)]
        figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{value:,g}" for value in ticks])
    elif not numeric:
        figure.update_xaxes(type="category")
    values_by_figure = rows[[name for name in figures if name in rows]].to_numpy(np.float64)
    if (
        values_by_figure.size and values_by_figure.min() == values_by_figure.max() >= 0
    ):  # a flat line would stand in the middle of an axis
        figure.update_yaxes(rangemode="tozero")
    if has_mark:
        where = _plain(chosen)
        figure.add_vline(x=where if numeric else label(where), line={"color": GREY, "dash": "dot"})
    return figure


def _best(groups: Any, name: str, knob: str) -> str:
    medians = groups[name].median().dropna()
    if not len(medians):
        return "No trial has this figure."
    best, worst = medians.idxmin(), medians.idxmax()
    if more_is_better(name):
        best, worst = worst, best
    if medians[best] == medians[worst]:
        return f"{knob} does not change it."
    return (
        f"Best at {knob} {best} ({shown(name, float(medians[best]))}), worst at {worst} "
        f"({shown(name, float(medians[worst]))}); medians over the trials with that value."
    )


def sensitivity(table: pd.DataFrame) -> go.Figure:
    """How much of each figure's variance each knob explains alone; `table` is `pareto.sensitivity`'s."""
    caption = "Nothing was varied."
    if len(table):
        top = table.iloc[int(table["share"].to_numpy().argmax())]
        caption = (
            f"{top['knob']} explains {top['share']:.0%} of what happens to {title(str(top['figure']))}. A "
            "knob with short bars in every group can be left alone."
        )
    figure = chart(
        "What each knob explains",
        caption,
        "",
        "% of variance over the trials",
        barmode="group",
        yaxis_rangemode="tozero",
    )
    for index, (knob, rows) in enumerate(table.groupby("knob", sort=False)):
        look = {"color": line(index)["color"], "pattern": {"shape": ("", "/", "x", ".", "-", "+")[index % 6]}}
        figure.add_bar(
            x=[title(str(name)) for name in rows["figure"]],
            y=100 * rows["share"],
            name=label(knob),
            marker=look,
        )
    figure.update_xaxes(type="category")
    return figure


def _plain(value: object) -> Any:
    """A knob's value as a number or a text."""
    if isinstance(value, bool | np.bool_):
        return "on" if value else "off"
    if value is None or value != value:
        return "none"
    return value.item() if isinstance(value, np.generic) else value


def _spread(update: Any, values: pd.Series) -> None:
    """A logarithmic axis where values lie far apart."""
    if len(values) and float(values.min()) > 0 and float(values.max()) / float(values.min()) > 20:
        update(type="log")


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]
