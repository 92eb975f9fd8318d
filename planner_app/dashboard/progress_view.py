"""How a page waits for a job: a bar, how far it is, and a button that stops it."""

from __future__ import annotations

import streamlit as st
from pagecast.planner_app.dashboard.state import session
from pagecast.planner_app.dashboard.texts import plain

_TICK_S = 0.4


def show_progress(slot: str, words: str) -> None:
    """Follows the job in a slot until it has ended, and draws the page anew then."""
    job = session().jobs.get(slot)
    watch = st.fragment(_watch, run_every=_TICK_S if job is not None and job.running else None)
    watch(slot, words)


def _watch(slot: str, words: str) -> None:
    job = session().jobs.get(slot)
    if job is None:
        st.rerun()
    elif job.running and not job.stopped:
        bar(slot, words)
    elif job.stopped:
        again(slot, words)
    else:  # its value, or its error, is the page's to show
        st.rerun()


def bar(slot: str, words: str) -> None:
    """One line: what is done, how far it is, and a button that ends it."""
    job = session().jobs[slot]
    left, right = st.columns([4, 1], vertical_alignment="center")
    share, said = told(job.progress, words)
    left.progress(share, text=plain(said))
    right.button("Stop", key=f"stop-{slot}", on_click=job.stop, width="stretch")


def again(slot: str, words: str) -> None:
    """Says that a job was stopped, and offers to begin it again."""
    left, right = st.columns([4, 1], vertical_alignment="center")
    left.caption(f"Stopped: {plain(words)}.")
    if right.button("Go on", key=f"again-{slot}", width="stretch"):
        session().jobs.pop(slot, None)
        st.rerun()


def told(progress: object, words: str) -> tuple[float, str]:
    """A share from 0 to 1 and a sentence, from what a job told: `(done, total, unit)` or a number."""
    if isinstance(progress, tuple) and len(progress) == 3:
        done, total, unit = progress
        return min(max(done / max(total, 1), 0.0), 1.0), f"{words}: {done:,} of {total:,} {unit}"
    return 0.0, f"{words}: waiting to begin"


def failed(slot: str) -> bool:
    """Whether the job in a slot failed; says its one line then."""
    job = session().jobs.get(slot)
    if job is None or job.running or not job.error:
        return False
    st.error(plain(job.error), icon=":material/error:")
    return True
