"""The decoding requests, without touching each of them every step.

A decoding request computes one token a tick, so all that matters follows from two numbers that stay put:
its `lag` (at tick t it computes position t - lag) and its last tick. Whoever needs a new block at tick t
has a lag congruent to t modulo the block size, so requests stand in one bucket a remainder, and a step
costs what it allocates, not what it decodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from pagecast.sim.core.request import Request
from pagecast.sim.core.runs import Run


class Decoders:
    """Requests that decode, in admission order, with the tick at which each needs a block and ends."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.requests: dict[Request, None] = {}
        self.count = 0
        self.explicit = 0  # how many have a key for each block (token ids)
        self._buckets: list[dict[Request, None]] = [{} for _ in range(block_size)]
        self._lag_sum = 0
        self._least_lag: int | None = None
        self._ends: dict[int, list[Request]] = {}
        self._end_ticks: list[int] = []
        self._snapshot: tuple[Request, ...] | None = ()

    # ---- membership

    def add(self, request: Request) -> None:
        """Adds a request whose `lag` and `last_step` (its last tick) are set."""
        self.requests[request] = None
        self.count += 1
        self._snapshot = None
        self.explicit += request.keys.explicit
        self._place(request)

    def remove(self, request: Request) -> None:
        """Takes a request out before its end."""
        self._unplace(request)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        del self.requests[request]
        self.count -= 1
        self._snapshot = None
        self.explicit -= request.keys.explicit

    def delay(self, request: Request) -> None:
        """A request sits this tick out: it will be one tick later in all."""
        self._unplace(request)
        request.lag += 1
        request.last_step += 1
        self._place(request)
        bucket = self._buckets[request.lag % self.block_size]
        ordered = sorted(bucket, key=_order)
        bucket.clear()
        bucket.update(dict.fromkeys(ordered))

    def _place(self, request: Request) -> None:
        lag, last = request.lag, request.last_step
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
        last = request.last_step
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

    def context(self, tick: int) -> int:
        """Tokens of context of all requests at a tick, without those being computed."""
        return tick * self.count - self._lag_sum

    def longest(self, tick: int) -> int:
        """The longest context at a tick; 0 where nothing decodes."""
        if not self.requests:
            return 0
        if self._least_lag is None:
            self._least_lag = min(request.lag for request in self.requests)
        return tick - self._least_lag

    # ---- ends

    def next_end(self) -> int:
        """The first tick at which a request computes its last token. There must be requests."""
        ticks = self._end_ticks
        while ticks[0] not in self._ends:
            heapq.heappop(ticks)
        return ticks[0]

    def pop_ended(self, tick: int) -> list[Request]:
        """Takes out the requests whose last token this tick computes, in admission order."""
        ended = self._ends.pop(tick, None)
        if ended is None:
            return []
        if len(ended) > 1:
            ended.sort(key=_order)
        for request in ended:
            self._unbucket(request)
            self._drop(request)
        return ended

    # ---- blocks

    def crossing(self, tick: int) -> dict[Request, None]:
        """The requests that need a new block at a tick, in admission order."""
        return self._buckets[tick % self.block_size]

    def filling(self, tick: int) -> dict[Request, None]:
        """The requests that fill a block at a tick, in admission order."""
        return self._buckets[(tick + 1) % self.block_size]

    def ticks_within(self, tick: int, free: int) -> int:
        """How many ticks from `tick` on can be served with `free` blocks."""
        size = self.block_size
        rounds, left = divmod(free, self.count)
        ticks = rounds * size
        at = tick % size
        for offset in range(size):
            left -= len(self._buckets[(at + offset) % size])
            if left < 0:
                return ticks + offset
        return ticks + size

    def grow(self, tick: int, ticks: int, take: Callable[[int], list[int]]) -> None:
        """Takes the blocks that `ticks` ticks need, and hands them out in the order stepping would have."""
        size = self.block_size
        at = tick % size
        buckets = self._buckets
        last = at + ticks
        order: list[Request] = []
        for bucket in buckets[at:last]:
            if bucket:
                order += bucket
        if last > size:
            for bucket in buckets[: min(last - size, at)]:
                if bucket:
                    order += bucket
        if not order:
            return
        if ticks <= size:
            for request, block in zip(order, take(len(order)), strict=True):
                request.tail.blocks.append(block)  # type: ignore[union-attr]
            return
        # Every round of block_size ticks serves the requests in this same order.
        n = len(order)
        rounds, rest = divmod(ticks, size)
        needed = rounds * n
        for offset in range(rest):
            needed += len(buckets[(at + offset) % size])
        blocks = take(needed)
        for i, request in enumerate(order):
            request.tail.blocks += blocks[i::n]  # type: ignore[union-attr]


def give_one(request: Request, tick: int, block: int, block_size: int) -> None:
    """Hands one block to a decoding request that needs it at this tick."""
    if request.keys.explicit:
        number = (tick - request.lag) // block_size
        keys = request.keys
        run = Run(keys.digests[number] if number < len(keys.digests) else None, number, [block], request)
        request.table.append((run, -1))
        request.tail = run
        return
    tail = request.tail
    assert tail is not None
    tail.blocks.append(block)


def _order(request: Request) -> int:
    return request.order
