"""Start of the dashboard's server: on this machine only unless told otherwise, asking no network.

Streamlit also runs this file as its script, once per session and again after every change: then it draws the
app. Importing it does nothing, so that spawned processes start fast.
"""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import suppress
from importlib import import_module
from ipaddress import ip_address
from typing import Any

from pagecast.planner_app import console
from pagecast.sim.core.errors import BadInput, CannotRunHere, PagecastError

PORT = 8501
UPLOAD_MB = 200
_TRIED = 20
_SWITCH_S = 0.001  # a replay in one session lets the pages of the others through
# What the first page needs beside Streamlit, imported while the server and the browser start.
_FIRST_PAGE = (
    "pagecast.planner_app.dashboard.app",
    "pagecast.planner_app.dashboard.what_if.page",
    "pyarrow",
)


def serve(host: str, port: int | None, *, browser: bool) -> None:
    """Serves until interrupted. Errors: BadInput for an address that can't be used, CannotRunHere without
    the extra `app`."""
    port = _free_port(host, port)
    try:
        import plotly  # noqa: F401
        from streamlit.web import bootstrap
    except ImportError:
        raise CannotRunHere("the dashboard needs streamlit: pip install 'pagecast[app]'") from None
    if not _loopback(host):
        console.err.print(f"listening on {host}: whoever reaches it can use the dashboard", soft_wrap=True)
    sys.setswitchinterval(_SWITCH_S)
    threading.Thread(target=_background, daemon=True).start()
    flags = options(host, port, browser=browser)
    bootstrap.load_config_options(flags)
    try:
        bootstrap.run(__file__, False, [], flags)
    except SystemExit as end:
        if end.code:  # another process took the port since
            raise BadInput(f"can't listen on port {port} of {host}; give another --port or --host") from None


def options(host: str, port: int, *, browser: bool) -> dict[str, Any]:
    """Streamlit's options: no statistics, no watching of files, no other host name than the one asked for."""
    return {
        "server_address": host,
        "server_port": port,
        "server_headless": not browser,
        "server_showEmailPrompt": False,
        "server_maxUploadSize": UPLOAD_MB,
        "server_fileWatcherType": "none",
        "server_runOnSave": False,
        "server_enableCORS": True,
        "server_enableXsrfProtection": True,
        # A page elsewhere whose name was made to point here must not talk to it (DNS rebinding).
        "server_allowedHosts": ["localhost", "127.0.0.1", "[::1]", host] if _loopback(host) else [],
        "browser_serverAddress": host if _loopback(host) else "localhost",
        "browser_gatherUsageStats": False,
        "client_toolbarMode": "viewer",
        "client_showErrorLinks": "false",
        "client_disableDataExport": True,
        "global_developmentMode": False,
        # A widget has its default and, from a pin that is shown, a value: the value counts.
        "global_disableWidgetStateDuplicationWarning": True,
        "logger_level": "error",
    }


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _free_port(host: str, port: int | None) -> int:
    """The port asked for, or the first free one from 8501 on."""
    for candidate in [port] if port is not None else range(PORT, PORT + _TRIED):
        try:
            _bind(host, candidate)
        except (OSError, UnicodeError) as error:  # UnicodeError: what can't be a host's name
            reason = getattr(error, "strerror", None) or "no host has such a name"
        else:
            return candidate
    where = f"port {port}" if port is not None else f"a port from {PORT} to {PORT + _TRIED - 1}"
    raise BadInput(f"can't listen on {where} of {host}: {reason}; give another --port or --host")


def _bind(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _background() -> None:
    """Work beside the pages: prepares the first one, then stops the jobs of browsers that have gone."""
    _warm()
    from pagecast.planner_app.dashboard.shell.state import watch_browsers

    watch_browsers()


def _warm() -> None:
    """Imports the first page, replays what it shows and begins what it asks, while a browser is loading."""
    from pagecast.planner_app.dashboard.shell.jobs import keep_ready

    keep_ready()
    with suppress(ImportError, PagecastError):
        for name in _FIRST_PAGE:
            import_module(name)
        from pagecast.planner_app.dashboard.shell.replays import at_once
        from pagecast.planner_app.dashboard.shell.view import PageView
        from pagecast.planner_app.dashboard.shell.workload import trace_of
        from pagecast.planner_app.dashboard.what_if.admissible import envelope_of
        from pagecast.planner_app.dashboard.what_if.choices import begin_first

        view = PageView()
        trace = trace_of(view)
        begin_first(view, trace)
        at_once(view, trace)
        envelope_of(view, trace)


if __name__ == "__main__":
    from pagecast.planner_app.dashboard.app import main

    main()
