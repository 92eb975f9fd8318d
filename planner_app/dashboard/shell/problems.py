"""Problems as a user sees them: one line on the page, wherever they come up.

A fragment is drawn apart from the rest of its page, so what goes wrong in it has to be caught there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec

import streamlit as st
from pagecast.planner_app.dashboard.shell.elements import plain
from pagecast.planner_app.defects import defect_line
from pagecast.planner_app.stderr import cut
from pagecast.sim.core.errors import BadInput, PagecastError

Given = ParamSpec("Given")
_DEFECTS = "_pagecast_defects"


class NothingToShow(BadInput):
    """A page that waits for its user: an invitation, not an error."""


@contextmanager
def told() -> Iterator[None]:
    """Shows what goes wrong as one line. An unforeseen error names the file of its report."""
    try:
        yield
    except NothingToShow as invitation:
        st.info(plain(invitation))
    except PagecastError as error:
        show_problem(str(error))
    except MemoryError:
        show_problem("needs more memory than there is; use a smaller trace, or fewer requests")
    except Exception as error:
        # A page is drawn again and again: each error gets one report.
        reported: dict[str, str] = st.session_state.setdefault(_DEFECTS, {})
        kind = repr(error)
        if kind not in reported:
            reported[kind] = defect_line(error)
        show_problem(reported[kind])


def show_problem(text: str) -> None:
    """One line, in red."""
    st.error(plain(cut(text)), icon=":material/error:")


def fragment(draw: Callable[Given, None], run_every: float | None = None) -> Callable[Given, None]:
    """A part of a page that is drawn anew without the rest, and tells its own problems."""

    @wraps(draw)
    def guarded(*arguments: Given.args, **options: Given.kwargs) -> None:
        with told():
            draw(*arguments, **options)

    made: Callable[Given, None] = st.fragment(guarded, run_every=run_every)
    return made
