"""Views in the browser's history: Back goes to the last one that rested, not to another page.

Streamlit writes a widget's value over the address that was shown before, and reads the address again when
the browser goes back. This gives each address at which the page rested an entry of its own.
"""

from __future__ import annotations

from pathlib import Path

import streamlit as st

_JS = Path(__file__).with_name("history.js").read_text(encoding="utf-8")


def note(address: str) -> None:
    """Notes that the page shows what an address says; one that rests becomes an entry."""
    component = st.components.v2.component("pagecast_history", html="<span></span>", js=_JS)
    with st.container(key="history"):
        component(key="pagecast-history", data=address)
