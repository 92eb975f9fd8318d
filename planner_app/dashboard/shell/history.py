"""Views in the browser's history: Back goes to the last one that rested, not to another page.

Streamlit writes a widget's value over the address that was shown before, and reads the address again when
the browser goes back. This gives each address at which the page rested an entry of its own.
"""

from __future__ import annotations

import streamlit as st

_REST_MS = 600  # a slider in motion makes no entries
_JS = """
const place = window.pagecastHistory ??= { href: null, timer: 0 };
if (!place.listens) {
  place.listens = true;
  window.addEventListener("popstate", () => { place.href = location.href; }, true);
}

export default function () {
  clearTimeout(place.timer);
  place.timer = setTimeout(() => {
    const now = location.href, last = place.href;
    place.href = now;
    if (last === null || last === now || new URL(last).pathname !== location.pathname) return;
    history.replaceState({}, "", last);
    history.pushState({}, "", now);
  }, REST_MS);
}
""".replace("REST_MS", str(_REST_MS))


def note(address: str) -> None:
    """Notes that the page shows what an address says; one that rests becomes an entry."""
    component = st.components.v2.component("pagecast_history", html="<span></span>", js=_JS)
    with st.container(key="history"):
        component(key="pagecast-history", data=address)
