"""A real dashboard and a real Chromium for the tests that need them; skipped where either is missing."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

_CHROMIUM = "/usr/bin/chromium"
_QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--no-first-run",
)
_START_S = 60


@pytest.fixture(scope="session")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `pagecast dashboard`, started on a free port and ended for sure."""
    pytest.importorskip("streamlit", reason="the dashboard needs the extra `app`")
    folder = tmp_path_factory.mktemp("dashboard")
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pagecast", "dashboard", "--no-browser", "--port", str(port)]
    with (folder / "log.txt").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, start_new_session=True, preexec_fn=_die_with_parent
        )
        try:
            _wait(f"http://127.0.0.1:{port}/_stcore/health", server, folder / "log.txt")
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _use_all_cores() -> set[int]:
    """Lets this process, and those it starts from now on, use every core. Returns those it was bound to."""
    cores = os.environ.get("PAGECAST_TEST_CORES")
    if not cores:
        return set()
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(map(int, cores.split())))
    return bound


def _die_with_parent() -> None:
    _use_all_cores()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: Linux only


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and server.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    pytest.fail(f"the dashboard did not start:\n{log.read_text(errors='replace')}")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A Chromium without a window."""
    api = pytest.importorskip("playwright.sync_api", reason="browser tests need playwright")
    if not os.access(_CHROMIUM, os.X_OK):
        pytest.skip(f"browser tests need {_CHROMIUM} (Debian's package chromium)")
    bound = _use_all_cores()
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=list(_QUIET))
        if bound:
            os.sched_setaffinity(0, bound)
        yield browser
        browser.close()


@pytest.fixture
def visit(dashboard: str, chromium: Any) -> Iterator[Callable[..., Any]]:
    """`visit("/?block_size=32", width=1280)`: a page of the dashboard in a session of its own.

    At the end: no session asked any other host for anything.
    """
    contexts, asked = [], set()

    def open_page(path: str = "/", *, width: int = 1280, scheme: str = "light") -> Any:
        context = chromium.new_context(
            viewport={"width": width, "height": 1000}, color_scheme=scheme, accept_downloads=True
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.add(urlsplit(request.url)))
        page.goto(dashboard + path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    here = urlsplit(dashboard).netloc
    elsewhere = {
        part.geturl()
        for part in asked
        if part.scheme in ("http", "https", "ws", "wss") and part.netloc != here
    }
    assert not elsewhere, f"the dashboard asked the network for {sorted(elsewhere)}"


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: `$PAGECAST_SCREENSHOTS`, or a folder of this run."""
    named = os.environ.get("PAGECAST_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
