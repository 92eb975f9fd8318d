"""Division of wide extents into one of each group.

Equal groups go together: a row of an extent has a block of each. That is exact as long as a row is found as a
whole. Once some of its blocks were taken and others not yet, another copy of its content may be found for the
former and what is left of it for the latter. Then every group has to go by itself.
"""

from __future__ import annotations

from bisect import insort

from pagecast.sim.core.memory.extent import Extent, Free
from pagecast.sim.core.memory.extent_pool import ExtentPool
from pagecast.sim.core.memory.layer_group import mark_of
from pagecast.sim.core.memory.table import Table


class Division:
    """Divides the extents of a pool; `tables` divides what holds them."""

    def __init__(self, pool: ExtentPool) -> None:
        self.pool = pool
        self._columns: dict[Extent, list[Extent]] = {}
        for extent in list(pool.findable_extents()):
            if extent.width > 1:
                pool.single_out(extent)
        self._divide_index(pool.index)
        self._divide_index(pool.spares)
        self._divide_order()
        self._divide_begun()

    def columns(self, extent: Extent) -> list[Extent]:
        """The extents of the single groups in the place of a wide one."""
        columns = self._columns.get(extent)
        if columns is None:
            columns = self._columns[extent] = [_column(extent, group) for group in range(extent.width)]
            if extent.rest is not None:
                for column, rest in zip(columns, self.columns(extent.rest), strict=True):
                    column.rest = rest
        return columns

    def tables(self, table: Table) -> list[Table]:
        """The tables of the single groups in the place of a wide one."""
        tables = []
        for group in range(table.width):
            one = Table(self.pool.nothing)
            one.tail = table.tail[group :: table.width]
            one.held = [(self.columns(extent)[group], length) for extent, length in table.held]
            one.nulls, one.places, one.stored = table.nulls, table.places, table.stored
            one.unasked = table.unasked
            tables.append(one)
        return tables

    def _divide_index(self, index: dict[bytes, list[Extent]]) -> None:
        for key, extents in list(index.items()):
            if extents[0].width > 1:
                del index[key]
                for extent in extents:
                    for column in self.columns(extent):
                        assert column.key is not None
                        index.setdefault(column.key, []).append(column)

    def _divide_order(self) -> None:
        ring = self.pool.ring
        free = ring.after
        ring.before = ring.after = ring
        while free is not ring:
            after = free.after
            if free.by_row:
                free.extents = [each for extent in free.extents for each in self._rows(extent, free)]
                self.pool.link(free)
            elif free.extents[0].width == 1:
                self.pool.link(free)
            else:
                for group in range(free.extents[0].width):
                    self._put([self.columns(extent)[group] for extent in free.extents])
            free = after

    def _rows(self, extent: Extent, free: Free) -> list[Extent]:
        if extent.width == 1:
            return [extent]
        columns = self.columns(extent)
        for column in columns:
            column.free = free
            column.free_rows = [free]
        return columns

    def _put(self, extents: list[Extent]) -> None:
        free = Free(extents)
        for extent in extents:
            extent.free = free
        self.pool.link(free)

    def _divide_begun(self) -> None:
        """Divides what remains of the rows that were begun: it is taken before all others.

        Blocks of begun rows go group by group: of the first groups all are gone, of one group some, of the
        others none. So each group gets a place of its own at the head of the ring. Within a group the last
        rows go first, which are those of `broken` in order, then of `unbroken` from its end.
        """
        pool = self.pool
        if not pool.begun:
            return
        first = pool.ring.after
        pool.ring.after = pool.ring.before = pool.ring
        width = (pool.unbroken or pool.broken)[0].width
        rows = sum([extent.rows for extent in [*pool.broken, *pool.unbroken]])
        taken = rows * width - len(pool.begun)
        for group in range(width):
            gone = min(max(taken - group * rows, 0), rows)  # rows that lack their block of this group
            for extent in pool.broken:
                column = _column(extent, group)
                kept = max(extent.rows - gone, 0)
                gone -= extent.rows - kept
                del column.blocks[kept:]
                column.holders = 0
                if column.blocks:
                    self._put([column])
                    self._index_broken(column)
            for extent in reversed(pool.unbroken):
                self._put([self.columns(extent)[group]])
        pool.begun = pool.no_blocks()
        pool.unbroken = []
        pool.broken = []
        while first is not pool.ring:
            after = first.after
            pool.link(first)
            first = after

    def _index_broken(self, extent: Extent) -> None:
        """Makes what remains of a group's part findable, ahead of the copies that replaced its rows.

        When its rows lost a block, their content was withdrawn, and spares took their place (`_replace`). By
        itself this group has lost nothing: its blocks were published before the copies. So the copies are
        cut to the numbers of the extent and become spares again, the oldest ones.
        """
        pool = self.pool
        assert extent.key is not None
        if extent.is_spare:
            pool.spares.setdefault(extent.key, []).append(extent)
            return
        siblings = pool.index.get(extent.key, [])
        for copy in list(siblings):
            if copy.end <= extent.number or extent.end <= copy.number:
                continue
            pool.single_out(copy)
            if copy.number < extent.number:
                copy = pool.split(copy, (extent.number - copy.number) // copy.units)
            if copy.end > extent.end:
                pool.split(copy, (extent.end - copy.number) // copy.units)
            siblings.remove(copy)
            copy.is_spare = True
            pool.spares.setdefault(extent.key, []).insert(0, copy)
        insort(pool.index.setdefault(extent.key, siblings), extent, key=lambda each: each.number)


def _column(extent: Extent, group: int) -> Extent:
    key = None
    if extent.key is not None:
        key = extent.key[:-2] + mark_of(extent.key[-2] + group, 1)
    column = Extent(extent.blocks[group :: extent.width], key, extent.number, extent.units)
    column.holders = extent.holders
    column.is_spare = extent.is_spare
    return column
