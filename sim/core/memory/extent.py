"""Extents: neighbouring blocks of equal groups whose content is alike and that the same tables hold.

They are the pieces of the memory of hybrid models. There a request may give back the first of its blocks and
keep the others, so unlike a `Run` an extent is held as a whole or not at all, but for its first rows: what
concerns a part of it splits it first.
"""

from __future__ import annotations

from array import array


class Free:
    """Blocks in the order of free ones, between `before` and `after`.

    `by_row`: of each of `extents` its first row that is not free elsewhere. Otherwise all rows of all of
    them, which were freed together: column by column, in each the last row first.
    """

    __slots__ = ("after", "before", "by_row", "extents")

    def __init__(self, extents: list[Extent], *, by_row: bool = False) -> None:
        self.extents = extents
        self.by_row = by_row
        self.before: Free = self
        self.after: Free = self


NO_ROWS: list[Free] = []
"""The `free_rows` of an extent that has none; never changed."""


class Extent:
    """Rows of `width` blocks, one of each group: row i ends with key block `number + i * units` of a segment.

    `key` is that of the segment and the groups; None: the content can't be found. `holders`: how many tables
    hold it; 0: it is free, and `free` has its place. Its only holder may have given back its first rows one
    by one: `free_rows` has the place of each of them, and nobody holds them. `is_spare`: another extent of
    equal content is found in its place. `rest` is what was split off its end while a table held both; it
    counts only for entries of tables that are longer than the extent, and may be out of date otherwise.
    `uses` counts the tables that reused it, and `rank` is its place among free ones, where that decides what
    is evicted.
    """

    __slots__ = (
        "blocks",
        "free",
        "free_rows",
        "holders",
        "is_spare",
        "key",
        "number",
        "rank",
        "rest",
        "units",
        "uses",
        "width",
    )

    def __init__(
        self, blocks: array[int], key: bytes | None, number: int, units: int, width: int = 1
    ) -> None:
        self.blocks = blocks
        self.key = key
        self.number = number
        self.units = units
        self.width = width
        self.holders = 1
        self.is_spare = False
        self.rest: Extent | None = None
        self.free: Free | None = None
        self.free_rows = NO_ROWS
        self.uses = 0
        self.rank = 0

    @property
    def rows(self) -> int:
        """Rows, with those that were given back one by one."""
        return len(self.blocks) // self.width

    @property
    def length(self) -> int:
        """Rows without those that were given back one by one."""
        return len(self.blocks) // self.width - len(self.free_rows)

    @property
    def end(self) -> int:
        """The number that a further row would have."""
        return self.number + len(self.blocks) // self.width * self.units

    def column(self, group: int) -> array[int]:
        """The blocks of one group, without those that were given back one by one."""
        return self.blocks[len(self.free_rows) * self.width + group :: self.width]
