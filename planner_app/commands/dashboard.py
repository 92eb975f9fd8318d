"""`pagecast dashboard`: the what-if in a browser."""

from __future__ import annotations

from typing import Annotated

import typer
from pagecast.planner_app.dashboard.server_start import serve

Opt = typer.Option


def dashboard_command(
    port: Annotated[
        int | None, Opt(min=1, max=65535, help="port to listen on [8501, or the next free one]")
    ] = None,
    host: Annotated[
        str, Opt(help="address to listen on; others than this machine's own let others in")
    ] = "127.0.0.1",
    no_browser: Annotated[bool, Opt("--no-browser", help="do not open a browser")] = False,
) -> None:
    """Opens the dashboard: what-if, comparison, tuning, the blocks of a replay, and how far to trust it."""
    serve(host, port, browser=not no_browser)
