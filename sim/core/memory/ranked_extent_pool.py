"""Pool of extents whose free blocks are taken in an order of their own: by rank, by tenant, by retention.

A block that layers with full attention keep may be ranked below those that follow it, which nobody could find
without it. So extents form trees there (`rooted`), and of a tree only leaves are taken. What layers with
windows keep is found without what precedes it, and is taken in any order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from pagecast.sim.core.events import EventLog
from pagecast.sim.core.memory.blocks import last_first
from pagecast.sim.core.memory.eviction import Eviction
from pagecast.sim.core.memory.extent import Extent
from pagecast.sim.core.memory.extent_pool import ExtentPool
from pagecast.sim.core.memory.table import Leaver
from pagecast.sim.core.memory.tenant_ledger import TenantLedger


class RankedExtentPool(ExtentPool):
    """`ExtentPool` with an `Eviction` in the place of the ring. All extents have blocks of one group."""

    brings_rows_together = False  # each row is reused, and so ranked, by itself

    def __init__(
        self,
        num_blocks: int,
        log: EventLog,
        eviction: Eviction,
        *,
        ledger: TenantLedger | None = None,
        numbered: bool = True,
    ) -> None:
        blanks_first = eviction.blanks_first
        super().__init__(
            num_blocks, log, numbered=numbered, blanks_first=blanks_first, ledger=ledger, rooted=True
        )
        self._most_owed = 0  # the order changes with each block that is held or freed
        self.eviction = eviction

    def _evict(self, n: int) -> array[int]:
        """Takes `n` blocks of free extents in the order's turn."""
        eviction = self.eviction
        next_extent = eviction.nexts()
        evicted = self.no_blocks()
        while n:
            extent = next_extent()
            count = min(eviction.at_once(extent), n)
            n -= count
            evicted += self._take_end(extent, count)
        return evicted

    # ---- holding

    def hold(self, extents: list[Extent]) -> int:
        for extent in extents:
            extent.uses += 1
        return super().hold(extents)

    def _wake(self, extent: Extent) -> None:
        self.eviction.remove(extent)

    def _free(self, extents: list[Extent]) -> None:
        for extent in reversed(extents):
            self.eviction.add(extent)

    def join(self, extents: list[Extent]) -> list[Extent]:
        """Keeps extents apart, for each has its own uses."""
        return extents

    def drop_in_turn(self, leavers: Sequence[Leaver]) -> int:
        """Leaves all tables to the caller: blocks that leave a window are cut off and freed as any others."""
        return 0

    def _split_free(self, extent: Extent, rest: Extent) -> None:
        self.eviction.add_beside(rest, extent)

    # ---- figures

    def free_extents(self) -> Iterator[Extent]:
        yield from self.eviction

    def free_order(self) -> Iterator[int]:
        yield from reversed(self.blanks)
        for extent in self.eviction:
            yield from last_first(extent.blocks, 1)
