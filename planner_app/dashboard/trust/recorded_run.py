"""A recorded run of a real engine beside its forecast: asked for by the folder's path, made in a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st
from pagecast.planner_app.dashboard.shell.elements import plain, show_chart, show_charts, show_progress
from pagecast.planner_app.dashboard.shell.state import session
from pagecast.planner_app.reports import validate_charts
from pagecast.planner_app.wording.accuracy import expected_error
from pagecast.planner_app.wording.figures import shown, title
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.file import shipped
from pagecast.sim.replay.replicates import STEP_TIMES
from pagecast.sim.runs.engine_rules import rules_of_run
from pagecast.sim.runs.forecast import REPLICATES, Forecast, ForecastRow, forecast
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import DecisionReport, compare_decisions

_SLOT, _ASKED = "validate", "_trust_asked"
_IN_A_ROW = 3
_CARDS = {
    "ttft_s.p50": "TTFT p50",
    "ttft_s.p99": "TTFT p99",
    "tpot_s.p50": "TPOT p50",
    "output_tokens_per_s": "Throughput",
}


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Comparison with a recorded run: decisions on its own clock, and a forecast's times.

    `origin`: a sentence on a run that no engine made.
    """

    decisions: DecisionReport
    forecast: Forecast
    origin: str = ""


def compare_job(folder: str, costs: str, replicates: int, *, progress: Any) -> RunComparison:
    """Reads a run and compares; `progress` gets the number of replays done. Errors: BadInput."""
    run = RecordedRun.load(folder)
    result = forecast(
        run,
        costs,
        replicates=replicates,
        workers=1,
        progress=lambda done: progress((done, replicates + len(STEP_TIMES), "replays")),
    )
    return RunComparison(compare_decisions(run, rules_of_run(run.meta)), result, simulated_run(run.meta))


def simulated_run(meta: Mapping[str, Any]) -> str:
    """A sentence on a run that pagecast simulated itself; empty for one of an engine."""
    if meta.get("engine") != "pagecast simulated":
        return ""
    return (
        f"pagecast simulated this run, with step costs {meta.get('costs', 'auto')}: what differs is the step "
        "costs chosen here, and says nothing about forecasts of an engine."
    )


def render() -> None:
    """Asks for a folder and shows what its run says."""
    if not local_only():
        st.info(
            "This server listens to other machines, so that pages can't open folders on it. Start "
            "`pagecast dashboard` without `--host`, or use `pagecast validate FOLDER`."
        )
        return
    _form()
    choices = st.session_state.get(_ASKED)
    if choices is None:
        st.caption(
            "A recorded run is a folder with `meta.json`, `inputs.jsonl.gz`, `requests.csv.gz` and "
            "`steps.jsonl.gz`, as `pagecast record` writes it."
        )
        return
    own = session()
    comparison = own.ask(_SLOT, ("validate", *choices), compare_job, *choices[:3])
    if comparison is None:
        job = own.jobs[_SLOT]
        if job.error and not job.running:
            raise BadInput(job.error)
        show_progress(_SLOT, "replaying the run")
        return
    _show(comparison)


def local_only() -> bool:
    """Whether only this machine can reach the server: only then may a page name its folders."""
    address = st.get_option("server.address")
    if address in (None, "", "localhost"):
        return True
    with suppress(ValueError):
        return ip_address(address).is_loopback
    return False


def _form() -> None:
    with st.form("trust_form", border=False):
        columns = st.columns([4, 2, 1.2], vertical_alignment="bottom")
        folder = columns[0].text_input(
            "Folder of a recorded run", key="trust_run", max_chars=1000, placeholder="/path/to/run"
        )
        names = ["auto", "roofline", *sorted(shipped())]
        costs = columns[1].selectbox("Step costs", names, key="trust_costs")
        if columns[2].form_submit_button("Compare", width="stretch", type="primary") and folder.strip():
            session().jobs.pop(_SLOT, None)
            path = os.path.expanduser(folder.strip())
            st.session_state[_ASKED] = (path, costs, REPLICATES, _changed_ns(path))


def _changed_ns(folder: str) -> int:
    """When the run was last written: one that has changed is read anew."""
    with suppress(OSError, ValueError):
        return max(file.stat().st_mtime_ns for file in Path(folder).glob("*.gz"))
    return 0


def _show(comparison: RunComparison) -> None:
    result, decided = comparison.forecast, comparison.decisions
    st.markdown(f"**{plain(result.run)}**, forecast with step costs {plain(result.costs)}")
    if comparison.origin:
        st.warning(plain(comparison.origin))
    if result.in_sample:
        st.warning("The step costs were fitted to this run, so this checks the fit, not the forecast.")
    by_name = {row.name: row for row in result.rows}
    cards = [
        (
            "Steps decided alike",
            f"{decided.steps_matched:,} of {decided.steps_recorded:,}",
            decided.first_mismatch or "batch, context, queue and cache use, step by step",
        )
    ]
    for name, label in _CARDS.items():
        row = by_name.get(name)
        if row is not None and row.error_percent == row.error_percent:
            cards.append(
                (
                    f"{label} error",
                    f"{row.error_percent:+z.1f}%",
                    f"{shown(name, row.predicted)} forecast, {shown(name, row.measured)} measured",
                )
            )
    coverage = result.coverage()
    if coverage["figures"]:
        cards.append(
            (
                "Inside their 90% interval",
                f"{coverage['inside']} of {coverage['figures']}",
                f"median half-width {coverage['median_half_width_percent']:.1f}% of the measured",
            )
        )
    for first in range(0, len(cards), _IN_A_ROW):
        part = cards[first : first + _IN_A_ROW]
        for column, (head, value, help) in zip(st.columns(_IN_A_ROW), part, strict=False):
            column.metric(head, value, help=plain(help), border=True)
    show_chart(validate_charts.errors(result), "trust-errors")
    show_charts(
        [validate_charts.distribution(result, name) for name in ("ttft_s", "tpot_s")], "trust-latency"
    )
    show_charts([validate_charts.load(result, key) for key in ("running", "waiting")], "trust-load")
    st.dataframe(pd.DataFrame([_cells(row) for row in result.rows]), hide_index=True, height="content")
    st.caption(plain(expected_error(result)))


def _cells(row: ForecastRow) -> dict[str, str]:
    bounds = ""
    if row.low is not None and row.high is not None:
        bounds = f"{shown(row.name, row.low)} to {shown(row.name, row.high)}"
    return {
        "": title(row.name),
        "forecast": shown(row.name, row.predicted),
        "measured": shown(row.name, row.measured),
        "error": "-" if row.error_percent != row.error_percent else f"{row.error_percent:+.2f}%",
        "90% interval": bounds,
        "holds the measurement": {True: "yes", False: "no", None: ""}[row.covered],
        "per 1% of step time": "" if row.sensitivity is None else f"{row.sensitivity:+z.1f}%",
    }
