"""Load: TTFT, goodput and cost against load, with several GPUs side by side."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st
from pagecast.planner_app.dashboard.load.charts import (
    cost_against_load,
    goodput_against_load,
    ttft_against_load,
)
from pagecast.planner_app.dashboard.load.curves import curves_for, usd_per_million
from pagecast.planner_app.dashboard.shell.elements import failed, plain, show_charts, show_progress
from pagecast.planner_app.dashboard.shell.replays import trace_for
from pagecast.planner_app.dashboard.shell.state import session
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.planner.slo import Latency, Slo
from pagecast.planner_app.wording.quantities import seconds
from pagecast.sim.machine.gpus import GPUS

MOST_GPUS = 4


def render() -> None:
    """Draws the page."""
    own, view = session(), session().view.without(("concurrency",))  # whose clients have no rate
    trace = trace_for(own, view)
    if trace is None:
        show_progress("read", "reading the upload")
        return
    others = st.multiselect(
        "GPUs to compare with the side bar's",
        [gpu.name for gpu in GPUS if gpu.name != view["gpu"]],
        max_selections=MOST_GPUS - 1,
        key="gpus",
        bind="query-params",
        help="each serves the same trace with the side bar's other settings",
    )
    gpus = [view["gpu"], *(name for name in others if name != view["gpu"])]
    table = curves_for(own, view, trace, gpus)
    if table is None:
        if not failed("load"):
            show_progress("load", "TTFT and goodput against load")
        return
    prices = view.prices()
    gpus_each = view["tensor_parallel_size"]
    costs = [usd_per_million(row, prices, gpus_each) for _, row in table.iterrows()]
    table = table.assign(usd_per_million=pd.Series(costs, index=table.index, dtype=float))
    _cards(table)
    ran = table[table["reason"] == ""]
    if not len(ran):
        return
    figures = [ttft_against_load(ran, ttft_bound(view))]
    if "goodput_per_s" in ran:
        figures.append(goodput_against_load(ran))
    if ran["usd_per_million"].notna().any():
        figures.append(cost_against_load(ran))
    show_charts(figures, "load")
    st.caption(
        "Each point is a replay at a multiple of the side bar's rate, long enough for the server to settle; "
        "think times stay. A line ends where a GPU is overloaded. For the highest rate that lasts, with an "
        "interval, use pagecast plan."
    )


def ttft_bound(view: PageView) -> float | None:
    """The SLO's bound on TTFT p99 in seconds, or on another statistic of TTFT where it has only that."""
    if not view["slo"].strip():
        return None
    terms = [term for term in Slo.parse(view["slo"]).terms if isinstance(term, Latency)]
    bounds = {term.statistic: term.bound_s for term in terms if term.latency == "ttft"}
    return bounds.get("p99", next(iter(bounds.values()), None))


def _cards(table: pd.DataFrame) -> None:
    """A card per GPU, side by side: its figures at the side bar's load, and one sentence on what to do."""
    groups = list(table.groupby("gpu", sort=False))
    for column, (gpu, rows) in zip(st.columns(len(groups)), groups, strict=True):
        with column, st.container(border=True, height="stretch"):
            st.markdown(f"**{plain(gpu)}**")
            here = rows[rows["load"] == 1.0].iloc[0]
            if here["reason"]:
                st.caption(plain(here["reason"]))
                st.markdown("**Choose another GPU, or spread a replica over more of them.**")
                continue
            for title, text in _figures(here):
                st.metric(title, text)
            st.caption(f"{here['num_gpu_blocks']:,.0f} KV blocks, costs {plain(here['costs'])}")
            st.markdown(f"**{plain(advice(rows))}**")


def _figures(row: Any) -> list[tuple[str, str]]:
    figures = [("TTFT, p99", seconds(row["ttft_p99_s"])), ("TPOT, p99", seconds(row["tpot_p99_s"]))]
    if "goodput" in row and not pd.isna(row["goodput"]):
        figures.append(("Goodput", f"{row['goodput']:.1%}"))
    cost = row["usd_per_million"]
    figures.append(("$ per million output tokens", "no price" if pd.isna(cost) else f"{cost:.2f}"))
    return figures


def advice(rows: pd.DataFrame) -> str:
    """One sentence on what to do with a GPU, from its rows at all loads."""
    if "meets" not in rows:
        return "Set an SLO in the side bar to see the load that this GPU can take."
    good = rows[rows["meets"].astype(bool)]
    if not len(good):
        return "Do not serve this traffic with one replica: it keeps the SLO at no load tried."
    most = good["requests_per_s"].max()
    if not (good["load"] == 1.0).any():
        return f"Spread this traffic over more replicas, of at most {most:.3g} requests/s each."
    if good["load"].max() == rows["load"].max():
        return f"One replica is enough: it keeps the SLO at every load tried, up to {most:.3g} requests/s."
    return f"One replica is enough: of the loads tried it keeps the SLO up to {most:.3g} requests/s."
