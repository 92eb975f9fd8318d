"""The top of the what-if: cards that are drawn at once, and again when the jobs behind them end."""

from __future__ import annotations

import time

import streamlit as st
from pagecast.planner_app.dashboard.shell.cards import show_cards, show_verdict
from pagecast.planner_app.dashboard.shell.elements import again, bar, plain, progress_of
from pagecast.planner_app.dashboard.shell.jobs import results
from pagecast.planner_app.dashboard.shell.problems import fragment
from pagecast.planner_app.dashboard.shell.replays import spread_for, spread_key
from pagecast.planner_app.dashboard.shell.starting import start_problem
from pagecast.planner_app.dashboard.shell.state import Session
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.dashboard.what_if import choices
from pagecast.planner_app.dashboard.what_if.admissible import (
    BASE,
    INTERVAL,
    POINT,
    ask,
    ask_baseline,
    key,
    known_of,
)
from pagecast.planner_app.dashboard.what_if.advice import lost_hits
from pagecast.planner_app.dashboard.what_if.choices import show_choices
from pagecast.planner_app.dashboard.what_if.headline import (
    WITH_CARDS,
    Verdicts,
    ViewResults,
    baseline_of,
    cards_of,
    verdicts_of,
)
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import Result
from pagecast.traces.schema import Trace

_TICK_S = 0.7
FIRST_LOOK_S = 12.0  # longest that a session's first charts wait for the first answers
_CHECKED = dict.fromkeys(choices.CHECKS.values(), choices.FIRST)
_ASKED = dict.fromkeys(choices.SLOTS, choices.FIRST)  # the slot of the job behind an answer, if it is another
_SLOTS = {
    choices.FIRST: choices.FIRST,
    **{slot: slot for slot in choices.CHECKS.values()},
    "spread": "90% intervals",
    POINT: "admissible concurrency",
    INTERVAL: "its 90% interval",
    BASE: "the baseline's concurrency",
}


def show(own: Session, view: PageView, trace: Trace, result: Result) -> None:
    """Draws the cards, and again every `_TICK_S` until all is in.

    Jobs begin when the same view is drawn a second time, so that a slider in motion starts none. Until both
    first answers are in, only their cards are drawn again.
    """
    if _is_first(own):  # no slider has moved
        own.settled = (view.key(), view["slo"])
    answers = _ask(own, view, trace)
    waiting = _waiting(own, answers)
    if waiting and not _answered(own, answers):
        fragment(_draw_first, run_every=_TICK_S)(own, view, trace)
        _draw_others(own, view, trace, result, answers)
    else:
        fragment(_draw, run_every=_TICK_S if waiting else None)(own, view, trace, result, waiting)
    own.settled = (view.key(), view["slo"])


def first_look(own: Session) -> bool:
    """Whether charts are to come later: with a session's first view, when both questions are answered.

    Their code keeps a browser busy, and a core with it.
    """
    first = _is_first(own)
    own.charts_due_s = time.monotonic() + FIRST_LOOK_S if first else 0.0
    return first


def _is_first(own: Session) -> bool:
    return own.charts_due_s is None and FIRST_LOOK_S > 0


def forget(own: Session, view: PageView) -> None:
    """Stops the jobs of what is shown no more, before the new view's replay wants the cores."""
    if own.settled != (view.key(), view["slo"]):
        own.settled = None
        for slot in _SLOTS:
            if slot in own.jobs:
                own.jobs.pop(slot).stop()


