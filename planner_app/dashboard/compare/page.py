"""Compare: pinned views side by side, and what a view can be taken away as."""

from __future__ import annotations

import streamlit as st
from pagecast.planner_app.dashboard.compare import exports
from pagecast.planner_app.dashboard.compare.table import distributions, table
from pagecast.planner_app.dashboard.shell.elements import plain, show_charts, show_progress
from pagecast.planner_app.dashboard.shell.jobs import results as job_results
from pagecast.planner_app.dashboard.shell.pins import pin_button, unpin
from pagecast.planner_app.dashboard.shell.replays import result_for, spread_key, trace_for
from pagecast.planner_app.dashboard.shell.state import Session, session, show
from pagecast.planner_app.dashboard.shell.view import UPLOAD, PageView, command
from pagecast.sim.core.errors import PagecastError
from pagecast.sim.replay import Result

_NOW = "the side bar"


def render() -> None:
    """Draws the page."""
    own = session()
    left, right = st.columns([5, 1], vertical_alignment="center")
    left.markdown(f"**Compare**: {len(own.pins)} pinned, and what the side bar shows now")
    with right:
        pin_button(own, own.view)
    views = dict(own.pins)
    if own.view.key() not in [view.key() for view in views.values()]:
        views[_NOW] = own.view
    results = _replay(own, views)
    if own.pins:
        _manage(own)
    else:
        st.info("Pin a scenario, change something in the side bar, and see here what the change does.")
    if results:
        base = own.baseline if own.baseline in results else next(iter(results))
        st.table(table(results, views, base))
        show_charts([distributions(results, "TTFT"), distributions(results, "TPOT")], "compare")
        _exports(own, views, results)


def _replay(own: Session, views: dict[str, PageView]) -> dict[str, Result]:
    """The results of the views, as far as they are in; the others say why not."""
    results = {}
    for number, (name, view) in enumerate(views.items()):
        try:
            trace = trace_for(own, view)
            slot = f"compare-{number}"
            result = None if trace is None else result_for(own, view, trace, slot)
        except PagecastError as error:
            st.error(f"{plain(name)}: {plain(error)}", icon=":material/error:")
            continue
        if result is not None:
            results[name] = result
        else:
            show_progress("read" if trace is None else slot, name)
    return results


def _manage(own: Session) -> None:
    names = list(own.pins)
    left, middle, right = st.columns([3, 1, 1], vertical_alignment="bottom")
    selection = left.segmented_control(
        "Baseline", names, default=own.baseline, format_func=plain, key="baseline-choice", required=True
    )
    if selection and selection != own.baseline:
        own.baseline = selection
        st.rerun()
    middle.button(
        "Show the baseline",
        on_click=show,
        args=(own.pins[own.baseline],),
        width="stretch",
        help="moves the side bar to the baseline's scenario",
    )
    right.button("Take the baseline away", on_click=unpin, args=(own.baseline,), width="stretch")


def _exports(own: Session, views: dict[str, PageView], results: dict[str, Result]) -> None:
    with st.container(border=True):
        st.markdown("**Take away**")
        names = list(results)
        name = st.selectbox("Scenario", names, index=len(names) - 1, key="export")
        view, result = views[name], results[name]
        trace = trace_for(own, view)
        spread = job_results.get(spread_key(view))
        files = (
            ("Scenario, YAML", exports.SCENARIO_FILE, "application/yaml", exports.scenario_yaml(result)),
            ("Report, HTML", "report.html", "text/html", lambda: exports.report_html(result, spread)),
            (
                "Requests, parquet",
                "requests.parquet",
                "application/vnd.apache.parquet",
                lambda: exports.requests_parquet(result),
            ),
            (
                "Trace, parquet",
                "trace.parquet",
                "application/vnd.apache.parquet",
                lambda: exports.trace_parquet(trace) if trace is not None else b"",
            ),
        )
        for column, (label, file, kind, data) in zip(st.columns(len(files)), files, strict=True):
            column.download_button(
                label, data, file, kind, key=f"take-{file}", on_click="ignore", width="stretch"
            )
        upload = own.uploads[view["upload"]].name if view["trace"] == UPLOAD else ""
        st.caption("The same figures on the command line:")
        st.code(command(view, upload), language="bash", wrap_lines=True)
        st.caption("With the scenario's file (the side bar's rate and number of requests are not in it):")
        st.code(command(view, upload, exports.SCENARIO_FILE), language="bash", wrap_lines=True)
