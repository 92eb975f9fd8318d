"""Extents: neighbouring blocks of equal groups whose content is alike and that the same tables hold.

A request may give back the first of its blocks and keep the others (windows), and share its first blocks with
some requests and more of them with others. So an extent is held as a whole or not at all, but for its first
rows: what concerns a part of it splits it first.

Where an order of eviction needs to know what follows what, extents of layers that keep every token form
trees: an extent's parent holds the block before its first one.
"""

from __future__ import annotations

from array import array

from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.retention import DEFAULT_PRIORITY, BlockRange, Keep


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


class Origin:
    """What is known of the request that writes extents, where tenants, retention or trees need it.

    `retention` is what was asked for its blocks, if anything, and `tenant` the one that pays for them.
    `made`: when the first block of each of its segments was taken, by the segment's number.
    """

    __slots__ = ("keys", "made", "retention", "tenant")

    def __init__(self, keys: BlockKeys, retention: tuple[BlockRange, ...] | None, tenant: str) -> None:
        self.keys = keys
        self.retention = retention
        self.tenant = tenant
        self.made: dict[int, int] = {}

    def kept_alike(self, block: int, end: int) -> int:
        """Where the blocks from one on end, at `end` at most, that have the same retention."""
        for first, last, _ in self.retention or ():
            if first <= block < last:
                return min(end, last)
        return end

    def keep_at(self, block: int) -> Keep | None:
        """The retention of a block, by its number."""
        for first, end, keep in self.retention or ():
            if first <= block < end:
                return keep
        return None


class Extent:
    """Rows of `width` blocks, one of each group: row i ends with key block `number + i * units` of a segment.

    `key` is that of the segment and the groups; None: the content can't be found. `holders`: how many tables
    hold it; 0: it is free, and in `free`. Its only holder may have given back its first rows one
    by one: `free_rows` has the `Free` of each of them, and nobody holds them. `is_spare`: another extent of
    equal content is found in its place. `rest` is what was split off its end while a table held both; it
    counts only for entries of tables that are longer than the extent, and may be out of date otherwise.
    `uses` counts the tables that reused it.

    Where it is `in_tree` it has `parent` and `children`, and `is_rest`: it was split off its parent's end.
    `origin` is the request that wrote it, `made` when, `keep` the retention that is asked for it; where
    nobody asks for these they are None and 0. `level` and `used` are its rank in a heap while it is free
    (`RankedEviction`).
    """

    __slots__ = (
        "blocks",
        "children",
        "free",
        "free_rows",
        "holders",
        "in_tree",
        "is_rest",
        "is_spare",
        "keep",
        "key",
        "level",
        "made",
        "number",
        "origin",
        "parent",
        "rest",
        "units",
        "used",
        "uses",
        "width",
    )

    level: float
    used: int

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
        self.origin: Origin | None = None
        self.parent: Extent | None = None
        self.children: dict[Extent, None] | None = None
        self.in_tree = False
        self.is_rest = False
        self.keep: Keep | None = None
        self.made = 0

    @property
    def rows(self) -> int:
        """Rows, with those that were given back one by one."""
        return len(self.blocks) // self.width

    @property
    def length(self) -> int:
        """Rows without those that were given back one by one."""
        return len(self.blocks) // self.width - len(self.free_rows)

    @property
    def start(self) -> int:
        """The number of its first row."""
        return self.number

    @property
    def end(self) -> int:
        """The number that a further row would have."""
        return self.number + len(self.blocks) // self.width * self.units

    @property
    def priority(self) -> int:
        """Its retention priority."""
        return DEFAULT_PRIORITY if self.keep is None else self.keep.priority

    @property
    def tenant(self) -> str:
        """The tenant that computed it; empty for content that all may share."""
        origin = self.origin
        return "" if origin is None or self.number < origin.keys.public_blocks else origin.tenant

    def part(self, blocks: array[int], number: int) -> Extent:
        """An extent of some of its rows, from `number` on, held once."""
        part = Extent(blocks, self.key, number, self.units, self.width)
        part.is_spare = self.is_spare
        part.uses = self.uses
        if self.origin is not None:
            part.origin, part.keep, part.made = self.origin, self.keep, self.made
        return part

    def column(self, group: int) -> array[int]:
        """The blocks of one group, without those that were given back one by one."""
        return self.blocks[len(self.free_rows) * self.width + group :: self.width]

    # ---- the tree

    def follow(self, parent: Extent) -> None:
        """Makes it a child of the extent that holds the block before its first one."""
        self.parent = parent
        if parent.children is None:
            parent.children = {self: None}
        else:
            parent.children[self] = None

    def leave_tree(self) -> None:
        """Takes it out, for its content is gone; its children, if any are held still, become roots."""
        if self.parent is not None:
            assert self.parent.children is not None
            del self.parent.children[self]
            self.parent = None
        if self.children:
            for child in self.children:
                child.parent = None
            self.children = None

    def shed_children(self) -> None:
        """Makes roots of children that follow blocks it no longer has.

        They were held, but not with it: their holder holds a copy of its content.
        """
        children = self.children or {}
        for child in [child for child in children if child.number > self.end]:
            del children[child]
            child.parent = None

    def move_children(self, rest: Extent) -> None:
        """Gives `rest`, just cut off its end, the children that follow those blocks, and follows with it."""
        if self.children:
            later = [child for child in self.children if child.number > rest.number]
            for child in later:
                del self.children[child]
                child.parent = rest
            if later:
                rest.children = dict.fromkeys(later)
        rest.is_rest = True
        rest.follow(self)

    def evictable(self) -> int:
        """How many blocks, from its end, can be taken without cutting off cached blocks that follow.

        A free block that follows in the tree could never be found again. Blocks that somebody holds do not
        count: their holder holds all that precedes them as well.
        """
        if not self.children:
            return len(self.blocks) // self.width
        low = self.number
        end = self.end
        for child in self.children:
            if child.blocks and not child.holders and child.number > low:
                low = child.number
                if low >= end:
                    return 0
        return (end - low) // self.units
