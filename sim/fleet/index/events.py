"""A prefix index fed by the replicas' KV events: what they store and evict, some time later."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from pagecast.sim.fleet.index.extents import Extent, Extents
from pagecast.sim.fleet.query import Piece


class EventIndex:
    """Blocks that replicas say they have, `delay_ns` after they said it.

    Events name an engine's blocks, so `path` must be in its block size. A removal that comes while another
    copy stays is believed, as vLLM sends it.
    """

    def __init__(self, *, delay_ns: int = 0) -> None:
        self.delay_ns = delay_ns
        self._extents = Extents()
        self._coming: list[tuple[int, int, int, bool, bytes, int, int]] = []
        self._count = 0

    def overlaps(self, path: list[Piece], now: int) -> dict[int, int]:
        """How many of a prompt's blocks, from its start, each replica is believed to have."""
        coming = self._coming
        while coming and coming[0][0] <= now:
            _, _, replica, stored, key, begin, end = heapq.heappop(coming)
            if stored:
                self._store(replica, key, begin, end)
            else:
                self._remove(replica, key, begin, end)
        return self._extents.overlaps(path, -1)

    def first_holder(self, path: list[Piece], blocks: int, replicas: list[int]) -> int:
        """As `Extents.first_holder`."""
        return self._extents.first_holder(path, blocks, replicas)

    def feed(self, replica: int, clock: Callable[[], int]) -> Feedback:
        """The watcher of a replica's memory; `clock` gives its time."""
        return Feedback(self, replica, clock)

    def receive(self, replica: int, stored: bool, key: bytes, begin: int, end: int, now: int) -> None:
        """An event of a replica."""
        if self.delay_ns:
            self._count += 1
            heapq.heappush(self._coming, (now + self.delay_ns, self._count, replica, stored, key, begin, end))
        elif stored:
            self._store(replica, key, begin, end)
        else:
            self._remove(replica, key, begin, end)

    def forget(self, replica: int) -> None:
        """A replica is gone, or has started anew."""
        self._extents.forget(replica)
        self._coming = [entry for entry in self._coming if entry[2] != replica]
        heapq.heapify(self._coming)

    def _store(self, replica: int, key: bytes, begin: int, end: int) -> None:
        extents = self._extents.at(key, replica)
        kept = []
        for extent in extents:
            if extent.end < begin or extent.begin > end:
                kept.append(extent)
            else:
                begin = min(begin, extent.begin)
                end = max(end, extent.end)
        kept.append(Extent(key, begin, end, 0))
        if len(kept) > 1:
            kept.sort(key=lambda extent: extent.begin)
        extents[:] = kept

    def _remove(self, replica: int, key: bytes, begin: int, end: int) -> None:
        holders = self._extents.of.get(key)
        extents = holders.get(replica) if holders else None
        if not extents:
            return
        kept = []
        for extent in extents:
            if extent.begin < begin:
                kept.append(Extent(key, extent.begin, min(extent.end, begin), 0))
            if extent.end > end:
                kept.append(Extent(key, max(extent.begin, end), extent.end, 0))
        extents[:] = kept
        if not kept:
            assert holders is not None
            del holders[replica]
            if not holders:
                del self._extents.of[key]


class Feedback:
    """Passes a memory's events on, with the replica's number and time."""

    def __init__(self, index: EventIndex, replica: int, clock: Callable[[], int]) -> None:
        self._index = index
        self._replica = replica
        self._clock = clock

    def stored(self, key: bytes, begin: int, end: int) -> None:
        """As `Watcher.stored`."""
        self._index.receive(self._replica, True, key, begin, end, self._clock())

    def removed(self, key: bytes, begin: int, end: int) -> None:
        """As `Watcher.removed`."""
        self._index.receive(self._replica, False, key, begin, end, self._clock())
