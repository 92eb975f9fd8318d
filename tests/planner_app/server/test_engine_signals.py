"""Signals to a server in front of an engine, which are two processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from .conftest import finishes_its_stream_at_sigterm

pytest.importorskip("torch")
SERVE = [sys.executable, "-m", "pagecast", "serve", "--port", "0"]
ENGINE = ["--random-weights", "--device", "cpu", "--num-gpu-blocks", "1300", "--max-num-seqs", "8"]


@contextmanager
def serving(arguments: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process group of its own, and its address."""
    process = subprocess.Popen(
        [*SERVE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


def as_timeout_sends_it(process: int, number: int) -> None:
    """`timeout` sends a signal to the process, and then to the whole group."""
    os.kill(process, number)
    time.sleep(0.1)
    os.killpg(process, number)


@pytest.mark.parametrize("send", [os.killpg, as_timeout_sends_it])
def test_a_signal_to_the_group_drains_an_engine(send: Callable[[int, int], None], tiny_model: Path) -> None:
    with serving(["--model", str(tiny_model), *ENGINE]) as (process, url):
        finishes_its_stream_at_sigterm(process, url, send)


def test_a_signal_to_the_group_drains_a_simulated_replica() -> None:
    with serving(["--simulate"]) as (process, url):
        finishes_its_stream_at_sigterm(process, url, as_timeout_sends_it)


def test_a_second_signal_later_on_ends_a_server_and_says_so(tiny_model: Path) -> None:
    command = ["--model", str(tiny_model), *ENGINE]
    with serving(command) as (process, url):
        body = {"prompt": "Once upon a time", "max_tokens": 20_000, "stream": True}
        with (
            httpx.Client(timeout=60) as http,
            http.stream("POST", f"{url}/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()  # which leaves the stream when it is dropped
            next(lines)
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(1.2)
            os.killpg(process.pid, signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert errors.splitlines()[-1] == (
        "pagecast: a second signal has ended the server; requests under way were dropped"
    )


def test_a_server_whose_engine_is_gone_frees_its_port(tiny_model: Path) -> None:
    with serving(["--model", str(tiny_model), *ENGINE]) as (process, url):
        process.kill()
        _, errors = process.communicate(timeout=30)  # ends when the last process with this stderr has
        assert "the engine's process has ended" in errors
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