def _ask(own: Session, view: PageView, trace: Trace) -> dict[str, object]:
    """The result of each job; None before its end."""
    pinned = baseline_of(own, view)
    answers: dict[str, object]
    others = {"spread": spread_key(view), **{slot: key(view, slot) for slot in (POINT, INTERVAL)}}
    if own.settled != (view.key(), view["slo"]):
        answers = {
            **choices.known_all(view),
            **{slot: results.get(job_key) for slot, job_key in others.items()},
        }
        return answers if pinned is None else {**answers, BASE: known_of(pinned)}
    # In the order in which they are worth most: two run at once, and the first questions alone.
    answers = {**choices.ask_all(own, view, trace)}
    if _answered(own, answers):
        answers["spread"] = spread_for(own, view, trace)
        answers |= {slot: ask(own, view, trace, slot) for slot in (POINT, INTERVAL)}
    else:
        answers |= {slot: results.get(job_key) for slot, job_key in others.items()}
    if pinned is not None:
        answers[BASE] = ask_baseline(own, pinned) if answers[POINT] is not None else known_of(pinned)
    return answers


def _answered(own: Session, answers: dict[str, object]) -> bool:
    """Whether both first answers are in, or will not come."""
    return all(answers[slot] is not None or not _may_come(own, slot) for slot in choices.SLOTS)


def _waiting(own: Session, answers: dict[str, object]) -> bool:
    """Whether a later draw may show more than this one."""
    return any(value is None and _may_come(own, slot) for slot, value in answers.items())


def _may_come(own: Session, slot: str) -> bool:
    """Whether a job runs or will: the last ones are begun by the end of the first search."""
    before = {**dict.fromkeys((INTERVAL, BASE), POINT), **_CHECKED}.get(slot)
    job = own.jobs.get(_ASKED.get(slot, slot)) or (own.jobs.get(before) if before else None)
    return job is None or job.running


def _draw_first(own: Session, view: PageView, trace: Trace) -> None:
    answers, now_s = _ask(own, view, trace), time.monotonic()
    answered, due_s = _answered(own, answers), own.charts_due_s or 0.0
    if answered and due_s > now_s:  # they are drawn, and charts the next time
        own.charts_due_s = now_s
    elif answered or 0 < due_s <= now_s:
        own.charts_due_s = 0.0
        st.rerun()
    show_choices(own, view, answers)


def _draw(own: Session, view: PageView, trace: Trace, result: Result, waited: bool) -> None:
    answers = _ask(own, view, trace)
    if waited and not _waiting(own, answers):
        st.rerun()
    show_choices(own, view, answers)
    _draw_others(own, view, trace, result, answers)


def _draw_others(
    own: Session, view: PageView, trace: Trace, result: Result, answers: dict[str, object]
) -> None:
    verdicts = {} if start_problem(view) else _verdicts(view, result)
    show_cards(
        cards_of(
            own,
            ViewResults(
                view,
                trace,
                result,
                verdicts,
                answers["spread"],  # type: ignore[arg-type]
                known_of(view),
                {slot: "" if answers[slot] is not None else _word(own, slot) for slot in answers},
                lost_hits(view, trace, result),
            ),
        )
    )
    others = [term for what, terms in verdicts.items() if what not in WITH_CARDS for term in terms]
    if others:
        with st.container(horizontal=True):
            for term, holds in others:
                show_verdict(term, holds)
    shown_above = {*choices.SLOTS, *choices.CHECKS.values()}
    active = [
        slot for slot in answers if slot in own.jobs and answers[slot] is None and slot not in shown_above
    ]
    for column, slot in zip(st.columns(len(active)) if active else (), active, strict=True):
        with column:
            _follow(own, slot, _SLOTS[slot])


def _verdicts(view: PageView, result: Result) -> Verdicts:
    try:
        return verdicts_of(view, result)
    except BadInput as error:
        st.error(plain(error), icon=":material/error:")
        return {}


def _word(own: Session, slot: str) -> str:
    """The text in the place of an interval that is still to come."""
    job = own.jobs.get(slot)
    if job is not None and (job.stopped or job.error):
        return "no 90% interval"
    if job is None or job.progress is None:
        return "90% interval to come"
    return progress_of(job.progress, "90% interval")[1]


def _follow(own: Session, slot: str, words: str) -> None:
    job = own.jobs[slot]
    if job.stopped:
        again(slot, words)
    elif job.running:
        bar(slot, words)
    elif job.error:
        st.warning(f"No {words}: {plain(job.error)}")
