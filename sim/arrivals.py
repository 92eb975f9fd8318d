"""When requests come and clients go: the replica's view of the future.

Arrivals with a time of their own are a sorted list; those that follow another request, and the moments at
which clients give up, join a heap when they become known. So the next event is always known, which is
what lets the replica advance many steps at once.
"""

from __future__ import annotations

import heapq

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.traces.schema import Trace

NS = 1_000_000_000
NEVER_NS = 1 << 62


class Arrivals:
    """Rows of a trace in arrival order, with followers and cancellations, in nanoseconds.

    Errors: BadInput where a fixed arrival is missing, or times are out of order.
    """

    def __init__(self, trace: Trace) -> None:
        table = trace.requests
        seconds = table["arrival_s"].to_numpy(np.float64)
        after = table["after"].to_numpy(np.int64) if "after" in table else np.full(len(table), -1)
        rows = np.flatnonzero(after < 0)
        fixed = seconds[rows]
        if np.isnan(fixed).any():
            row = int(rows[np.isnan(fixed)][0])
            raise BadInput(f"{trace.name}: row {row} has neither arrival_s nor `after`")
        order = np.argsort(fixed, kind="stable")
        self._rows: list[int] = rows[order].tolist()
        self._times: list[int] = np.rint(fixed[order] * NS).astype(np.int64).tolist()
        self._next = 0
        self._later: list[tuple[int, int]] = []  # followers whose time is known
        self._cancels: list[tuple[int, int]] = []
        self._followers: dict[int, list[int]] = {}
        for row in np.flatnonzero(after >= 0).tolist():
            self._followers.setdefault(int(after[row]), []).append(row)
        gap = table["gap_s"].to_numpy(np.float64) if "gap_s" in table else np.zeros(len(table))
        self._gap_ns: list[int] = np.rint(np.nan_to_num(gap) * NS).astype(np.int64).tolist()
        patience = table["cancel_after_s"].to_numpy(np.float64) if "cancel_after_s" in table else None
        self._patience: list[float] | None = None if patience is None else patience.tolist()
        self.next_ns = NEVER_NS  # when the next arrival or cancellation is due
        self._look_ahead()

    def _look_ahead(self) -> None:
        due = self._times[self._next] if self._next < len(self._times) else NEVER_NS
        if self._later and self._later[0][0] < due:
            due = self._later[0][0]
        if self._cancels and self._cancels[0][0] < due:
            due = self._cancels[0][0]
        self.next_ns = due

    def due(self, now: int) -> tuple[int, int] | None:
        """Takes the next arrival that has come by `now`, as `(row, arrival_ns)`."""
        later = self._later
        at = self._next
        if at < len(self._times) and self._times[at] <= now and (not later or self._times[at] <= later[0][0]):
            self._next = at + 1
            row, time = self._rows[at], self._times[at]
        elif later and later[0][0] <= now:
            time, row = heapq.heappop(later)
        else:
            return None
        if self._patience is not None and self._patience[row] >= 0:
            heapq.heappush(self._cancels, (time + round(self._patience[row] * NS), row))
        self._look_ahead()
        return row, time

    def due_cancel(self, now: int) -> int | None:
        """Takes the next client that has given up by `now`: its row."""
        if self._cancels and self._cancels[0][0] <= now:
            row = heapq.heappop(self._cancels)[1]
            self._look_ahead()
            return row
        return None

    def ended(self, row: int, now: int) -> None:
        """A request has ended: whoever follows it arrives after a think time."""
        if not self._followers and not self._cancels:
            return
        followers = self._followers.pop(row, None)
        if followers:
            for follower in followers:
                heapq.heappush(self._later, (now + self._gap_ns[follower], follower))
        if self._patience is not None and self._cancels and self._patience[row] >= 0:
            # A finished request's cancellation must not cut fast-forward short.
            while self._cancels and self._cancels[0][1] == row:
                heapq.heappop(self._cancels)
        self._look_ahead()
