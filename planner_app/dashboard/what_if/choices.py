"""The two questions that come first: which block size, and which HBM budget. A card each, with a button."""

from __future__ import annotations

from typing import Any

import streamlit as st
from pagecast.planner_app.dashboard.shell.elements import again, plain, progress_of
from pagecast.planner_app.dashboard.shell.state import Session, show
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.planner.tune.choice import BLOCK_SIZE, HBM, Choice, choose
from pagecast.planner_app.wording.quantities import counted, seconds
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

SLOTS = {BLOCK_SIZE: "block sizes", HBM: "HBM budgets"}
_TITLES = {BLOCK_SIZE: "Block size", HBM: "HBM budget"}


def key(view: PageView, knob: str) -> tuple[object, ...]:
    """The key of a choice among the results."""
    return ("choice", knob, view["slo"], *view.key())


def ask(own: Session, view: PageView, trace: Trace, knob: str) -> Choice | None:
    """The choice of a knob; None until the job in the slot of its name has it."""
    choice: Choice | None = own.ask(
        knob, key(view, knob), choice_job, trace, view.scenario(), knob, view["slo"]
    )
    return choice


def choice_job(trace: Trace, scenario: Scenario, knob: str, slo: str, *, progress: Any) -> Choice:
    """`choose` with progress."""
    return choose(trace, scenario, knob, slo, lambda done, total: progress((done, total, "replays")))


def show_choices(own: Session, view: PageView, choices: dict[str, Choice | None]) -> None:
    """Draws both cards."""
    scenario = view.scenario()
    for column, (knob, choice) in zip(st.columns(2), choices.items(), strict=True):
        with column, st.container(border=True, height="stretch"):
            left, right = st.columns([3, 1], vertical_alignment="center")
            with left:
                st.markdown(f"**{_TITLES[knob]}: {plain(headline(knob, getattr(scenario, knob), choice))}**")
            if choice is not None:
                st.caption(plain(worth(choice)))
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


def headline(knob: str, value: float | None, choice: Choice | None) -> str:
    """The value in force, and what to do with it."""
    if choice is None:
        return shown(knob, value)
    if not choice.load:
        return f"{shown(knob, value)}; no value keeps the SLO"
    if not choice.changes:
        return f"{shown(knob, value)} is best"
    return f"{shown(knob, value)} now, {shown(knob, choice.best.value)} is best"


def shown(knob: str, value: float | None) -> str:
    """A value as people write it."""
    if value is None:
        return "not set"
    return f"{value:.0f}" if knob == BLOCK_SIZE else f"{value:.2f}"


def worth(choice: Choice) -> str:
    """What the difference between now and best is worth."""
    now, best = choice.now, choice.best
    others = f"of {', '.join(shown(choice.knob, value) for value in choice.tried)}"
    if not choice.load:
        return "One user alone breaks the SLO: take a faster GPU or loosen it."
    admits = f"{counted(now.users, 'user')} at once keep the SLO now"
    if not choice.changes:
        return f"{admits}, and no value {others} admits more, is faster or leaves more memory."
    if best.users > now.users:
        more = (best.users - now.users) / max(now.users, 1)
        return f"{admits}, {best.users:,} with {shown(choice.knob, best.value)}: {more:+.0%}."
    if choice.knob == HBM and best.value < now.value:
        return (
            f"{admits}, as many as with {shown(HBM, best.value)}, which leaves "
            f"{now.kv_gib - best.kv_gib:.0f} GiB per replica to others; less is worse."
        )
    if now.ttft_s and best.ttft_s:
        times = f"{seconds(best.ttft_s)} instead of {seconds(now.ttft_s)}"
        return f"{admits}, as many as at best; mean TTFT would be {times}."
    return f"{admits}."
