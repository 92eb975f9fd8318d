"""Eviction by rank: of all extents that no other free block depends on, the first in an `EvictionOrder`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from pagecast.sim.core.memory.eviction import TimedEviction
from pagecast.sim.core.memory.eviction_orders import EvictionOrder
from pagecast.sim.core.memory.extent import Extent
from pagecast.sim.core.memory.retention_clock import RetentionClock

_PARKED = -1
_SPARE = 64  # stale entries that a heap may always have


class RankedEviction(TimedEviction):
    """A heap of free extents by the level that `order` gives them; of equal levels, the oldest goes first.

    Only leaves are evicted: an extent that free blocks follow in the tree is parked, and put back when one of
    them is gone. Blocks without content are taken before all others. Every operation is O(log extents),
    amortised.
    """

    def __init__(self, order: EvictionOrder, *, blanks_first: bool = True) -> None:
        self.blanks_first = blanks_first
        self.order = order
        self.gains = order.gains
        self.clock = RetentionClock() if order.keeps_retention else None
        self._most_protected = order.most_protected
        self._protected: dict[Extent, int] = {}  # oldest first, with the sizes they were freed with
        self._protected_blocks = 0
        self._blank: dict[Extent, None] = {}  # without content, in the order in which they go
        # Level, when it became free, number of the entry. An extent's other entries are stale.
        self._heap: list[tuple[float, int, int, Extent]] = []
        self._entries: dict[Extent, int] = {}  # the number of each extent's entry, or _PARKED
        self._count = 0

    # ---- adding and removing

    def add(self, extent: Extent) -> None:
        """Adds an extent where its level puts it; one without content behind the others of this kind."""
        if extent.key is not None:
            self._rank(extent)
        else:
            self._blank[extent] = None

    def add_beside(self, extent: Extent, whole: Extent) -> None:
        self._push(extent, whole.level, whole.used)
        self.order.divided(extent, whole)
        if self.clock is not None:
            self.clock.divide(extent, whole)

    def remove(self, extent: Extent) -> None:
        if self._entries.pop(extent, None) is None:
            del self._blank[extent]
            return
        if self._protected:
            self._protected_blocks -= self._protected.pop(extent, 0)
        self.order.removed(extent)
        if self.clock is not None:
            self.clock.remove(extent)
        if extent.parent is not None:
            self.wake((extent.parent,))

    # ---- taking

    def nexts(self) -> Callable[[], Extent]:
        return self.next

    def next(self) -> Extent:
        """The extent without content that was added first, or the evictable extent with the lowest level."""
        for blank in self._blank:
            return blank
        extent = self.first()
        if extent is None:
            self.wake_all()
            extent = self.first()
        assert extent is not None
        return extent

    def first(self) -> Extent | None:
        """The evictable extent with the lowest level; None where all wait for those of other orders."""
        heap, entries = self._heap, self._entries
        while heap:
            level, _, number, extent = heap[0]
            if entries.get(extent) != number:
                heapq.heappop(heap)
                continue
            if extent.children and not extent.evictable():
                heapq.heappop(heap)
                entries[extent] = _PARKED
                continue
            if not self.gains:
                return extent
            now = self.order.level_now(extent, level)
            if now is None:
                return extent
            self._push(extent, now, self._count)
            heap = self._heap
        return None

    def at_once(self, extent: Extent) -> int:
        """As many as may be evicted before the extent's level changes."""
        most = extent.evictable()
        return self.order.at_once(extent, most) if self.gains else most

    def __iter__(self) -> Iterator[Extent]:
        yield from self._blank
        yield from self._entries

    # ---- levels

    def _rank(self, extent: Extent) -> None:
        """Puts an extent where its level puts it that becomes free now."""
        extent.used = self._count
        level = self.order.level(extent)
        if self.clock is not None:
            self.clock.add(extent, self.now)
        if self._most_protected is not None and level > 0:
            level = self._protect(extent, level, self._most_protected)
        self._push(extent, level, self._count)

    def _protect(self, extent: Extent, level: float, most: int) -> float:
        """Protects an extent and lets the oldest fall to level 0, until at most `most` blocks are above it.

        Returns the extent's level.
        """
        size = extent.rows
        self._protected[extent] = size
        self._protected_blocks += size
        while self._protected_blocks > most:
            oldest = next(iter(self._protected))
            self._protected_blocks -= self._protected.pop(oldest)
            if oldest is extent:
                return 0
            self._push(oldest, 0, self._count)
        return level

    # ---- the heap

    def _push(self, extent: Extent, level: float, used: int) -> None:
        if len(self._heap) > 2 * len(self._entries) + _SPARE:
            self._sweep()
        self._count += 1
        self._entries[extent] = self._count
        extent.level = level
        extent.used = used
        heapq.heappush(self._heap, (level, used, self._count, extent))

    def wake(self, extents: Iterable[Extent]) -> None:
        """Puts parked extents back: what followed them may be gone."""
        for extent in extents:
            if self._entries.get(extent) == _PARKED:
                self._push(extent, extent.level, extent.used)

    def wake_all(self) -> None:
        """Puts every parked extent back."""
        self.wake(list(self._entries))

    def _sweep(self) -> None:
        """Drops entries of extents that are gone, or have another entry."""
        self._heap = [entry for entry in self._heap if self._entries.get(entry[3]) == entry[2]]
        heapq.heapify(self._heap)

    # ---- retention that ends with time

    @property
    def timed(self) -> TimedEviction | None:
        return None if self.clock is None else self

    @property
    def due_ns(self) -> int:
        assert self.clock is not None
        return self.clock.due_ns

    def expired(self) -> Extent | None:
        assert self.clock is not None
        return self.clock.expired(self.now)

    def revert(self, extent: Extent) -> None:
        assert self.clock is not None
        self.clock.revert(extent)
        self._rank(extent)

    def figures(self) -> dict[str, object]:
        return self.order.figures() if self.clock is None else self.clock.figures()
