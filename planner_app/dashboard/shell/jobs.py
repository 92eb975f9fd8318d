"""Long work beside a session: it shows progress, can be stopped, and never holds the pages up.

A job is a process of its own (`worker.py`). A job that nobody holds any more is stopped, so a session that
ends takes its jobs along. A server keeps some processes ready, for their imports take a second. Results are
kept by the content of what was asked, never by who asked.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_AT_ONCE = threading.BoundedSemaphore(max(2, os.cpu_count() or 2))  # processes of all sessions together
_FIRST_AT_ONCE = threading.BoundedSemaphore(2)  # the same for jobs without which a page has nothing to show
_KEPT = 256


@dataclass
class _State:
    """State of a job, written by the thread that listens to its process and read by the page."""

    progress: Any = None
    value: Any = None
    error: str = ""
    ended: bool = False
    stopped: bool = False
    process: subprocess.Popen[bytes] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Job:
    """`function(*arguments, progress=...)` in a process. Both must be picklable, and what it tells.

    `first`: the page has nothing to show before, so it does not wait for searches to end.
    """

    def __init__(
        self,
        key: Hashable,
        function: Callable[..., Any],
        *arguments: Any,
        store: Results | None = None,
        first: bool = False,
    ) -> None:
        self.key = key
        self._state = state = _State()
        weakref.finalize(self, _stop, state)
        payload = pickle.dumps((function, arguments))
        places = _FIRST_AT_ONCE if first else _AT_ONCE
        follow = (state, key, payload, store or results, places)
        threading.Thread(target=_follow, args=follow, daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether it may still give a value."""
        return not self._state.ended

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._state.stopped

    @property
    def progress(self) -> Any:
        """The latest progress that the function reported; None before."""
        return self._state.progress

    @property
    def error(self) -> str:
        """One sentence, where it failed."""
        return self._state.error

    @property
    def value(self) -> Any:
        """The function's result; None before its end."""
        return self._state.value

    def stop(self) -> None:
        """Ends the process; a stopped job has no value."""
        _stop(self._state)


_begun: dict[Hashable, Job] = {}


def begin(key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
    """Begins a job that the first session is expected to ask for."""
    _begun[key] = Job(key, function, *arguments)


def take_begun(key: Hashable) -> Job | None:
    """The job begun with a key, which is the caller's from now on; None where there is none."""
    return _begun.pop(key, None)


def _stop(state: _State) -> None:
    with state.lock:
        if not state.ended:
            state.stopped = True
            if state.process is not None:
                _kill(state.process)


def _follow(
    state: _State, key: Hashable, payload: bytes, store: Results, places: threading.BoundedSemaphore
) -> None:
    with places:
        process = _start(state)
        if process is not None:
            try:
                _listen(process, state, payload)
            except Exception as error:
                state.error = state.error or f"the work could not go on ({error!r})"
            finally:
                with state.lock:
                    _kill(process)
                    process.wait()
                    state.process = None  # its number may be another's from now on
    if state.value is not None and not state.stopped:
        store.put(key, state.value)
    state.ended = True
    if _AT_ONCE.acquire(blocking=False):  # no job waits for a core
        _AT_ONCE.release()
        _ready.fill()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it started."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _start(state: _State) -> subprocess.Popen[bytes] | None:
    with state.lock:
        if not state.stopped:
            state.process = _ready.take()
        return state.process


class _Ready:
    """Processes that wait for work. They end with this one, which closes their stdin."""

    def __init__(self) -> None:
        self._most = 0
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def keep(self, most: int) -> None:
        """Starts one, and keeps so many once that has done its work: the first page wants all cores."""
        self._most = min(most, 1)
        self.fill()
        self._most = most

    def fill(self) -> None:
        """Starts those that are missing."""
        with self._lock:
            self._waiting = [process for process in self._waiting if process.poll() is None]
            while len(self._waiting) < self._most:
                self._waiting.append(_started())

    def take(self) -> subprocess.Popen[bytes]:
        """One that waits, or else a new one."""
        with self._lock:
            while self._waiting:
                process = self._waiting.pop(0)
                if process.poll() is None:
                    return process
        return _started()


def _started() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pagecast.planner_app.dashboard.shell.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


_ready = _Ready()


def keep_ready(most: int = 2) -> None:
    """Keeps so many processes ready for the jobs to come."""
    _ready.keep(most)


def _listen(process: subprocess.Popen[bytes], state: _State, payload: bytes) -> None:
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            process.stdin.write(payload)
            process.stdin.close()
            while True:
                kind, value = pickle.load(process.stdout)
                if kind == "progress":
                    state.progress = value
                else:
                    state.value, state.error = (value, "") if kind == "done" else (None, value)
                    return
        except (EOFError, BrokenPipeError):
            if not state.stopped:
                state.error = "the work ended before it was done; the server's terminal says why"


class Results:
    """The values of the latest jobs, by what was asked. Safe among threads; the oldest go first."""

    def __init__(self, most: int = _KEPT) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """The value, or None."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def make(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """The value, made here where it is not kept yet; who asks meanwhile waits for this one."""
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        try:
            with making:
                value = self.get(key)
                if value is None:
                    value = function()
                    self.put(key, value)
        finally:
            with self._lock:
                self._making.pop(key, None)
        return value

    def put(self, key: Hashable, value: Any) -> None:
        """Keeps a value, which nobody may change from now on."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)


results = Results()
