"""An engine that serves what a router sends it through a pipe, and records the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pagecast.engine.serve import TraceServer
from pagecast.sim.replica.arrivals import NEVER_NS
from pagecast.sim.runs.recorded import RecordedRun

_POLL_NS = 300_000


class Inlet:
    """Arrivals that come through a pipe, as `(row, arrival)`; None ends them. Times of `perf_counter_ns`.

    Stands for `Arrivals` in a `TraceServer`, with the engine's clock.
    """

    def __init__(self, pipe: Any, clock: Callable[[], Any]) -> None:
        self._pipe = pipe
        self._clock = clock
        self._entries: deque[tuple[int, int]] = deque()
        self._open = True

    @property
    def base_ns(self) -> int:
        """When the engine's clock was 0."""
        return time.perf_counter_ns() - int(self._clock().now())

    @property
    def next_ns(self) -> int:
        """When to look again; never, once the router has sent its last."""
        if self._open or self._entries:
            return int(self._clock().now()) + _POLL_NS
        return NEVER_NS

    def take(self, now: int) -> tuple[int, int | None] | None:
        """The next request that has come."""
        self._read()
        if not self._entries:
            return None
        row, sent_ns = self._entries.popleft()
        return row, min(max(sent_ns - self.base_ns, 0), now)

    def _read(self) -> None:
        while self._open and self._pipe.poll():
            entry = self._pipe.recv()
            if entry is None:
                self._open = False
            else:
                self._entries.append(entry)

    def failed(self, request: Any) -> None:
        """The router sends no retries."""

    def ended(self, row: int, now: int) -> None:
        """Tells the router."""
        self._pipe.send(row)


class LiveServer(TraceServer):
    """Requests of a trace, as a router sends them."""

    def columns(self, rows: list[int]) -> dict[str, list[Any]]:
        """More columns of the recorded requests, for these rows of the trace."""
        return {"trace_row": rows}

    def _recorded(self, recording: Any, events: Any) -> RecordedRun:
        run = super()._recorded(recording, events)
        columns = self.columns(sorted(self._sequences))
        return replace(run, requests=run.requests.assign(**columns))
