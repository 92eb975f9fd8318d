"""The two questions that come first: which block size, and which HBM budget. A card each, with a button."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import streamlit as st
from pagecast.planner_app.dashboard.shell.elements import again, plain, progress_of
from pagecast.planner_app.dashboard.shell.state import Session, show
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.dashboard.what_if.choice_job import choice_job
from pagecast.planner_app.planner.tune.choice import BLOCK_SIZE, HBM, Choice
from pagecast.planner_app.planner.tune.worth import shown, worth
from pagecast.traces.schema import Trace

SLOTS = {BLOCK_SIZE: "block sizes", HBM: "HBM budgets"}
CHECKS = {knob: f"{words} by long loads" for knob, words in SLOTS.items()}
_UNSURE = {
    BLOCK_SIZE: " Longer loads are being tried.",
    HBM: " Longer loads, and smaller budgets, are being tried.",
}
_TITLES = {BLOCK_SIZE: "Block size", HBM: "HBM budget"}


def key(view: PageView, knob: str, lasting: bool = False) -> tuple[object, ...]:
    """The key of a choice among the results."""
    return ("choice", knob, lasting, view["slo"], *view.key())


def ask(own: Session, view: PageView, trace: Trace, knob: str, lasting: bool = False) -> Choice | None:
    """The choice of a knob, by long loads or not; None until the job in its slot has it."""
    choice: Choice | None = own.ask(
        slot(knob, lasting),
        key(view, knob, lasting),
        choice_job,
        trace,
        view.scenario(),
        knob,
        view["slo"],
        lasting,
    )
    return choice


def ask_all(own: Session, view: PageView, trace: Trace) -> dict[str, object]:
    """Both choices by slot: first by short loads, and once both of these are in by long ones."""
    answers: dict[str, object] = {knob: ask(own, view, trace, knob) for knob in SLOTS}
    ready = all(answers.values())
    for knob, check in CHECKS.items():
        answers[check] = ask(own, view, trace, knob, lasting=True) if ready else None
    return answers


def slot(knob: str, lasting: bool) -> str:
    """The slot of a choice's job."""
    return CHECKS[knob] if lasting else knob


def show_choices(own: Session, view: PageView, answers: Mapping[str, object]) -> None:
    """Draws both cards from the answers by slot: those by long loads, or until they are in the first ones."""
    choices = {knob: cast(Choice | None, answers[CHECKS[knob]] or answers[knob]) for knob in SLOTS}
    scenario = view.scenario()
    for column, (knob, choice) in zip(st.columns(2), choices.items(), strict=True):
        with column, st.container(border=True, height="stretch"):
            left, right = st.columns([3, 1], vertical_alignment="center")
            with left:
                sure = answers[CHECKS[knob]] is not None
                words = headline(knob, getattr(scenario, knob), choice, sure=sure)
                st.markdown(f"**{_TITLES[knob]}: {plain(words)}**")
            if choice is not None:
                st.caption(plain(worth(choice) + ("" if sure else _UNSURE[knob])))
                if choice.changes:
                    with right:
                        _apply_button(view, choice)
            else:
                _follow(own, knob)


def _follow(own: Session, knob: str) -> None:
    job = own.jobs.get(knob)
    if job is not None and job.error:
        st.caption(plain(job.error))
    elif job is not None and job.stopped:
        again(knob, SLOTS[knob])
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
