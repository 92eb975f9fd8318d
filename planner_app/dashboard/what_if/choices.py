"""The two questions that come first: which block size, and which HBM budget. A card each, with a button."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import streamlit as st
from pagecast.planner_app.dashboard.shell.elements import again, plain, progress_of
from pagecast.planner_app.dashboard.shell.jobs import begin, results
from pagecast.planner_app.dashboard.shell.state import Session, show
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.dashboard.what_if.choice_job import Answer, first_choices, lasting_choice
from pagecast.planner_app.planner.tune.choice import BLOCK_SIZE, HBM, Choice
from pagecast.planner_app.planner.tune.worth import shown, worth
from pagecast.traces.schema import Trace

SLOTS = {BLOCK_SIZE: "block sizes", HBM: "HBM budgets"}
FIRST = "first choices"  # the slot of the job that answers both
CHECKS = {knob: f"{words} by long loads" for knob, words in SLOTS.items()}
_UNSURE = {
    BLOCK_SIZE: " Longer loads are being tried.",
    HBM: " Longer loads, and smaller budgets, are being tried.",
}
_TITLES = {BLOCK_SIZE: "Block size", HBM: "HBM budget"}


def key(view: PageView, knob: str = "") -> tuple[object, ...]:
    """The key of the first choices among the results, or of one by long loads."""
    return ("choice", knob, view["slo"], *view.key())


def begin_first(view: PageView, trace: Trace) -> None:
    """Begins the job of both first answers before a session asks for it."""
    begin(key(view), first_choices, trace, view.scenario(), view["slo"])


def ask_all(own: Session, view: PageView, trace: Trace) -> dict[str, Answer | None]:
    """Both choices by slot: first by short loads, and once these are in by long ones."""
    arguments = (trace, view.scenario())
    first = own.ask(FIRST, key(view), first_choices, *arguments, view["slo"])
    answers: dict[str, Answer | None] = dict.fromkeys((*SLOTS, *CHECKS.values()))
    if first is not None:
        answers |= first
        for knob, check in CHECKS.items():
            answers[check] = first[knob]
            if isinstance(first[knob], Choice):
                long_key = key(view, knob)
                answers[check] = own.ask(check, long_key, lasting_choice, *arguments, knob, view["slo"])
    return answers


def known_all(view: PageView) -> dict[str, Answer | None]:
    """Both choices by slot, as far as they are in."""
    first = results.get(key(view)) or dict.fromkeys(SLOTS)
    return {**first, **{check: results.get(key(view, knob)) for knob, check in CHECKS.items()}}


def show_choices(own: Session, view: PageView, answers: Mapping[str, object]) -> None:
    """Draws both cards from the answers by slot: those by long loads, or until they are in the first ones."""
    choices = {knob: cast(Answer | None, answers[CHECKS[knob]] or answers[knob]) for knob in SLOTS}
    scenario = view.scenario()
    for column, (knob, choice) in zip(st.columns(2), choices.items(), strict=True):
        with column, st.container(border=True, height="stretch"):
            left, right = st.columns([3, 1], vertical_alignment="center")
            with left:
                sure = answers[CHECKS[knob]] is not None
                made = choice if isinstance(choice, Choice) else None
                words = headline(knob, getattr(scenario, knob), made, sure=sure)
                st.markdown(f"**{_TITLES[knob]}: {plain(words)}**")
            if isinstance(choice, str):
                st.caption(plain(choice))
            elif choice is not None:
                st.caption(plain(worth(choice) + ("" if sure else _UNSURE[knob])))
                if choice.changes:
                    with right:
                        _apply_button(view, choice)
            else:
                _follow(own, knob)


def _follow(own: Session, knob: str) -> None:
    job = own.jobs.get(FIRST)
    if job is not None and job.error:
        st.caption(plain(job.error))
    elif job is not None and job.stopped:
        if knob == BLOCK_SIZE:
            again(FIRST, FIRST)
    else:
        share, label = progress_of(job.progress if job is not None else None, f"trying other {SLOTS[knob]}")
        st.progress(share, text=plain(label))


def _apply_button(view: PageView, choice: Choice) -> None:
    st.button("Apply", key=f"apply-{choice.knob}", on_click=apply, args=(view, choice), width="stretch")


def apply(view: PageView, choice: Choice) -> None:
    """Moves the side bar to the best value."""
    kind = int if choice.knob == BLOCK_SIZE else float
    show(PageView.of({**dict(view.changed), choice.knob: kind(choice.best.value)}))


def headline(knob: str, value: float | None, choice: Choice | None, *, sure: bool = True) -> str:
    """The value in force, and what to do with it. Not `sure`: by brief loads."""
    if choice is None:
        return shown(knob, value)
    if not choice.load:
        return f"{shown(knob, value)}; no value keeps the SLO"
    if not choice.changes:
        return f"{shown(knob, value)} {'is best' if sure else 'takes as much as any'}"
    best = shown(knob, choice.best.value)
    return f"{shown(knob, value)} now, {best} {'is best' if sure else 'seems better'}"
