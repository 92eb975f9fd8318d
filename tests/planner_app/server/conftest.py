"""Simulated replicas behind HTTP, in a thread of the test's process."""

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from pagecast.planner_app.server.app import ReplicaServer
from pagecast.planner_app.server.building import simulated_replica
from pagecast.planner_app.server.options import ServeOptions, Simulation
from pagecast.planner_app.server.running import http_server
from pagecast.planner_app.server.tokenizer import PackedTokenizer
from pagecast.sim.scenario import Scenario

from ..commands.conftest import tiny_model as tiny_model

MODEL = "Qwen/Qwen3-8B"


@dataclass(frozen=True)
class Running:
    """A replica that answers at `url`."""

    replica: ReplicaServer
    url: str

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)


@contextmanager
def running(replica: ReplicaServer) -> Iterator[Running]:
    """Serves a replica on a free port until the block ends."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    server = http_server(replica)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        until = time.monotonic() + 20
        while not server.started and time.monotonic() < until:
            time.sleep(0.005)
        yield Running(replica, f"http://127.0.0.1:{listening.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(20)


def make_replica(
    scenario: dict[str, Any] | None = None, simulation: dict[str, Any] | None = None, **options: Any
) -> ReplicaServer:
    """A simulated replica of Qwen3-8B on an H200, ten times as fast as it would be."""
    chosen = Scenario(**{"num_gpu_blocks": 4000, **(scenario or {})})
    pace = Simulation(**{"time_scale": 10.0, **(simulation or {})})
    server = ServeOptions(model=MODEL, **options)
    return simulated_replica(chosen, chosen.step_costs(), PackedTokenizer(), server, pace)


def finishes_its_stream_at_sigterm(
    process: subprocess.Popen[str], url: str, send: Callable[[int, int], None] = os.kill
) -> None:
    """Asserts that a server whose standard error is a pipe sends the rest of a stream, and then ends.

    `send`: takes the process's id and SIGTERM, and sends it.
    """
    text = ""
    try:
        body = {"prompt": "Once upon a time", "max_tokens": 60, "stream": True, "temperature": 0}
        with (
            httpx.Client(timeout=60) as http,
            http.stream("POST", f"{url}/v1/completions", json=body) as answer,
        ):
            for number, line in enumerate(answer.iter_lines()):
                text += line
                if number == 4:
                    send(process.pid, signal.SIGTERM)
    finally:
        _, errors = process.communicate(timeout=60)
    assert text.endswith("data: [DONE]") and '"finish_reason": "length"' in text
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """Serves replicas made with `make_replica` until the test ends."""
    opened = []

    def start(*arguments: Any, **options: Any) -> Running:
        context = running(make_replica(*arguments, **options))
        opened.append(context)
        return context.__enter__()

    yield start
    for context in opened:
        context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One replica for all tests of a module that leave it as it was."""
    with running(make_replica(lora_modules=("sql=/adapters/sql",))) as one:
        yield one
