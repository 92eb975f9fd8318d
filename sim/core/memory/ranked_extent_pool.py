"""Pool of extents whose free blocks are taken by how often their content was reused.

A block that layers with full attention keep is reused by whoever reuses a later one of the same group, and
freed after it. So content that was reused less, and of equals what was freed first, never has to be kept for
what follows it. Orders that rank a prefix below its continuation (FIFO, priorities, cost) would need to know
what follows what across groups, which nothing here does.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pagecast.sim.core.events import EventLog
from pagecast.sim.core.memory.eviction_orders import ReuseOrder
from pagecast.sim.core.memory.extent import Extent, Free
from pagecast.sim.core.memory.extent_pool import ExtentPool
from pagecast.sim.core.memory.table import Leaver


class RankedExtentPool(ExtentPool):
    """`ExtentPool` with a ring for each level of an order; the lowest that is not empty is taken from first.

    A ring is enough: what is in it was freed in the order in which it was used.
    """

    brings_rows_together = False  # each row is reused, and so ranked, by itself

    def __init__(self, num_blocks: int, log: EventLog, order: ReuseOrder) -> None:
        super().__init__(num_blocks, log)
        self.order = order
        self._rings: dict[int, Free] = {0: self.ring}
        self._blocks: dict[int, int] = {}  # free blocks with content, of each rank that has some

    # ---- taking

    def _evict(self, n: int) -> array[int]:
        """Takes `n` blocks of free extents, the lowest rank first."""
        evicted = self.no_blocks()
        while len(evicted) < n:
            rank = min(self._blocks)
            count = min(n - len(evicted), self._blocks[rank])
            self.ring = self._rings[rank]
            evicted += super()._evict(count)
            self._count(rank, -count)
        return evicted

    def _count(self, rank: int, blocks: int) -> None:
        count = self._blocks.get(rank, 0) + blocks
        if count:
            self._blocks[rank] = count
        else:
            del self._blocks[rank]

    # ---- holding

    def hold(self, extents: list[Extent]) -> int:
        """Adds a holder to each of these extents. Returns how many blocks were held already."""
        for extent in extents:
            if not extent.holders:
                self._count(extent.rank, -len(extent.blocks))
            extent.uses += 1
        return super().hold(extents)

    def drop(self, extents: list[Extent], tail: array[int], width: int = 1) -> int:
        """Takes a holder from extents, and gives the blocks of `tail` back, as `ExtentPool.drop`."""
        shared = super().drop(extents, tail, width)
        if self.order.most_protected is not None:
            self._give_way(self.order.most_protected)
        return shared

    def join(self, extents: list[Extent]) -> list[Extent]:
        """Keeps extents apart, for each has its own uses."""
        return extents

    def _free(self, extents: list[Extent]) -> None:
        for extent in reversed(extents):
            extent.rank = self.order.level_of(extent.uses)
            self._put(extent)

    def _put(self, extent: Extent) -> None:
        """Puts an extent at the end of the free ones of its rank."""
        ring = self._rings.get(extent.rank)
        if ring is None:
            ring = self._rings[extent.rank] = Free([])
        self._count(extent.rank, len(extent.blocks))
        self.ring = ring
        extent.free = Free([extent])
        self.link(extent.free)

    def _give_way(self, most: int) -> None:
        """Takes the rank from the least recently freed of ranked extents, until few enough have one."""
        while (rank := max(self._blocks, default=0)) and self._blocks[rank] > most:
            extent = self._rings[rank].after.extents[-1]
            self._wake(extent)
            self._count(rank, -len(extent.blocks))
            extent.rank = 0
            self._put(extent)

    def drop_in_turn(self, leavers: Sequence[Leaver]) -> int:
        """Leaves all tables to the caller: blocks that leave a window are cut off and freed as any others."""
        return 0

    # ---- splitting and content

    def split(self, extent: Extent, at: int) -> Extent:
        """Cuts an extent in two at block `at` and returns the second part. The first stays what it was."""
        rest = super().split(extent, at)
        rest.uses, rest.rank = extent.uses, extent.rank
        return rest

    def cut_front(self, extent: Extent, rows: int) -> Extent:
        """Cuts the first rows off an extent that one table holds, and returns them."""
        front = super().cut_front(extent, rows)
        front.uses = extent.uses
        return front

    # ---- figures

    def _all_rings(self) -> list[Free]:
        return [self._rings[rank] for rank in sorted(self._rings)]
