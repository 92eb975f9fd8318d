"""Decoding requests, kept so that a step need not touch each of them.

A tick is a step in which requests may decode. A request that computes one token per tick is described by two
numbers that do not change: its `lag` (at tick t it computes position t - lag) and its last tick. It needs a
new block at tick t where its lag is congruent to t modulo the block size. So requests stand in one bucket
per remainder, and a step costs what it allocates, not what it decodes. A request that sits a tick out has a
greater lag from then on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import chain

from pagecast.sim.core.request import Request


class Decoders:
    """Requests that decode one token per tick, in admission order, with the tick of each next event."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.requests: dict[Request, None] = {}
        self.count = 0
        self.explicit = 0  # how many have one key per block (token ids)
        buckets: list[dict[Request, None]] = [{} for _ in range(block_size)]
        self._buckets = buckets + buckets  # twice in a row: a slice goes round
        # Sums over all requests follow from these in O(1): at tick t their contexts are t - lag each.
        self._lag_sum = 0
        self._least_lag: int | None = None  # None: its request has left, look again when asked
        self._ends: dict[int, list[Request]] = {}
        self._end_ticks: list[int] = []  # a heap; those at which nobody ends any more are dropped at its top
        self._snapshot: tuple[Request, ...] | None = ()

    # ---- membership

    def add(self, request: Request) -> None:
        """Adds a request whose `lag` and `last_tick` are set."""
        late = self.count > 0 and next(reversed(self.requests)).order > request.order
        self.requests[request] = None
        self.count += 1
        self._snapshot = None
        if request.keys.explicit:
            self.explicit += 1
        self._place(request)
        if late:  # its prompt took longer than those of requests admitted after it
            _sort(self.requests)
            self._sort_bucket(request)

    def remove(self, request: Request) -> None:
        """Takes a request out before its end."""
        self._unplace(request)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        del self.requests[request]
        self.count -= 1
        self._snapshot = None
        if request.keys.explicit:
            self.explicit -= 1

    def delay(self, request: Request) -> None:
        """A request sits this tick out: all that it does from now on comes one tick later."""
        self._unplace(request)
        request.lag += 1
        request.last_tick += 1
        self._place(request)
        self._sort_bucket(request)

    def _sort_bucket(self, request: Request) -> None:
        """A request came last into its bucket, but whoever was admitted first takes a block first."""
        _sort(self._buckets[request.lag % self.block_size])

    def _place(self, request: Request) -> None:
        lag = request.lag
        last = request.last_tick
        self._buckets[lag % self.block_size][request] = None
        self._lag_sum += lag
        if self._least_lag is not None and lag < self._least_lag:
            self._least_lag = lag
        ends = self._ends.get(last)
        if ends is None:
            self._ends[last] = [request]
            heapq.heappush(self._end_ticks, last)
        else:
            ends.append(request)

    def _unplace(self, request: Request) -> None:
        last = request.last_tick
        self._unbucket(request)
        ends = self._ends[last]
        ends.remove(request)
        if not ends:
            del self._ends[last]

    def _unbucket(self, request: Request) -> None:
        lag = request.lag
        del self._buckets[lag % self.block_size][request]
        self._lag_sum -= lag
        if lag == self._least_lag:
            self._least_lag = None

    def snapshot(self) -> tuple[Request, ...]:
        """The decoding requests in admission order."""
        if self._snapshot is None:
            self._snapshot = tuple(self.requests)
        return self._snapshot

    # ---- context

    def contexts(self, tick: int) -> tuple[int, int]:
        """Tokens of context at a tick, without those being computed: of all requests, and of the longest."""
        if not self.count:
            return 0, 0
        least = self._least_lag
        if least is None:
            least = self._least_lag = min([request.lag for request in self.requests])
        return tick * self.count - self._lag_sum, tick - least

    # ---- ends

    def quiet(self, tick: int) -> int:
        """For how many ticks, from `tick` on, nothing ends before the last of them. There are requests."""
        ticks = self._end_ticks
        while ticks[0] not in self._ends:
            heapq.heappop(ticks)
        return ticks[0] - tick + 1

    def pop_ended(self, tick: int) -> list[Request]:
        """Takes out the requests whose last token this tick computes, in admission order."""
        requests = self._ends.pop(tick, None)
        if requests is None:
            return []
        if len(requests) > 1:
            requests.sort(key=admission_order)
        for request in requests:
            self._unbucket(request)
            self._drop(request)
        return requests

    # ---- blocks

    def crossing(self, tick: int) -> dict[Request, None]:
        """The requests that begin a new block at a tick, in admission order."""
        return self._buckets[tick % self.block_size]

    def filling(self, tick: int) -> dict[Request, None]:
        """The requests that fill a block at a tick, in admission order."""
        return self._buckets[(tick + 1) % self.block_size]

    def at_offsets(self, tick: int, offsets: Iterable[int]) -> list[Request]:
        """The requests that compute, at a tick, one of these offsets in a block."""
        size = self.block_size
        requests: list[Request] = []
        for offset in offsets:
            bucket = self._buckets[(tick - offset) % size]
            if bucket:
                requests += bucket
        return requests

    def busy(self, offsets: Iterable[int]) -> list[bool]:
        """For each tick, modulo the block size, whether a request computes one of these offsets then."""
        size = self.block_size
        busy = [False] * size
        for lag, bucket in enumerate(self._buckets[:size]):
            if bucket:
                for offset in offsets:
                    busy[(lag + offset) % size] = True
        return busy

    def ticks_within(self, tick: int, crossings: int) -> int:
        """How many ticks from `tick` on have at most `crossings` block boundaries together."""
        # In as many ticks as a block has tokens each request begins one block: whole rounds need no search.
        size = self.block_size
        rounds, remaining = divmod(crossings, self.count)
        ticks = rounds * size
        at = tick % size
        for offset in range(size):
            remaining -= len(self._buckets[at + offset])
            if remaining < 0:
                return ticks + offset
        return ticks + size

    def crossings(self, tick: int, ticks: int) -> tuple[list[Request], int]:
        """Who begins a block within `ticks` ticks from `tick` on, in order, and how many blocks that is.

        Beyond one block size the requests cross over and over in the same order, so each is listed once.
        """
        size = self.block_size
        at = tick % size
        if ticks <= size:
            order = list(chain.from_iterable(self._buckets[at : at + ticks]))
            return order, len(order)
        order = list(chain.from_iterable(self._buckets[at : at + size]))
        rounds, rest = divmod(ticks, size)
        return order, rounds * len(order) + sum(map(len, self._buckets[at : at + rest]))


def _sort(requests: dict[Request, None]) -> None:
    ordered = sorted(requests, key=admission_order)
    requests.clear()
    requests.update(dict.fromkeys(ordered))


def admission_order(request: Request) -> int:
    """Sorts requests by their latest admission."""
    return request.order


def arrival_order(request: Request) -> tuple[int, int, int]:
    """Sorts requests by their arrival."""
    return request.arrival_ns, request.index, request.order
