"""Tune: which block size and which HBM budget, and how large a cache the trace can use."""

from __future__ import annotations

import streamlit as st
from pagecast.planner_app.dashboard.shell.elements import failed, plain, show_chart, show_progress
from pagecast.planner_app.dashboard.shell.replays import trace_for
from pagecast.planner_app.dashboard.shell.state import Session, session
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.dashboard.shell.workload import hits_of
from pagecast.planner_app.dashboard.tune.charts import FIGURES, grid_map, hit_curve
from pagecast.planner_app.dashboard.tune.searches import grid_for, tuned_for
from pagecast.planner_app.dashboard.what_if.choices import FIRST, ask_all, show_choices
from pagecast.planner_app.planner.tune.knobs import TuneResult
from pagecast.planner_app.reports.sweep_charts import against_knob
from pagecast.traces.schema import Trace

_KNOBS = {"block_size": "Block size", "gpu_memory_utilization": "HBM budget"}
_CURVES = {
    "Hit tokens": ("reused_prefix_tokens",),
    "TTFT": ("ttft_mean_s", "ttft_p99_s"),
    "TPOT": ("tpot_mean_s", "tpot_p95_s"),
    "Concurrency": ("admissible_concurrency", "static_concurrency"),
    "Tail waste": ("tail_waste_tokens",),
    "Tables and lookups": ("table_entries", "lookup_blocks"),
}
_MAP, _CURVE = "TTFT p99", "Hit tokens"


def render() -> None:
    """Draws the page."""
    own, view = session(), session().view
    trace = trace_for(own, view)
    if trace is None:
        show_progress("read", "reading the upload")
        return
    if view["slo"].strip():
        _advice(own, view, trace)
    _map(own, view, trace)
    _curves(own, view, trace)
    show_chart(hit_curve(hits_of(view, trace), view.scenario().blocks()), "hit-curve")


def _advice(own: Session, view: PageView, trace: Trace) -> None:
    """The cards of What-if, whose advice is that of `tune` with an SLO."""
    answers = ask_all(own, view, trace)
    show_choices(own, view, answers)
    running = [slot for slot in (FIRST, *answers) if slot in own.jobs and own.jobs[slot].running]
    if running:
        show_progress(running[0], running[0])


def _map(own: Session, view: PageView, trace: Trace) -> None:
    title = st.segmented_control(
        "Map of block size and HBM budget",
        list(FIGURES),
        default=_MAP,
        required=True,
        key="map",
        bind="query-params",
    )
    table = grid_for(own, view, trace)
    if table is not None:
        scenario = view.scenario()
        now = (scenario.gpu_memory_utilization or 0.0, scenario.block_size)
        show_chart(grid_map(table, title or _MAP, now), "grid-map")
    elif not failed("grid"):
        show_progress("grid", "block size × HBM budget")


def _curves(own: Session, view: PageView, trace: Trace) -> None:
    title = st.segmented_control(
        "Tuning curves", list(_CURVES), default=_CURVE, required=True, key="curve", bind="query-params"
    )
    simulate = st.toggle(
        "Simulate the concurrency of each setting",
        key="simulate",
        bind="query-params",
        help="a search in a closed loop for each: it takes a minute or more",
    )
    curves = {knob: tuned_for(own, view, trace, knob, simulate) for knob in _KNOBS}
    for column, (knob, tuned) in zip(st.columns(2), curves.items(), strict=True):
        with column:
            if tuned is not None:
                if view["slo"].strip():
                    continue
                value = f": {plain(tuned.recommended)}" if tuned.recommends else ""
                st.markdown(f"**{_KNOBS[knob]}{value}.** {plain(tuned.reason)}")
            elif not failed(f"tune-{knob}"):
                show_progress(f"tune-{knob}", _KNOBS[knob])
    for column, tuned in zip(st.columns(2), curves.values(), strict=True):
        if tuned is not None:
            with column:
                _against(tuned, _CURVES[title or _CURVE])


def _against(tuned: TuneResult, figures: tuple[str, ...]) -> None:
    ran = tuned.table[tuned.table["reason"] == ""]
    columns = tuple(figure for figure in figures if figure in ran and ran[figure].notna().any())
    if columns:
        show_chart(against_knob(ran, tuned.knob, columns, tuned.recommended), f"tuned-{tuned.knob}")
    for note in tuned.notes:
        st.caption(plain(note))
