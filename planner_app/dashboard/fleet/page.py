"""Fleet: several replicas behind a router, over time, router by router, and with one of them lost."""

from __future__ import annotations

from typing import Any

import streamlit as st
from pagecast.planner_app.dashboard.fleet.charts import a_replicas_death, hits_per_router, named
from pagecast.planner_app.dashboard.fleet.study import FleetStudy, study_for
from pagecast.planner_app.dashboard.shell.elements import failed, show_charts, show_progress
from pagecast.planner_app.dashboard.shell.replays import trace_for
from pagecast.planner_app.dashboard.shell.state import session
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.reports.fleet_charts import replicas_over_time, requests_per_replica
from pagecast.planner_app.wording.quantities import seconds, share
from pagecast.sim.fleet.routers.registry import KINDS
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.machine.gpus import gpu as find_gpu

MOST_REPLICAS = 16
_FIRST = ["round-robin", "prefix-affinity", "cost"]
_SCALING = {"none": None, "queue": 2.0, "kv": 0.6, "ttft": 1.0}


def render() -> None:
    """Draws the page."""
    own, view = session(), session().view
    trace = trace_for(own, view)
    if trace is None:
        show_progress("read", "reading the upload")
        return
    fleet, routers, loss = _ask()
    study = study_for(own, view, trace, fleet, routers, loss)
    if study is None:
        if not failed("fleet"):
            show_progress("fleet", "the fleet behind each router")
        return
    _cards(view, study)
    figures = [replicas_over_time(named(study)), hits_per_router(study.routers)]
    if study.lost is not None:
        figures.append(a_replicas_death(study))
    figures.append(requests_per_replica(study.run.summary["fleet"]))
    show_charts(figures, "fleet")
    st.caption(
        "Every replica is one of the side bar's server. A new one starts in the time that its weights take "
        "from a disk of 2 GB/s, and 40 s of the engine. More than this page asks for (different replicas, "
        "prefill and decode apart, a rollout) is in a fleet file: pagecast replay --fleet FILE."
    )


def _ask() -> tuple[FleetSettings, list[str], float | None]:
    """The fleet that the page's widgets describe, the routers to compare, and when a replica is lost."""
    left, middle, right = st.columns(3)
    with left:
        replicas = st.slider(
            "Replicas", 1, MOST_REPLICAS, 4, key="replicas", bind="query-params", help="at the start"
        )
        router = st.selectbox(
            "Router",
            list(KINDS),
            index=list(KINDS).index("cost"),
            key="router",
            bind="query-params",
            help="; ".join(f"{name}: {kind.about}" for name, kind in KINDS.items()),
        )
    with middle:
        routers = st.multiselect(
            "Routers to compare",
            list(KINDS),
            _FIRST,
            key="routers",
            bind="query-params",
            help="each serves the same trace on the same replicas",
        )
        metric = st.selectbox(
            "Autoscale by",
            list(_SCALING),
            key="autoscale",
            bind="query-params",
            help="waiting requests, share of KV blocks in use, or a forecast of TTFT in seconds",
        )
    with right:
        lose = st.toggle("Lose a replica", True, key="lose", bind="query-params")
        share = st.slider(
            "when, in percent of the trace",
            1,
            99,
            50,
            key="loss",
            bind="query-params",
            disabled=not lose,
            help="it is started again at once",
        )
    return _fleet(replicas, router, metric), list(routers), share / 100 if lose else None


def _fleet(replicas: int, router: str, metric: str) -> FleetSettings:
    fields: dict[str, Any] = {"groups": [{"replicas": replicas}], "router": {"policy": router}}
    target = _SCALING[metric]
    if target is not None:
        fields["scaling"] = {
            "metric": metric,
            "target": target,
            "least": 1,
            "most": 2 * MOST_REPLICAS,
        }
    return FleetSettings.make(fields)


def _cards(view: PageView, study: FleetStudy) -> None:
    """The fleet's figures in one row."""
    summary = study.run.summary
    fleet = summary["fleet"]
    price = view.prices().get(find_gpu(view["gpu"]).name)
    cost = "no price" if price is None else f"${price * fleet['gpu_hours']:,.2f}"
    cards = (
        ("TTFT, p99", seconds(summary["ttft_s"]["p99"])),
        ("TPOT, p99", seconds(summary["tpot_s"]["p99"])),
        ("Found cached", share(summary["token_hit_rate"])),
        ("GPU hours", f"{fleet['gpu_hours']:.2f}"),
        ("Cost", cost),
    )
    for column, (title, text) in zip(st.columns(len(cards)), cards, strict=True):
        column.metric(title, text)
