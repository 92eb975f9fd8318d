"""A prefix index that a router keeps by itself, from where it sent which prompt.

Nobody tells it of evictions, so it advertises what may be gone. It forgets by capacity (least recently sent
first) and by age.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from pagecast.sim.fleet.index.extents import Extent, Extents
from pagecast.sim.fleet.query import Piece

FOREVER_NS = 1 << 62


class ApproximateIndex:
    """Blocks by the replica they were sent to. Costs grow with segments touched, not with blocks.

    `capacity`: blocks kept per replica (None: no bound). `ttl_ns`: how long a block is believed after it was
    sent last. `delay_ns`: how much later than sent it is believed. `leaf_first`: of one prompt the last block
    is forgotten first; otherwise the first one, as in an LRU list filled from the prompt's start (llm-d).
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        ttl_ns: int = FOREVER_NS,
        delay_ns: int = 0,
        leaf_first: bool = False,
    ) -> None:
        self.capacity = capacity
        self.ttl_ns = ttl_ns
        self.delay_ns = delay_ns
        self.leaf_first = leaf_first
        self._extents = Extents()
        self._order: dict[int, OrderedDict[Extent, None]] = {}
        self._size: dict[int, int] = {}
        self._coming: deque[tuple[int, int, list[Piece]]] = deque()

    def overlaps(self, path: list[Piece], now: int) -> dict[int, int]:
        """How many of a prompt's blocks, from its start, each replica is believed to have."""
        while self._coming and self._coming[0][0] <= now:
            time, replica, path_sent = self._coming.popleft()
            self._note(replica, path_sent, time)
        return self._extents.overlaps(path, now - self.ttl_ns)

    def first_holder(self, path: list[Piece], blocks: int, replicas: list[int]) -> int:
        """As `Extents.first_holder`."""
        return self._extents.first_holder(path, blocks, replicas)

    def add(self, replica: int, path: list[Piece], now: int) -> None:
        """A prompt was sent to a replica, which will have it."""
        if self.delay_ns:
            self._coming.append((now + self.delay_ns, replica, path))
        else:
            self._note(replica, path, now)

    def blocks(self, replica: int) -> int:
        """How many blocks a replica is believed to have."""
        return self._size.get(replica, 0)

    def forget(self, replica: int) -> None:
        """A replica is gone, or has started anew."""
        self._extents.forget(replica)
        self._order.pop(replica, None)
        self._size.pop(replica, None)
        self._coming = deque(entry for entry in self._coming if entry[1] != replica)

    def _note(self, replica: int, path: list[Piece], now: int) -> None:
        order = self._order.get(replica)
        if order is None:
            order = self._order[replica] = OrderedDict()
        size = self._size.get(replica, 0)
        for key, begin, end in reversed(path) if self.leaf_first else path:
            extents = self._extents.at(key, replica)
            if len(extents) == 1 and extents[0].begin == begin and extents[0].end <= end:
                extent = extents[0]
                size += end - extent.end
                extent.end = end
                extent.time = now
                order.move_to_end(extent)
                continue
            kept = []
            for extent in extents:
                if extent.end > end:
                    size -= max(end - extent.begin, 0)
                    extent.begin = max(extent.begin, end)
                    kept.append(extent)
                else:
                    size -= extent.end - extent.begin
                    del order[extent]
            fresh = Extent(key, begin, end, now)
            order[fresh] = None
            extents[:] = [fresh, *kept]
            size += end - begin
        self._size[replica] = size
        if self.capacity is not None and size > self.capacity:
            self._shrink(replica, order, size - self.capacity)

    def _shrink(self, replica: int, order: OrderedDict[Extent, None], excess: int) -> None:
        """Forgets the blocks sent least recently."""
        self._size[replica] -= excess
        while excess:
            extent = next(iter(order))
            length = extent.end - extent.begin
            if length > excess:
                if self.leaf_first:
                    extent.end -= excess
                else:
                    extent.begin += excess
                return
            excess -= length
            del order[extent]
            self._extents.discard(extent, replica)
