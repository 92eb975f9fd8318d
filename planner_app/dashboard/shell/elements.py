"""Elements that pages share: a user's text as it was written, charts, and a job's progress."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

import streamlit as st
from pagecast.planner_app.dashboard.shell.state import session

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+\-.!|~$:&^=@])")
# Its tool bar would lie on the legends of a phone, and before everything else for a keyboard.
_CHART = {"displayModeBar": False}
_AXIS_TITLE = 32  # letters on a line, as many as a phone has room for
_TICK_S = 0.4


def plain(text: object) -> str:
    """`text` for Streamlit's Markdown, shown letter by letter: no links, pictures, colours or HTML."""
    one_line = " ".join(str(text).split())
    return _MARKUP.sub(r"\\\1", "".join(char for char in one_line if char.isprintable()))


def cost_words(name: str) -> str:
    """Step costs by their name; those that are put together of operations were not measured as a whole."""
    return "costs composed of measured operations" if name == "measured" else f"costs {name}"


def show_chart(figure: go.Figure, key: str) -> None:
    """A chart in a frame of its own."""
    from pagecast.planner_app.reports.style import caption_of, title_of

    with st.container(border=True, height="stretch"):
        st.markdown(f"**{plain(title_of(figure))}**")
        title = figure.layout.xaxis.title.text or ""
        figure.update_xaxes(title_text="<br>".join(wrap(title, _AXIS_TITLE)))
        st.plotly_chart(figure, key=key, config=_CHART, alt=f"{title_of(figure)}. {caption_of(figure)}")
        st.caption(plain(caption_of(figure)))


def show_charts(figures: Sequence[go.Figure], key: str) -> None:
    """Charts in two columns, row by row."""
    from pagecast.planner_app.reports.style import title_of

    for first in range(0, len(figures), 2):
        for column, figure in zip(st.columns(2), figures[first : first + 2], strict=False):
            with column:
                show_chart(figure, f"{key}-{first}-{title_of(figure)}")


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
    share, label = progress_of(job.progress, words)
    left.progress(share, text=plain(label))
    right.button("Stop", key=f"stop-{slot}", on_click=job.stop, width="stretch")


def again(slot: str, words: str) -> None:
    """Says that a job was stopped, and offers to begin it again."""
    left, right = st.columns([4, 1], vertical_alignment="center")
    left.caption(f"Stopped: {plain(words)}.")
    if right.button("Go on", key=f"again-{slot}", width="stretch"):
        session().jobs.pop(slot, None)
        st.rerun()


def progress_of(progress: object, words: str) -> tuple[float, str]:
    """A share from 0 to 1 and a sentence, from a job's progress: `(done, total, unit)` or a number."""
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
