"""Pinned views: named, kept in the URL, one of them the baseline that others are measured against."""

from __future__ import annotations

import streamlit as st
from pagecast.planner_app.dashboard.shell.state import MOST_PINS, Session, session
from pagecast.planner_app.dashboard.shell.view import LOAD, PageView

_MOST_LETTERS = 40


def pin_button(own: Session, view: PageView) -> None:
    """A button that asks for a name and pins the view shown."""
    with st.popover(
        "Pin", icon=":material/push_pin:", width="stretch", help="keep this scenario to compare others with"
    ):
        full = len(own.pins) >= MOST_PINS
        name = st.text_input("Name", value=suggested(own, view), max_chars=_MOST_LETTERS, key="pin-name")
        st.button(
            "Pin this scenario", key="pin-it", on_click=pin, args=(view,), disabled=full or not name.strip()
        )
        if full:
            st.caption(f"There are {MOST_PINS} pins; take one away on the Compare page.")
        if own.baseline:
            st.caption("Changes are shown against the baseline chosen on the Compare page.")


def suggested(own: Session, view: PageView) -> str:
    """A name that says what sets the view apart from the baseline, or from the defaults."""
    base = own.pins.get(own.baseline, PageView())
    parts = [f"{name} {value}" for name, _, value in view.differences(base) if name not in LOAD]
    return free_name(own, (", ".join(parts) or "baseline").replace("_", " ")[:_MOST_LETTERS])


def free_name(own: Session, preferred_name: str) -> str:
    """The name, with a number where it is taken."""
    name, number = preferred_name, 2
    while name in own.pins:
        name = f"{preferred_name[: _MOST_LETTERS - 4]} {number}"
        number += 1
    return name


def pin(view: PageView) -> None:
    """Pins a view under the name typed; the first pin is the baseline."""
    own = session()
    name = str(st.session_state.get("pin-name", "")).strip()[:_MOST_LETTERS]
    if name and len(own.pins) < MOST_PINS:
        name = free_name(own, name)
        own.pins[name] = view
        own.baseline = own.baseline or name
    st.session_state.pop("pin-name", None)


def unpin(name: str) -> None:
    """Takes a pin away; the oldest that is left becomes the baseline where it was that."""
    own = session()
    own.pins.pop(name, None)
    if own.baseline == name:
        own.baseline = next(iter(own.pins), "")
