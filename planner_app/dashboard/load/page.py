"""Load: TTFT, goodput and cost against load, with several GPUs side by side."""

from __future__ import annotations

from math import ceil
from typing import Any

import pandas as pd
import streamlit as st
from pagecast.planner_app.dashboard.load.charts import (
    cost_against_load,
    goodput_against_load,
    ttft_against_load,
)
from pagecast.planner_app.dashboard.load.curves import curves_for, usd_per_million
from pagecast.planner_app.dashboard.load.highest import SLOT, Rates, rates_for
from pagecast.planner_app.dashboard.shell.elements import (
    cost_words,
    failed,
    plain,
    show_charts,
    show_progress,
)
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
    rates = rates_for(own, view, trace, gpus)
    _cards(table, rates)
    if rates is None and view["slo"].strip() and not failed(SLOT):
        show_progress(SLOT, "the highest rate of each GPU")
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
        "Each point is a replay at a multiple of the side bar's rate, long enough for the server to settle: "
        "its figures are of more requests than What-if's, and of none that came first or last. Think times "
        "stay. A line ends where a GPU is overloaded. The highest rate is that of pagecast plan, which gives "
        "it an interval."
    )


def ttft_bound(view: PageView) -> float | None:
    """The SLO's bound on TTFT p99 in seconds, or on another statistic of TTFT where it has only that."""
    if not view["slo"].strip():
        return None
    terms = [term for term in Slo.parse(view["slo"]).terms if isinstance(term, Latency)]
    bounds = {term.statistic: term.bound_s for term in terms if term.latency == "ttft"}
    return bounds.get("p99", next(iter(bounds.values()), None))


def _cards(table: pd.DataFrame, rates: Rates | None) -> None:
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
            costs = plain(cost_words(here["costs"]))
            st.caption(f"{here['num_gpu_blocks']:,.0f} KV blocks, {costs}")
            st.markdown(f"**{plain(advice(rows, rates))}**")


def _figures(row: Any) -> list[tuple[str, str]]:
    figures = [("TTFT, p99", seconds(row["ttft_p99_s"])), ("TPOT, p99", seconds(row["tpot_p99_s"]))]
    if "goodput" in row and not pd.isna(row["goodput"]):
        figures.append(("Goodput", f"{row['goodput']:.1%}"))
    cost = row["usd_per_million"]
    figures.append(("$ per million output tokens", "no price" if pd.isna(cost) else f"{cost:.2f}"))
    return figures


def advice(rows: pd.DataFrame, rates: Rates | None = None) -> str:
    """One sentence on what to do with a GPU, from its rows at all loads and the highest rates."""
    if "meets" not in rows:
        return "Set an SLO in the side bar to see the load that this GPU can take."
    offered, gpu = float(rows[rows["load"] == 1.0]["requests_per_s"].iloc[0]), rows["gpu"].iloc[0]
    if rates is None or gpu not in rates:
        return _between(rows)
    most = rates[gpu]
    if most is None:
        return "Do not serve this traffic with this GPU: one replica keeps the SLO at no load."
    if offered <= most:
        return f"One replica is enough: it takes up to {most:.3g} requests/s."
    return (
        f"Spread this traffic over {ceil(offered / most)} replicas: each takes up to {most:.3g} requests/s."
    )


def _between(rows: pd.DataFrame) -> str:
    """The loads tried between which the highest one lies."""
    meets = rows["meets"].astype(bool)
    good, bad = rows[meets]["requests_per_s"], rows[~meets]["requests_per_s"]
    if not len(good):
        return f"The SLO is broken at every load tried, from {bad.min():.3g} requests/s on."
    above = bad[bad > good.max()]
    if not len(above):
        return f"The SLO holds at every load tried, up to {good.max():.3g} requests/s."
    return f"The SLO holds at {good.max():.3g} requests/s and breaks at {above.min():.3g}."
