"""How a page shows a chart: its title, the figure in the page's colours, and what to conclude from it."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
import streamlit as st
from pagecast.planner_app.dashboard.texts import plain
from pagecast.planner_app.reports.style import caption_of, title_of

_CONFIG = {"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]}


def show_chart(figure: go.Figure, key: str) -> None:
    """A chart in a frame of its own."""
    with st.container(border=True, height="stretch"):
        st.markdown(f"**{plain(title_of(figure))}**")
        st.plotly_chart(figure, key=key, config=_CONFIG, alt=f"{title_of(figure)}. {caption_of(figure)}")
        st.caption(plain(caption_of(figure)))


def show_charts(figures: Sequence[go.Figure], key: str) -> None:
    """Charts in two columns, row by row."""
    for first in range(0, len(figures), 2):
        for column, figure in zip(st.columns(2), figures[first : first + 2], strict=False):
            with column:
                show_chart(figure, f"{key}-{first}-{title_of(figure)}")
