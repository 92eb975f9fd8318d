"""Trust: which step costs are in force, how far the scenario is from them, and how they were checked."""

from __future__ import annotations

import pandas as pd
import streamlit as st
from pagecast.planner_app.dashboard.shell.elements import plain, show_chart, show_charts, show_progress
from pagecast.planner_app.dashboard.shell.replays import result_for, trace_for
from pagecast.planner_app.dashboard.shell.state import session
from pagecast.planner_app.dashboard.trust import charts, recorded_run
from pagecast.planner_app.dashboard.trust.matching import candidates, in_force, nearest, traits
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.core.errors import PagecastError
from pagecast.sim.costs.calibration.file import Calibration
from pagecast.sim.costs.measured.costs import MeasuredCosts
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.scenario import Scenario

_IN_FORCE, _LEFT_OUT = "in force", "all"


def render() -> None:
    """Draws the page."""
    scenario = session().view.scenario()
    costs = scenario.step_costs()
    used = in_force(costs)
    st.subheader("In force", anchor=False)
    _headline(costs, used)
    calibration = _choose(scenario, used)
    if calibration is None:
        st.info("No calibration comes with this pagecast: `pagecast calibrate` makes one from recorded runs.")
    else:
        st.subheader("How far the scenario is from it", anchor=False)
        _distance(calibration, scenario)
        st.subheader("The fit", anchor=False)
        _fit(calibration)
    st.subheader("Forecast against a recorded run", anchor=False)
    try:
        recorded_run.render()
    except PagecastError as error:
        st.error(plain(error), icon=":material/error:")


def _headline(costs: StepCosts, used: Calibration | None) -> None:
    kind = "first principles: a roofline" if used is None else "a calibration, fitted to recorded steps"
    if isinstance(costs, MeasuredCosts):
        kind = "composed of operations that were measured on this GPU"
    st.markdown(f"Step costs **{plain(costs.name)}**: {plain(kind)}")
    if used is not None:
        _cards(used)
    st.caption(plain(sentence(costs.expected_error())))


def _cards(used: Calibration) -> None:
    whole = next((row for row in used.regions if row["region"] == "all steps"), None)
    unseen = [row for row in used.cross_validation if row.get("steps of") == _LEFT_OUT]
    cards = []
    if unseen:
        worst = max(unseen, key=lambda row: abs(row["error_percent"]))
        cards.append(
            (
                "Left-out run",
                f"{worst['error_percent']:+.1f}%",
                f"summed step time of {worst['run']}, from the other runs alone: the worst of "
                f"{len(unseen)} runs left out",
            )
        )
    if whole is not None:
        cards += [
            ("Own runs", f"{whole['error_percent']:+.2f}%", "summed step time of its fit"),
            ("Median step", f"{whole['p50_percent']:.1f}%", "half of its own steps are closer"),
            ("Steps fitted", f"{whole['steps']:,}", "of all recorded runs together"),
        ]
    cards.append(
        (
            "Between runs",
            f"±{100 * used.noise.run_sd:.1f}%",
            "by how much all steps of one run are slower or faster than those of another",
        )
    )
    for column, (head, value, help) in zip(st.columns(len(cards)), cards, strict=True):
        column.metric(head, value, help=plain(help), border=True)


def _choose(scenario: Scenario, used: Calibration | None) -> Calibration | None:
    """The calibration to look at: the one in force, or any other that comes with pagecast."""
    calibrations = candidates()
    if used is not None:
        calibrations = {used.name: used, **calibrations}
    if not calibrations:
        return None
    first = used.name if used is not None else nearest(scenario, calibrations)
    if len(calibrations) == 1:
        return calibrations[first]
    names = sorted(calibrations, key=lambda name: name != first)
    name = st.selectbox(
        "Calibration to look at",
        names,
        key=f"trust_calibration-{first}",
        format_func=lambda name: name + (f" ({_IN_FORCE})" if used and name == first else ""),
    )
    return calibrations[name]


def _distance(calibration: Calibration, scenario: Scenario) -> None:
    left, right = st.columns([2, 3])
    differences = traits(calibration, scenario)
    different = [trait.name for trait in differences if not trait.same]
    with left:
        rows = [
            (plain(trait.calibrated), plain(trait.scenario), "same" if trait.same else "**differs**")
            for trait in differences
        ]
        names = [trait.name for trait in differences]
        st.table(pd.DataFrame(rows, index=names, columns=["calibrated", "scenario", ""]))
        st.caption(
            f"{plain(calibration.name)} differs from the scenario in {plain(', '.join(different))}."
            if different
            else f"{plain(calibration.name)} was made for just this set-up."
        )
    with right:
        _reach(calibration)


def _reach(calibration: Calibration) -> None:
    own = session()
    trace = trace_for(own, own.view)
    result = None if trace is None else result_for(own, own.view, trace)
    if result is None:
        show_progress("read" if trace is None else "replay", "replaying the scenario")
        return
    show_chart(charts.reach_chart(charts.reach(calibration, result)), "trust-reach")


def _fit(calibration: Calibration) -> None:
    show_charts([charts.regions(calibration), charts.left_out(calibration)], "trust-fit")
    left, right = st.columns([3, 2])
    with left:
        show_chart(charts.matrix_curve(calibration), "trust-curve")
    with right:
        st.markdown("**The runs it was fitted to**")
        runs = [
            (
                plain(run.get("run")),
                f"{run.get('steps', 0):,}",
                f"{run.get('seconds', 0):,.0f}",
                f"{run.get('part', 1):.0%}",
                "ahead" if run.get("asynchronous") else "in turn",
            )
            for run in calibration.provenance.get("runs", [])
        ]
        columns = ["run", "steps", "seconds", "used", "planned"]
        st.table(pd.DataFrame(runs, columns=columns).set_index("run"))
        terms = pd.DataFrame(
            [(name.replace("_", " "), value / 1e3) for name, value in calibration.terms_ns.items()],
            columns=["term", "microseconds each"],
        )
        st.dataframe(terms, hide_index=True, height=300)
        made_for = calibration.made_for
        st.caption(
            plain(
                f"{made_for.get('engine')} {made_for.get('engine_version', '')} with "
                f"{made_for.get('model')} on {made_for.get('gpu')}; {calibration.host.source}."
            )
        )
