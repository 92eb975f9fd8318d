"""Where a request's time goes in a served engine, and how much of what a client reports is the client's own.

    python tests/benchmarks/serve_stages.py --engine Qwen/Qwen3-8B \\
        openai-chat:4000:30:5 guidellm-chat:4000:30:5

Each CLIENT:PROMPT:REQUESTS:RATE is a streaming row of `serve_clients.py`; one server serves them all. It
runs with clocks around what happens to a request, in its process and in the engine's: all read the system's
monotonic clock. Prints means in milliseconds.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

_FOLDER = "PAGECAST_STAGES"
STAGES = (
    ("first_bytes", "arrival", "first byte to arrival"),
    ("arrival", "taken_in", "parse and tokenize"),
    ("taken_in", "taken", "to the engine's loop"),
    ("taken", "admitted", "scheduled"),
    ("admitted", "step_end", "steps"),
    ("step_end", "sent", "tokens sent to the server"),
    ("sent", "received", "on the way"),
    ("received", "written", "first chunk written"),
)


# ---- in the server's processes


def note(number: int, **times: int) -> None:
    """Keeps times of a request, in a file of this process."""
    with (Path(os.environ[_FOLDER]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"number": number, **times}) + "\n")


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Has `around` called in a method's place, with the method before its arguments."""
    setattr(owner, name, functools.partialmethod(_call, around, getattr(owner, name)))


def _call(self: Any, around: Callable[..., Any], method: Callable[..., Any], *arguments: Any) -> Any:
    return around(method, self, *arguments)


def clock_server() -> None:
    """Puts clocks into the process of the HTTP server."""
    from pagecast.planner_app.server.engine_backend import EngineBackend
    from pagecast.planner_app.server.guard import ARRIVAL
    from pagecast.planner_app.server.serving import TokenStream
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    first_bytes: dict[int, int] = {}  # by arrival
    written: set[int] = set()

    class Scope(dict[str, Any]):
        """A request's scope, which remembers when the first of its bytes came."""

        first_ns = 0

        def __setitem__(self, key: str, value: Any) -> None:
            if key == ARRIVAL:
                first_bytes[value] = self.first_ns
            super().__setitem__(key, value)

    def headers(method: Any, protocol: Any) -> None:
        scope = Scope(protocol.scope)
        scope.first_ns = time.perf_counter_ns()
        protocol.scope = scope
        method(protocol)

    def submit(method: Any, backend: Any, generation: Any) -> None:
        first_ns = first_bytes.pop(generation.arrival_ns, None)
        taken_in = time.perf_counter_ns()
        method(backend, generation)
        arrival = generation.arrival_ns + backend._start_ns
        note(generation.number, first_bytes=first_ns or arrival, arrival=arrival, taken_in=taken_in)

    def deliver(method: Any, backend: Any, news: Any) -> None:
        received = time.perf_counter_ns()
        method(backend, news)
        for start in news.admitted:
            note(start.number, received=received)

    def push(method: Any, stream: Any) -> None:
        method(stream)
        number = stream._generations[0].number
        if number not in written:
            written.add(number)
            note(number, written=time.perf_counter_ns())

    wrap(HttpToolsProtocol, "on_headers_complete", headers)
    wrap(EngineBackend, "submit", submit)
    wrap(EngineBackend, "_deliver", deliver)
    wrap(TokenStream, "_push", push)


def clock_engine() -> None:
    """Puts clocks into the process of the engine."""
    from pagecast.planner_app.server.engine_work import EngineWork

    def submit(method: Any, work: Any, submission: Any) -> None:
        taken = time.perf_counter_ns()
        method(work, submission)
        note(submission.number, taken=taken)

    def report(method: Any, work: Any) -> None:
        admitted, end_ns, zero = work._admitted, work._end_ns, work.engine.loop.clock.start_ns
        sent = time.perf_counter_ns()
        method(work)
        for start in admitted:
            note(start.number, admitted=start.admitted_ns + zero, step_end=end_ns + zero, sent=sent)

    wrap(EngineWork, "_submit", submit)
    wrap(EngineWork, "_report", report)


# ---- the comparison


def stages(folder: Path) -> pd.DataFrame:
    """Times of all requests so far whose first chunk has been written, in milliseconds; by number."""
    rows: dict[int, dict[str, float]] = {}
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            times = json.loads(line)
            rows.setdefault(times.pop("number"), {}).update(times)
    return pd.DataFrame.from_dict(rows, orient="index").sort_index().dropna() / 1e6


def main() -> None:
    """Prints a line for each client, and its stages."""
    import serve_clients as clients

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="CLIENT:PROMPT:REQUESTS:RATE")
    parser.add_argument("--engine", nargs="?", const="", default="", metavar="MODEL")
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=900.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ[_FOLDER] = str(folder)
        server = clients.Server(given, folder, program=(__file__,))
        del os.environ[_FOLDER]
        try:
            for row in given.rows:
                name, prompt, requests, rate = row.split(":")
                given.prompt, given.requests, given.rate = int(prompt), int(requests), float(rate)
                reported = clients.measure(name, given, server)
                time.sleep(0.5)
                table = stages(folder).iloc[-given.requests :]
                parts = {title: (table[end] - table[begin]).mean() for begin, end, title in STAGES}
                recorded = (table["step_end"] - table["arrival"]).mean()
                own = parts["first byte to arrival"] + (table["written"] - table["step_end"]).mean()
                over = reported.means["ttft"] * 1e3 - recorded
                print(f"{row}: TTFT {recorded:.2f} ms; reported {over:+.2f}, of which the server {own:.2f}")
                for title, value in parts.items():
                    print(f"  {title:26s} {value:9.2f}")
                sys.stdout.flush()
        finally:
            server.end()


if _FOLDER in os.environ:  # the server's processes import this too
    if __name__ == "__main__":
        clock_engine()
    else:
        clock_server()

if __name__ == "__main__":
    if _FOLDER in os.environ:
        from pagecast.planner_app.cli import main as serve

        serve()
    else:
        main()
