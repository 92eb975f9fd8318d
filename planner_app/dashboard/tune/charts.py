"""Charts of the Tune page: the grid of block size and HBM budget, and hit ratio against capacity."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from pagecast.planner_app.reports.style import GREY, chart, line
from pagecast.planner_app.wording.quantities import seconds
from pagecast.traces.hits import Hits, curve

# Column of the grid's table, words for its values, whether more is better.
FIGURES = {
    "TTFT p99": ("ttft_p99_s", seconds, False),
    "TPOT p99": ("tpot_p99_s", seconds, False),
    "Output tokens/s": ("output_tokens_per_s", "{:,.0f}".format, True),
    "Prefix reuse": ("token_hit_rate", "{:.1%}".format, True),
    "Preemptions": ("preemptions", "{:,.0f}".format, False),
}
_ACROSS, _UP = "gpu_memory_utilization", "block_size"


def grid_map(table: pd.DataFrame, title: str, now: tuple[float, int]) -> go.Figure:
    """A cell a scenario, its value written in; a cross where it breaks the SLO or can't run.

    `now`: HBM budget and block size of the side bar, which get a frame where they are on the grid.
    """
    name, words, more = FIGURES[title]
    values = table.pivot(index=_UP, columns=_ACROSS, values=name).sort_index()
    meets = table.pivot(index=_UP, columns=_ACROSS, values="meets").reindex_like(values)
    across = [f"{fraction:.2f}" for fraction in values.columns]
    up = [str(size) for size in values.index]
    numbers = values.to_numpy(np.float64)
    texts = [
        [_cell(value, bool(good), words) for value, good in zip(row, marks, strict=True)]
        for row, marks in zip(numbers, meets.to_numpy(), strict=True)
    ]
    # Times by their logarithm, so that one runaway cell does not flatten the others.
    colors = np.log10(numbers) if name.endswith("p99_s") else numbers
    figure = chart(
        f"{title} by block size and HBM budget",
        _best(table, title),
        "HBM budget, fraction of the GPU",
        "block size, tokens",
        height=380,
    )
    figure.add_heatmap(
        x=across,
        y=up,
        z=colors,
        text=texts,
        texttemplate="%{text}",
        colorscale="Cividis",
        reversescale=not more,
        showscale=False,
        xgap=2,
        ygap=2,
        hovertemplate="block size %{y}, HBM %{x}: %{text}<extra></extra>",
    )
    figure.update_layout(margin={"t": 12})
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category")
    if f"{now[0]:.2f}" in across and str(now[1]) in up:
        at, over = across.index(f"{now[0]:.2f}"), up.index(str(now[1]))
        figure.add_shape(
            type="rect",
            x0=at - 0.5,
            x1=at + 0.5,
            y0=over - 0.5,
            y1=over + 0.5,
            line={"color": "#D55E00", "width": 3},
        )
    return figure


def _cell(value: float, good: bool, words: Callable[[float], str]) -> str:
    text = "can't run" if np.isnan(value) else words(value)
    return text if good else f"✕ {text}"


def _best(table: pd.DataFrame, title: str) -> str:
    name, words, more = FIGURES[title]
    good = table[table["meets"]]
    text = (
        "Brighter is better. A frame marks the side bar's scenario, a cross one that breaks the SLO or "
        "can't run."
    )
    if not len(good):
        return f"No scenario of the grid keeps the SLO. {text}"
    values = good[name]
    extreme = values.max() if more else values.min()
    return (
        f"{len(good)} of {len(table)} keep the SLO with this trace, at {'most' if more else 'least'} "
        f"{words(extreme)}; the cards go by how much load a value admits. {text}"
    )


def hit_curve(reuse: Hits, blocks: int) -> go.Figure:
    """Hit ratio of an LRU cache against its capacity; `blocks` is what the side bar's scenario has."""
    capacities, ratios = curve(reuse, 80)
    size, here = reuse.block_size, reuse.ratio(blocks)
    enough = float(capacities[np.argmax(ratios >= 0.99 * reuse.infinite)]) if reuse.infinite else 0.0
    caption = (
        f"With {blocks:,} blocks {here:.1%} of block references hit; an endless cache would find "
        f"{reuse.infinite:.1%}. {_advice(blocks, enough)} Requests are counted in their order, without time; "
        "blocks that running requests hold are not subtracted."
    )
    figure = chart(
        "Hit rate against cache size",
        caption,
        "capacity, tokens (log)",
        "% of block references",
        xaxis_type="log",
        yaxis_rangemode="tozero",
    )
    figure.add_scatter(
        x=capacities * size,
        y=100 * ratios,
        name="LRU",
        line=line(0),
        showlegend=False,
        hovertemplate="%{x:,.0f} tokens: %{y:.1f}%<extra></extra>",
    )
    figure.update_layout(margin={"t": 24})
    figure.add_hline(y=100 * reuse.infinite, line={"color": GREY, "dash": "dot"})
    figure.add_vline(x=blocks * size, line={"color": "#D55E00", "dash": "dash"})
    figure.add_annotation(  # whose x is a logarithm on such an axis
        x=np.log10(blocks * size),
        y=0,
        yref="paper",
        text="this scenario ",
        showarrow=False,
        xanchor="right",
        yanchor="bottom",
    )
    return figure


def _advice(blocks: int, enough: float) -> str:
    if not enough:
        return "The trace repeats no prefix."
    if blocks >= enough:
        return f"{enough:,.0f} blocks are enough: more memory finds no more prefixes."
    return f"{enough:,.0f} blocks would find nearly all: give the cache more memory."
