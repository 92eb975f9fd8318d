"""Clients of a replica: the times at which requests arrive and are cancelled.

Arrivals with a time of their own are a sorted list; those that follow another request, and the moments at
which clients give up, join a heap when they become known. So the next event is always known, which is
what lets the replica advance many steps at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.request import Request
from pagecast.sim.replay.rejections import is_for_load
from pagecast.sim.replica.arrivals import NEVER_NS, NS
from pagecast.traces.chains import Chains
from pagecast.traces.schema import Trace

# How long users of a closed loop pause after a rejection for the load, as clients of OpenAI's library do.
FIRST_BACK_OFF_S = 0.5  # doubled with each further rejection in a row,
MOST_BACK_OFF_S = 8.0  # up to this,
_MOST_S = 4e9  # arrivals, in seconds: nanoseconds of 64 bits, and room to repeat a trace
BACK_OFF_JITTER = 0.25  # and shorter by up to this part of it, by chance


class Arrivals:
    """Rows of a trace in arrival order, with followers and cancellations, in nanoseconds.

    Errors: BadInput where a fixed arrival is missing, or times are out of order.
    """

    open = False  # whether others may add requests while the replica runs
    skipped = 0  # retries that were not needed
    _retries: list[int] | None = None  # which rows are sent only where the one before was not served

    def __init__(self, trace: Trace) -> None:
        table = trace.requests
        seconds = table["arrival_s"].to_numpy(np.float64)
        after = table["after"].to_numpy(np.int64) if "after" in table else np.full(len(table), -1)
        rows = np.flatnonzero(after < 0)
        fixed = seconds[rows]
        if np.isnan(fixed).any():
            row = int(rows[np.isnan(fixed)][0])
            raise BadInput(f"{trace.name}: row {row} has neither arrival_s nor `after`")
        if len(fixed) and (last := float(fixed.max())) > _MOST_S:
            raise BadInput(
                f"{trace.name}: its last request arrives after {last:.3g} s, repeated or stretched as asked, "
                f"and at most {_MOST_S:.0e} s can be replayed; remove the gap between its requests"
            )
        order = np.argsort(fixed, kind="stable")
        self._rows: list[int] = rows[order].tolist()
        self._times: list[int] = np.rint(fixed[order] * NS).astype(np.int64).tolist()
        self._next = 0
        self._later: list[tuple[int, int, int]] = []  # followers whose time is known: time, number, row
        self._followed = 0  # followers whose time has become known so far
        self._cancels: list[tuple[int, int]] = []  # when clients give up; the first is one that still waits
        self._impatient: set[int] = set()  # the rows among them that have not ended
        self._followers: dict[int, list[int]] = {}
        for row in np.flatnonzero(after >= 0).tolist():
            self._followers.setdefault(int(after[row]), []).append(row)
        gap = table["gap_s"].to_numpy(np.float64) if "gap_s" in table else np.zeros(len(table))
        self._gap_ns: list[int] = np.rint(np.nan_to_num(gap) * NS).astype(np.int64).tolist()
        if "retry" in table:
            self._retries = table["retry"].to_numpy(np.int64).tolist()
        self._unserved: set[int] = set()
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

    def _add_later(self, row: int, time: int) -> None:
        """Adds an arrival whose time has become known; of equal times, the one known first comes first."""
        heapq.heappush(self._later, (time, self._followed, row))
        self._followed += 1

    def _add_cancel(self, row: int, time: int) -> None:
        """Adds the time at which the client of a row gives up, unless the row has ended by then."""
        heapq.heappush(self._cancels, (time, row))
        self._impatient.add(row)

    def take(self, now: int) -> tuple[int, int | None] | None:
        """Takes the first of what is due by `now`, as a row and its arrival time; None: nothing is.

        Without an arrival time, it is a client that has given up; it comes before arrivals of the same time.
        """
        if self.next_ns > now:
            return None
        if self._cancels and self._cancels[0][0] == self.next_ns:
            row = self.take_cancel(now)
            if row is not None:
                return row, None
        return self.take_arrival(now)

    def take_arrival(self, now: int) -> tuple[int, int] | None:
        """Takes the next arrival that has come by `now`, as `(row, arrival_ns)`."""
        later = self._later
        times = self._times
        at = self._next
        time = times[at] if at < len(times) else NEVER_NS
        if later and later[0][0] < time:
            if later[0][0] > now:
                return None
            time, _, row = heapq.heappop(later)
        elif time <= now:
            row = self._rows[at]
            self._next = at = at + 1
        else:
            return None
        if self._patience is not None and self._patience[row] >= 0:
            self._add_cancel(row, time + round(self._patience[row] * NS))
        if later or self._cancels:
            self._look_ahead()
        else:
            self.next_ns = times[at] if at < len(times) else NEVER_NS
        return row, time

    def take_cancel(self, now: int) -> int | None:
        """Takes the next client that has given up by `now`: its row."""
        if self._cancels and self._cancels[0][0] <= now:
            row = self._cancels[0][1]
            self._forget_patience(row)
            self._look_ahead()
            return row
        return None

    def _forget_patience(self, row: int) -> None:
        """A client gives up or has its answer. The times of those that have theirs are no events any more:
        they must not cut fast-forward short, nor let time pass after the last request.
        """
        cancels, impatient = self._cancels, self._impatient
        impatient.discard(row)
        while cancels and cancels[0][1] not in impatient:
            heapq.heappop(cancels)

    def failed(self, request: Request) -> None:
        """A request is about to end that was cancelled or rejected: its retry is sent."""
        if self._retries is not None:
            self._unserved.add(request.index)

    def ended(self, row: int, now: int) -> None:
        """A request has ended: whoever follows it arrives after a think time.

        A retry follows only where it is needed; otherwise it counts as ended, too.
        """
        if not self._followers and not self._cancels:
            return
        followers = self._followers.pop(row, None)
        if followers:
            for follower in followers:
                if self._retries is not None and self._retries[follower] and row not in self._unserved:
                    self.skipped += 1
                    self.ended(follower, now)
                    continue
                self._add_later(follower, now + self._gap_ns[follower])
        if row in self._impatient:
            self._forget_patience(row)
        self._look_ahead()


class ClosedLoop(Arrivals):
    """So many users over a trace, whose own arrival times are not used: each has one request at a time.

    A user takes the next chain of the trace (a session, or a single request) when the last one has ended.
    `think_s` None: nobody pauses, so that `users` requests are in the server all the time. Else a user
    pauses before each chain for a time drawn with `seed` from an exponential distribution of this mean, so
    that users don't come in waves, and within one as the trace says (`gap_s`). A user passes over a
    retry that is not needed.

    A user who is rejected for the load backs off before the next request: for 0.5 s, then 1, 2, 4 and at most
    8 s while that goes on, each up to a quarter shorter by chance (`seed`); a longer pause of the user's own
    stands. So users who come together are spread, and none uses the trace up while the server turns it away.
    After a rejection for a request's length a user goes on as usual: waiting would not help.
    """

    def __init__(self, trace: Trace, users: int, think_s: float | None = None, seed: int = 0) -> None:
        if users < 1:
            raise BadInput(f"users is {users}; there must be at least 1")
        super().__init__(_all_at_once(trace))
        chains = Chains.of(trace)
        self._chain_starts: Iterator[int] = iter(chains.first.tolist())
        self._follower: list[int] = chains.follower.tolist()
        self._repeated: list[int] = trace.integers("after").tolist()
        pause_s = np.zeros(len(trace))
        if think_s is not None:
            # Turns that came at times of their own don't tell how long their user paused: as before a chain.
            think_times = np.random.default_rng(seed).exponential(think_s, len(trace))
            pause_s = np.where(trace.integers("after") >= 0, trace.seconds("gap_s"), think_times)
        self._gap_ns = np.rint(pause_s * NS).astype(np.int64).tolist()
        rows = [self._next_row() for _ in range(min(users, len(trace)))]
        starts = sorted((self._gap_ns[row], row) for row in rows if row >= 0)
        self._times, self._rows = [time for time, _ in starts], [row for _, row in starts]
        self._jitter = np.random.default_rng([seed, 1])  # apart from think times
        self._before: dict[int, int] = {}  # how often a row's user was rejected in a row before it
        self._rejections: dict[int, int] = {}  # the same with the row, which is about to end so
        self._look_ahead()

    def failed(self, request: Request) -> None:
        # A user who is rejected for the load backs off.
        super().failed(request)
        if is_for_load(request):
            self._rejections[request.index] = self._before.get(request.index, 0) + 1

    def ended(self, row: int, now: int) -> None:
        """A request has ended: its user goes on with the chain, or takes the next one."""
        self._before.pop(row, None)
        rejections = self._rejections.pop(row, 0)
        follower = self._next_row(row)
        if follower >= 0:
            pause_ns = self._gap_ns[follower]
            if rejections:
                self._before[follower] = rejections
                pause_ns = max(pause_ns, self._back_off_ns(rejections))
            self._add_later(follower, now + pause_ns)
        super().ended(row, now)
        self._look_ahead()

    def _back_off_ns(self, rejections: int) -> int:
        """How long a user pauses after so many rejections in a row."""
        longest_s = min(FIRST_BACK_OFF_S * 2.0 ** min(rejections - 1, 16), MOST_BACK_OFF_S)
        return round(longest_s * (1 - BACK_OFF_JITTER * self._jitter.random()) * NS)

    def _next_row(self, row: int = -1) -> int:
        """What a user sends next, after `row` or as its first; -1: nothing is left."""
        while True:
            row = self._follower[row] if row >= 0 else -1
            if row < 0:
                row = next(self._chain_starts, -1)
            if row < 0 or self._retries is None or not self._retries[row]:
                return row
            if self._repeated[row] in self._unserved:
                return row
            self.skipped += 1


def _all_at_once(trace: Trace) -> Trace:
    """The trace without links, every request at 0: a user's chain says what follows what."""
    columns = {name: trace.requests[name] for name in trace.requests if name != "after"}
    return Trace(trace.name, pd.DataFrame({**columns, "arrival_s": np.zeros(len(trace))}))
