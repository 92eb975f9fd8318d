"""Retention that ends with time: the priorities of free extents, and how long they last (TensorRT-LLM)."""

from __future__ import annotations

import heapq
from collections import Counter

from pagecast.sim.core.memory.extent import Extent
from pagecast.sim.core.retention import DEFAULT_PRIORITY, FOREVER


class RetentionClock:
    """The free extents with content, with the priority of each and when it ends.

    A priority with a duration ends so long after its blocks became free.
    """

    def __init__(self) -> None:
        self.evicted: Counter[int] = Counter()  # blocks by priority
        self.reverted_blocks = 0
        self._expiring: list[tuple[int, int, Extent]] = []  # a heap: when, number, extent
        self._count = 0
        # Priority, end in the sequence, and number of the entry in `_expiring` (0: it lasts).
        self._freed: dict[Extent, tuple[int, int, int]] = {}

    def add(self, extent: Extent, now: int) -> None:
        """Adds an extent that becomes free now."""
        keep = extent.keep
        priority = extent.priority
        entry = 0
        if keep is not None and keep.duration_ns is not None and priority != DEFAULT_PRIORITY:
            entry = self._push(now + keep.duration_ns, extent)
        self._freed[extent] = (priority, extent.end, entry)

    def divide(self, part: Extent, extent: Extent) -> None:
        """Adds an extent with the retention of the one it was cut off."""
        priority, end, entry = self._freed[extent]
        self._freed[extent] = (priority, part.start, entry)
        if entry:
            due = next(due for due, number, _ in self._expiring if number == entry)
            entry = self._push(due, part)
        self._freed[part] = (priority, end, entry)

    def remove(self, extent: Extent) -> None:
        """Takes an extent out. What was evicted of it, its end, is counted."""
        priority, end, _ = self._freed.pop(extent)
        evictions = end - extent.end
        if evictions:
            self.evicted[priority] += evictions

    def revert(self, extent: Extent) -> None:
        """Takes an extent out whose retention has ended."""
        self.remove(extent)
        self.reverted_blocks += extent.rows

    def _push(self, due_ns: int, extent: Extent) -> int:
        self._count += 1
        heapq.heappush(self._expiring, (due_ns, self._count, extent))
        return self._count

    @property
    def due_ns(self) -> int:
        """When the next priority ends; far in the future where none does."""
        expiring = self._expiring
        while expiring and self._freed.get(expiring[0][2], (0, 0, 0))[2] != expiring[0][1]:
            heapq.heappop(expiring)
        return expiring[0][0] if expiring else FOREVER

    def expired(self, now: int) -> Extent | None:
        """An extent whose priority has ended by now; None: there is none."""
        return self._expiring[0][2] if self.due_ns <= now else None

    def figures(self) -> dict[str, object]:
        """Evicted blocks by priority, and blocks whose priority ended before they were evicted."""
        evicted = {str(priority): count for priority, count in sorted(self.evicted.items())}
        return {"evicted_by_priority": evicted, "reverted_blocks": self.reverted_blocks}
