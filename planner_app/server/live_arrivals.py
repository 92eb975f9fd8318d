"""Arrivals of a replica that is fed live, and its requests, as they happen."""

from __future__ import annotations

import numpy as np
import pandas as pd
from pagecast.planner_app.server.history import History
from pagecast.sim.core.request import Request
from pagecast.sim.replay.clients import Arrivals
from pagecast.traces.schema import REQUIRED, Trace

_NOBODY = Trace("live", pd.DataFrame({name: np.zeros(0, np.int64) for name in REQUIRED}))


class LiveArrivals(Arrivals):
    """Arrivals and departures that become known as they happen, instead of a trace's."""

    def __init__(self, history: History) -> None:
        super().__init__(_NOBODY)
        self._history = history
        self._waiting: set[int] = set()  # rows that have arrived, and which nobody has taken yet
        self._departures: dict[int, int] = {}  # of these, rows whose client has left, and when

    @property
    def coming(self) -> int:
        """Requests that have arrived, and which the replica has not taken in yet."""
        return len(self._waiting)

    def arrive(self, row: int, now: int) -> None:
        """A request arrives."""
        self._waiting.add(row)
        self._add_later(row, now)
        self._look_ahead()

    def leave(self, row: int, now: int) -> None:
        """A client has left before the end."""
        if row in self._waiting:
            self._departures[row] = now
        else:
            self._add_cancel(row, now)
        self._look_ahead()

    def take(self, now: int) -> tuple[int, int | None] | None:
        due = super().take(now)
        if due is not None:
            self._history.note_outside(now, due[0], cancelled=due[1] is None)
        return due

    def take_arrival(self, now: int) -> tuple[int, int] | None:
        arrival = super().take_arrival(now)
        if arrival is not None:
            row = arrival[0]
            self._waiting.discard(row)
            departure_ns = self._departures.pop(row, None)
            if departure_ns is not None:
                self._add_cancel(row, departure_ns)
                self._look_ahead()
        return arrival

    def ended(self, row: int, now: int) -> None:
        """Does nothing: the server itself tells its clients."""


class LiveFeed:
    """Requests of the core, made from what clients ask for."""

    def __init__(self) -> None:
        self._pending: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """Keeps a request until the replica takes it in."""
        self._pending[request.index] = request

    def request(self, row: int, arrival_ns: int) -> Request:
        """The request of a row, once."""
        return self._pending.pop(row)
