"""Addresses that the dashboard can't listen on end it in one line, at once."""

from __future__ import annotations

import socket
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard needs the extra `app`")

from pagecast.planner_app.cli import run
from pagecast.planner_app.dashboard import server_start
from streamlit.web import bootstrap


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["dashboard", "--no-browser", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


@pytest.mark.timeout(30)
@pytest.mark.parametrize("host", ["../../etc/passwd", "a..b", "x" * 200, "", "192.0.2.1", "\u2603" * 80])
def test_what_is_no_host_of_this_machine_is_refused(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "can't listen on" in refused(capsys, "--host", host)


@pytest.mark.timeout(30)
def test_a_port_that_is_taken_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"can't listen on port {port}" in refused(capsys, "--port", str(port))


@pytest.mark.timeout(30)
def test_a_port_that_is_taken_meanwhile_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def taken(*_: Any) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(bootstrap, "run", taken)
    monkeypatch.setattr(server_start, "_warm", lambda: None)
    assert "can't listen on port" in refused(capsys)
