"""Inbox of one replica: the arrivals that routers have sent to it, known only while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pagecast.sim.core.request import Request
from pagecast.sim.replica.arrivals import NEVER_NS

OnEnd = Callable[[int, int], None]
OnFail = Callable[[Request], None]
OnTurn = Callable[[int], None]


class Inbox:
    """An `ArrivalSource` of what routers have sent, in order: entries `(due, row, arrival)`. One without an
    arrival is a cancellation.

    `on_end(row, now)` hears of every request that has ended on the replica, and `on_fail(request)` before it
    of one that was cancelled or rejected.
    """

    def __init__(self, on_end: OnEnd, on_fail: OnFail) -> None:
        self.open = True
        self.next_ns = NEVER_NS
        self._on_end = on_end
        self._on_fail = on_fail
        self._entries: deque[tuple[int, int, int | None]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, row: int, now: int, arrival_ns: int | None) -> None:
        """Adds a request that came to the fleet at `arrival_ns`; with None, its client has given up."""
        self._entries.append((now, row, arrival_ns))
        if self.next_ns == NEVER_NS:
            self.next_ns = now

    def take(self, now: int) -> tuple[int, int | None] | None:
        """Takes what is due by `now`, as a row and its arrival time; without one, a client has given up."""
        if self.next_ns > now:
            return None
        entries = self._entries
        _, row, arrival_ns = entries.popleft()
        self.next_ns = entries[0][0] if entries else NEVER_NS
        return row, arrival_ns

    def failed(self, request: Request) -> None:
        """A request is about to end that was cancelled or rejected."""
        self._on_fail(request)

    def ended(self, row: int, now: int) -> None:
        """A request has ended on the replica."""
        self._on_end(row, now)

    def take_all(self) -> list[int]:
        """Takes every entry, due or not: the rows of the requests among them."""
        rows = [row for _, row, arrival_ns in self._entries if arrival_ns is not None]
        self._entries.clear()
        self.next_ns = NEVER_NS
        return rows


class HandoffInbox(Inbox):
    """Inbox of a replica that prefills or decodes for others.

    `on_turn(now)` is called once after each `ring`, when the replica looks for arrivals next: between steps.
    """

    def __init__(self, on_end: OnEnd, on_fail: OnFail) -> None:
        super().__init__(on_end, on_fail)
        self.on_turn: OnTurn = lambda now: None
        self._turn_ns = NEVER_NS

    def ring(self, now: int) -> None:
        """Asks for a turn at `now` or later."""
        if now < self._turn_ns:
            self._turn_ns = now
            self.next_ns = min(self.next_ns, now)

    def take(self, now: int) -> tuple[int, int | None] | None:
        """As `Inbox.take`; the turn that is due comes first."""
        if self._turn_ns <= now:
            self._turn_ns = NEVER_NS
            self.on_turn(now)
        entry = super().take(now) if self._entries else None
        due_ns = self._entries[0][0] if self._entries else NEVER_NS
        self.next_ns = min(due_ns, self._turn_ns)
        return entry
