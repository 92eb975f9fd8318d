"""Arrivals of a replica: the interfaces that say when requests come, and what they ask for."""

from __future__ import annotations

from typing import Protocol

from pagecast.sim.core.request import Request

NS = 1_000_000_000
NEVER_NS = 1 << 62


class ArrivalSource(Protocol):
    """Source of a replica's arrivals, by row number.

    `next_ns`: when the next arrival or cancellation is due. `open`: others may add requests while the replica
    runs; they call `Replica.wake` after each.
    """

    next_ns: int
    open: bool

    def take(self, now: int) -> tuple[int, int | None] | None:
        """Takes the first of what is due by `now`, as a row and its arrival time; None: nothing is due.

        Without an arrival time, the client of the row has given up.
        """
        ...

    def failed(self, request: Request) -> None:
        """A request is about to end that was cancelled or rejected."""

    def ended(self, row: int, now: int) -> None:
        """A request has ended, whichever way."""


class RequestSource(Protocol):
    """Maker of the core's requests, by row number."""

    def request(self, row: int, arrival_ns: int) -> Request:
        """The request of a row that arrives at `arrival_ns`."""
        ...
