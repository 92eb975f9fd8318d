"""Clients of a load tool: they hold requests back while as many are under way as they may have."""

from __future__ import annotations

from bisect import insort
from collections import deque
from heapq import heappop

import numpy as np
from pagecast.sim.replay.clients import Arrivals
from pagecast.sim.replica.arrivals import NEVER_NS, NS
from pagecast.traces.schema import Concurrency, Trace


def clients_of(trace: Trace) -> Arrivals:
    """The clients that a trace asks for: they keep to its times, its limit and its warm-up."""
    if trace.concurrency is None and "warmup" not in trace.requests:
        return Arrivals(trace)
    return HeldClients(trace)


class HeldClients(Arrivals):
    """Clients who share `trace.concurrency.most` places, as by a semaphore.

    Source: vLLM 0.24, benchmarks/serve.py, `--max-concurrency`.

    Requests are sent in order of their arrivals, and of the trace where these are equal: each at its arrival
    or, if later, when a place is free. A session holds its place from its first request to the end of its
    last, think times included. How a request ends does not matter: a rejected one frees its place too.

    Warm-up goes first: the requests with the highest number in `warmup`, when all of them have ended those
    with the next lower one, at last the measured ones. Arrivals of each count from its beginning.
    """

    def __init__(self, trace: Trace) -> None:
        self._places: deque[int] = deque()  # the times from which places are free, in order
        super().__init__(trace)
        self._limit = trace.concurrency
        self._chain = _roots(trace)
        warmup, chain = trace.integers("warmup"), np.array(self._chain)
        self._left_of_chain: list[int] = np.bincount(chain, minlength=len(trace)).tolist()
        rows, times = np.array(self._rows), np.array(self._times)
        of_pass, all_of_pass = warmup[rows], warmup[chain]
        self._passes: list[tuple[list[int], list[int], int]] = [
            (
                rows[of_pass == number].tolist(),
                times[of_pass == number].tolist(),
                int((all_of_pass == number).sum()),
            )
            for number in np.unique(of_pass).tolist()
        ]
        self._left = 0  # requests of this pass that have not ended
        self._begin(0)
        self._look_ahead()

    def _begin(self, now: int) -> None:
        """Begins the next pass."""
        self._rows, times, self._left = self._passes.pop()
        self._times = [now + time for time in times]
        self._next = 0
        limit = self._limit or Concurrency(len(times))
        apart = limit.ramp_s * NS / max(limit.most - 1, 1)
        self._places = deque(now + round(number * apart) for number in range(min(limit.most, len(times))))

    def _next_chain_ns(self) -> int:
        """When the next chain is sent, as far as that is known."""
        if self._next == len(self._times) or not self._places:
            return NEVER_NS
        return max(self._times[self._next], self._places[0])

    def _look_ahead(self) -> None:
        due = self._next_chain_ns()
        if self._later:
            due = min(due, self._later[0][0])
        if self._cancels:
            due = min(due, self._cancels[0][0])
        self.next_ns = due

    def take_arrival(self, now: int) -> tuple[int, int] | None:
        """Takes the next arrival that has come by `now`, as `(row, arrival_ns)`."""
        time = self._next_chain_ns()
        if self._later and self._later[0][0] < time:
            if self._later[0][0] > now:
                return None
            time, _, row = heappop(self._later)
        elif time <= now:
            row = self._rows[self._next]
            self._next += 1
            self._places.popleft()
        else:
            return None
        if self._patience is not None and self._patience[row] >= 0:
            self._add_cancel(row, time + round(self._patience[row] * NS))
        self._look_ahead()
        return row, time

    def ended(self, row: int, now: int) -> None:
        """A request has ended: what follows it arrives after a think time, or its place is free."""
        super().ended(row, now)
        chain = self._chain[row]
        self._left_of_chain[chain] -= 1
        if not self._left_of_chain[chain]:
            insort(self._places, now)
        self._left -= 1
        if not self._left and self._passes:
            self._begin(now)
        self._look_ahead()


def _roots(trace: Trace) -> list[int]:
    """The first row of each row's chain."""
    roots = list(range(len(trace)))
    for row, parent in enumerate(trace.integers("after").tolist()):
        if parent >= 0:
            roots[row] = roots[parent]
    return roots
