"""Extents: neighbouring blocks of one group whose content is alike and that the same tables hold.

They are the pieces of the memory of hybrid models. There a request may give back the first of its blocks and
keep the others, so unlike a `Run` an extent is held as a whole or not at all: what concerns a part of it
splits it first.
"""

from __future__ import annotations


class Extent:
    """`blocks[i]` ends with the key block `number + i * units` of the segment `key`.

    `key` None: the content can't be found. `holders`: how many tables hold it; 0: it is free. `is_spare`:
    another extent of equal content is found in its place. `rest` is what was split off its end while tables
    held both. `before` and `after` are its neighbours in the order of free extents. `uses` counts the tables
    that reused it, and `rank` is its place among free ones, where that decides what is evicted.
    """

    __slots__ = (
        "after",
        "before",
        "blocks",
        "holders",
        "is_spare",
        "key",
        "number",
        "rank",
        "rest",
        "units",
        "uses",
    )

    def __init__(self, blocks: list[int], key: bytes | None, number: int, units: int) -> None:
        self.blocks = blocks
        self.key = key
        self.number = number
        self.units = units
        self.holders = 1
        self.is_spare = False
        self.rest: Extent | None = None
        self.uses = 0
        self.rank = 0
        self.before: Extent = self
        self.after: Extent = self

    @property
    def end(self) -> int:
        """The number that a further block would have."""
        return self.number + len(self.blocks) * self.units
