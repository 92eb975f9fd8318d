"""The app: its pages, the side bar they share, and one line for every error that a user can mend."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import streamlit as st
from pagecast.planner_app.dashboard.shell import history, sidebar
from pagecast.planner_app.dashboard.shell.elements import plain
from pagecast.planner_app.dashboard.shell.problems import show_problem, told
from pagecast.planner_app.dashboard.shell.starting import start_problem
from pagecast.planner_app.dashboard.shell.state import session, write_url
from pagecast.planner_app.stderr import cut

_PACKAGE = "pagecast.planner_app.dashboard"
# Folder, title, path. A page whose module is missing is left out. No icons: the browser would fetch the
# current page's from Google.
_PAGES = (
    ("what_if", "What-if", "what-if"),
    ("load", "Load", "load"),
    ("fleet", "Fleet", "fleet"),
    ("tune", "Tune", "tune"),
    ("blocks", "Blocks", "blocks"),
    ("trust", "Trust", "trust"),
    ("compare", "Compare", "compare"),
)
_STYLE = Path(__file__).with_name("app.css").read_text(encoding="utf-8")


def main() -> None:
    """Draws the page that the URL asks for."""
    st.set_page_config("pagecast", layout="wide", initial_sidebar_state="auto")
    st.html(f"<style>{_STYLE}</style>")
    pages = [
        st.Page(_render(folder), title=title, url_path=path, default=folder == "what_if")
        for folder, title, path in _PAGES
        if find_spec(f"{_PACKAGE}.{folder}.page")
    ]
    page = st.navigation(pages, position="top")
    with told():
        sidebar.ask()
        own = session()
        write_url(own)
        own.linked_view = own.linked_view or own.view
        if own.problem and own.view == own.linked_view:  # until something is changed
            st.warning(f"The link can't be used as it is: {plain(cut(own.problem))}")
        if problem := start_problem(own.view):
            show_problem(problem)
        history.note(own.view.query())
        page.run()


def _render(folder: str) -> Callable[[], None]:
    def page() -> None:
        import_module(f"{_PACKAGE}.{folder}.page").render()

    page.__name__ = folder
    return page
