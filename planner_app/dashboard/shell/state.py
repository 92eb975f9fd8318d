"""State of one session: its view, pins, uploads and jobs. Sessions share none of it.

The view and the pins also stand in the URL, so that a link shows what its sender saw.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import streamlit as st
import xxhash
from pagecast.planner_app.dashboard.shell.jobs import Job, Results, results, take_begun
from pagecast.planner_app.dashboard.shell.view import DEFAULTS, PageView
from pagecast.sim.core.errors import BadInput
from streamlit import runtime
from streamlit.runtime.scriptrunner import get_script_run_ctx

MOST_PINS = 6
_MOST_UPLOADS = 3
_SESSION = "_pagecast"
_LOOK_S = 4.0  # between two looks for browsers that have gone


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that this session sent: its own name, and where its bytes lie."""

    name: str
    path: Path


@dataclass
class Session:
    """One browser session. `pins` are views by their names; `baseline` is one of these names, or none."""

    view: PageView = field(default_factory=PageView)
    pins: dict[str, PageView] = field(default_factory=dict)
    baseline: str = ""
    uploads: dict[str, Upload] = field(default_factory=dict)
    sent: dict[str, str] = field(default_factory=dict)  # digests by the browser's numbers of files
    jobs: dict[str, Job] = field(default_factory=dict)
    problem: str = ""  # of the link that the session began with
    linked: dict[str, str] = field(default_factory=dict)  # its parameters, until they have been looked at
    linked_view: PageView | None = None  # the first that was shown
    charts_due_s: float | None = None  # until when the first charts may wait; 0 once they do not, None before
    settled: Hashable = None  # what was last drawn in full: jobs begin only once the sliders rest
    folder: Any = field(default_factory=lambda: tempfile.TemporaryDirectory(prefix="pagecast-"))

    def keep_upload(self, name: str, data: bytes) -> str:
        """Lays a file where only this session looks for it, and gives the digest of its name and content."""
        # Of the name too: what is kept for a trace tells its name, which is not every session's.
        digest = xxhash.xxh3_128_hexdigest(name.encode("utf-8", "replace") + b"\0" + data)
        if digest not in self.uploads:
            path = Path(self.folder.name) / digest
            path.write_bytes(data)
            self.uploads[digest] = Upload(Path(name).name or "upload", path)
            while len(self.uploads) > _MOST_UPLOADS:
                oldest = next(iter(self.uploads))
                self.uploads.pop(oldest).path.unlink(missing_ok=True)
        return digest

    def ask(
        self,
        slot: str,
        key: Hashable,
        function: Callable[..., Any],
        *arguments: Any,
        store: Results = results,
        first: bool = False,
    ) -> Any:
        """The result of a job if it is in, else None; starts the job, in place of the slot's last one.

        `self.jobs[slot]` tells progress and errors meanwhile. A stopped or failed job is not begun again.
        `store`: where results lie; large ones have a place of their own, for fewer. `first`: see `Job`.
        """
        value = store.get(key)
        job = self.jobs.get(slot)
        if value is not None:
            if job is not None and job.key != key:
                self.jobs.pop(slot).stop()
            return value
        if job is None or job.key != key:
            if job is not None:
                job.stop()
            self.jobs[slot] = take_begun(key) or Job(key, function, *arguments, store=store, first=first)
        return None

    def stop_jobs(self) -> None:
        """Stops all jobs. A page that is drawn later begins those that it wants."""
        while self.jobs:
            self.jobs.popitem()[1].stop()


_sessions: WeakValueDictionary[str, Session] = WeakValueDictionary()  # by Streamlit's session ids


def session() -> Session:
    """This session's state; a new session takes view and pins from its URL."""
    own: Session | None = st.session_state.get(_SESSION)
    if own is None:
        own = st.session_state[_SESSION] = Session(linked=st.query_params.to_dict())
        _read_url(own)
        context = get_script_run_ctx()
        if context is not None:
            _sessions[context.session_id] = own
    return own


def watch_browsers() -> None:
    """Stops the jobs of sessions whose browser has gone; does not return.

    Streamlit keeps such sessions for two minutes.
    """
    while True:
        time.sleep(_LOOK_S)
        if runtime.exists():
            stop_left(runtime.get_instance().is_active_session)


def stop_left(here: Callable[[str], bool]) -> None:
    """Stops the jobs of all sessions that have no browser; `here` says whether the one of an id has."""
    for session_id, own in list(_sessions.items()):
        if not here(session_id):
            own.stop_jobs()


def _read_url(own: Session) -> None:
    try:
        for text in st.query_params.get_all("pin")[:MOST_PINS]:
            name, _, query = text.partition("?")
            own.pins[name[:40] or f"pin {len(own.pins) + 1}"] = PageView.from_query(query)
    except BadInput as error:
        own.problem = str(error)
    baseline = st.query_params.get("baseline", "")
    own.baseline = baseline if baseline in own.pins else next(iter(own.pins), "")


def write_url(own: Session) -> None:
    """Puts what no widget holds into the URL."""
    _put("pin", [f"{name}?{view.query()}" for name, view in own.pins.items()])
    _put("baseline", [own.baseline] if own.pins and own.baseline != next(iter(own.pins)) else [])
    _put("upload", [own.view["upload"]] if own.view["upload"] else [])


def _put(name: str, values: list[str]) -> None:
    if st.query_params.get_all(name) != values:
        if values:
            st.query_params[name] = values
        elif name in st.query_params:
            del st.query_params[name]


def show(view: PageView) -> None:
    """Moves the side bar's widgets to a view; only before they are drawn (in a callback)."""
    for name in DEFAULTS:
        if name != "upload":
            st.session_state[name] = view[name]
    own = session()
    own.view = view
