"""The first page, What-if: figures of the side bar's scenario at once, and intervals as jobs end."""

from __future__ import annotations

import streamlit as st
from pagecast.planner_app.dashboard.shell.elements import cost_words, plain, show_charts, show_progress
from pagecast.planner_app.dashboard.shell.pins import pin_button
from pagecast.planner_app.dashboard.shell.replays import result_for, trace_for
from pagecast.planner_app.dashboard.shell.state import session
from pagecast.planner_app.dashboard.what_if import effects, refining
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.planner_app.wording.quantities import seconds
from pagecast.sim.replay import Result


def render() -> None:
    """Draws the page."""
    own, view = session(), session().view
    refining.forget(own, view)
    trace = trace_for(own, view)
    if trace is None:
        show_progress("read", "reading the upload")
        return
    result = result_for(own, view, trace)
    if result is None:
        show_progress("replay", "replaying")
        return
    left, right = st.columns([5, 1], vertical_alignment="center")
    left.markdown(_headline(result))
    with right:
        pin_button(own, view)
    refining.show(own, view, trace, result)
    effects.show(own, view, trace, result)
    if refining.first_look(own):
        return
    _charts(result)
    with st.expander("Notes on these figures", expanded=True):
        for note in result.notes:
            st.markdown(f"- {plain(sentence(note))}")


def _headline(result: Result) -> str:
    s, scenario = result.summary, result.scenario
    rate = s["completed"] / s["makespan_s"] if s["makespan_s"] else 0.0
    unserved = "".join(f", {s[state]:,} {state}" for state in ("rejected", "cancelled") if s[state])
    gpus = f"{scenario.tensor_parallel_size} × " if scenario.tensor_parallel_size > 1 else ""
    return (
        f"**{plain(result.trace)}** on **{plain(scenario.model)}**, **{gpus}{plain(scenario.gpu)}**: "
        + plain(
            f"{s['completed']:,} of {s['requests']:,} requests served{unserved} in "
            f"{seconds(s['makespan_s'])} ({rate:.3g}/s), {s['output_tokens_per_s']:,.0f} output tokens/s"
            f", {s['preemptions']:,} preemptions; {cost_words(s['costs'])}"
        )
    )


def _charts(result: Result) -> None:
    """The charts: memory, TTFT, distributions, load over time. What draws them takes a while to import."""
    from pagecast.planner_app.dashboard.what_if.memory_charts import bytes_per_token, hbm_waterfall
    from pagecast.planner_app.dashboard.what_if.ttft_chart import ttft_parts
    from pagecast.planner_app.reports.charts import (
        cached_and_uncached_ttft,
        kv_over_time,
        latencies,
        load_over_time,
        step_tokens,
    )

    requests, steps, scenario = result.requests, result.steps, result.scenario
    budget = scenario.budget()
    figures = [
        ttft_parts(requests, tiers=scenario.host is not None),
        cached_and_uncached_ttft(requests),
        latencies(requests, ("ttft_s", "tpot_s")),
        load_over_time(steps),
        kv_over_time(steps, result.pool_blocks),
        step_tokens(steps, scenario.max_num_batched_tokens),
    ]
    if budget is not None:
        figures = [hbm_waterfall(budget), *figures, bytes_per_token(budget)]
    show_charts(figures, "whatif")
