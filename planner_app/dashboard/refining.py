"""The cards of the what-if: point figures at once, intervals and concurrency when their jobs end."""

from __future__ import annotations

import math
import re

import streamlit as st
from pagecast.planner_app.console import seconds
from pagecast.planner_app.dashboard.cards import Card, Words, show_cards, show_verdict
from pagecast.planner_app.dashboard.progress_view import again, bar, told
from pagecast.planner_app.dashboard.replays import result_for, spread_for, trace_for
from pagecast.planner_app.dashboard.state import Session
from pagecast.planner_app.dashboard.texts import plain
from pagecast.planner_app.dashboard.view import View
from pagecast.planner_app.planner.slo import Slo
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import Result
from pagecast.sim.replicates import Spread, summary_figures
from pagecast.traces.schema import Trace

_TICK_S = 0.5
_WITH_CARDS = ("ttft", "tpot")
_SLOTS = {"spread": "90% intervals"}

Verdicts = dict[str, tuple[tuple[str, bool], ...]]


def show(own: Session, view: View, trace: Trace, result: Result) -> None:
    """Draws the cards, and again every half second until all is in.

    Jobs begin when the same view is drawn a second time, so that a slider in motion starts none.
    """
    if own.settled != view.key():
        own.settled = None
    waiting = _waiting(own, view, trace)
    st.fragment(_draw, run_every=_TICK_S if waiting else None)(own, view, trace, result, waiting)
    own.settled = view.key()


def _waiting(own: Session, view: View, trace: Trace) -> bool:
    """Whether a later draw may show more than this one."""
    return any(value is None and _alive(own, slot) for slot, value in _ask(own, view, trace).items())


def _ask(own: Session, view: View, trace: Trace) -> dict[str, object]:
    if own.settled != view.key():
        for slot in _SLOTS:  # of what is shown no more
            if slot in own.jobs:
                own.jobs.pop(slot).stop()
        return dict.fromkeys(_SLOTS)
    return {"spread": spread_for(own, view, trace)}


def _alive(own: Session, slot: str) -> bool:
    return slot not in own.jobs or own.jobs[slot].running


def _draw(own: Session, view: View, trace: Trace, result: Result, waited: bool) -> None:
    if waited and not _waiting(own, view, trace):
        st.rerun()
    found = _ask(own, view, trace)
    spread = found["spread"]
    assert spread is None or isinstance(spread, Spread)
    verdicts = _verdicts(view, result)
    show_cards(_cards(own, view, result, spread, verdicts))
    others = [term for what, terms in verdicts.items() if what not in _WITH_CARDS for term in terms]
    if others:
        with st.container(horizontal=True):
            for term, holds in others:
                show_verdict(term, holds)
    for slot, words in _SLOTS.items():
        job = own.jobs.get(slot)
        if job is None or found[slot] is not None:
            continue
        if job.stopped:
            again(slot, words)
        elif job.running:
            bar(slot, words)
        elif job.error:
            st.warning(f"No {words}: {plain(job.error)}")


def _verdicts(view: View, result: Result) -> Verdicts:
    try:
        return judged(view, result)
    except BadInput as error:
        st.error(plain(error), icon=":material/error:")
        return {}


def _cards(
    own: Session, view: View, result: Result, spread: Spread | None, verdicts: Verdicts
) -> list[Card]:
    figures, base = summary_figures(result), _baseline(own, view)
    around = spread.around(figures) if spread else Spread()
    job = own.jobs.get("spread")
    waiting = "" if spread else told(job.progress if job else None, "90% interval")[1]

    def card(name: str, title: str, words: Words, help: str, better: int = -1) -> Card:
        value = figures.get(name)
        return Card(
            title, None if value is None or math.isnan(value) else value, words, help,
            around.low.get(name), around.high.get(name), waiting, False, base.get(name), better,
            verdicts.get(name.split("_")[0], ()),
        )  # fmt: skip

    return [
        card("ttft_s.p99", "TTFT, p99", seconds, "99% of requests have their first token within this time"),
        card("tpot_s.p99", "TPOT, p99", seconds, "time per output token after the first, 99th percentile"),
        card("token_hit_rate", "Prefix reuse", "{:.1%}".format,
             "prompt tokens found in the cache, of those that whole blocks could have held", 1),
    ]  # fmt: skip


def _baseline(own: Session, view: View) -> dict[str, float]:
    """The figures of the baseline, where there is one and it is another view."""
    pinned = own.pins.get(own.baseline)
    if pinned is None or pinned.key() == view.key():
        return {}
    try:
        trace = trace_for(own, pinned)
        result = None if trace is None else result_for(own, pinned, trace, "baseline")
    except BadInput:
        return {}
    return {} if result is None else summary_figures(result)


def judged(view: View, result: Result) -> Verdicts:
    """Terms of the SLO and whether they hold, by the latency they bound (`goodput` for shares).

    Errors: BadInput for an SLO that can't be read.
    """
    if not view["slo"].strip():
        return {}
    found: dict[str, list[tuple[str, bool]]] = {}
    for term in Slo.parse(view["slo"]).verdict(result).terms:
        what = re.split(r"[_(]", term.text)[0]
        found.setdefault(what, []).append((term.text, term.holds))
    return {what: tuple(terms) for what, terms in found.items()}
