"""Block tables of one request, one for each of the groups of layers that keep the same tokens."""

from __future__ import annotations

from array import array

from pagecast.sim.core.memory.blocks import by_row
from pagecast.sim.core.memory.extent import Extent, Origin
from pagecast.sim.core.request import Request

_LONG = 1 << 62


class Table:
    """The null block in the first `nulls` of `places` places, then the rows of `held`, then those of `tail`.

    A row has `width` blocks, one of each group. `held` are extents, each with the number of rows held of it
    and of what was split off it since. The blocks of `tail` are the request's own, and nobody can find them;
    a tail is replaced, never changed. The first `stored` places need no publishing any more: they are
    published, null, or of no use to any hit. No hit ever asks for the places from `unasked` on. `origin` is
    what its extents note of the request, where they do; `rooted`: they form a tree.
    """

    __slots__ = (
        "_nothing",
        "held",
        "nulls",
        "origin",
        "places",
        "rooted",
        "stored",
        "tail",
        "unasked",
        "width",
    )

    def __init__(self, nothing: array[int], width: int = 1) -> None:
        self.width = width
        self._nothing = nothing  # an empty tail
        self.held: list[tuple[Extent, int]] = []
        self.tail = nothing
        self.nulls = 0
        self.places = 0
        self.stored = 0
        self.unasked = _LONG
        self.origin: Origin | None = None
        self.rooted = False

    @property
    def first_of_tail(self) -> int:
        """The place of the first row of its tail."""
        return self.places - len(self.tail) // self.width

    def last_extent(self) -> Extent:
        """Its last extent. It has one."""
        extent, length = self.held[-1]
        while extent.rest is not None and length > extent.length:
            length -= extent.length
            extent = extent.rest
        return extent

    def extents(self) -> list[Extent]:
        """Its extents in order."""
        extents: list[Extent] = []
        for extent, length in self.held:
            extents.append(extent)
            while extent.rest is not None and length > extent.length:
                length -= extent.length
                extent = extent.rest
                extents.append(extent)
        return extents

    def blocks(self, group: int = 0) -> list[int]:
        """The blocks of one of its groups after the null ones, in order."""
        blocks: list[int] = []
        for extent in self.extents():
            blocks += extent.column(group)
        return blocks + self.tail[group :: self.width].tolist()

    def by_place(self, null: int, group: int = 0) -> list[int]:
        """The blocks of one of its groups in all places; `null` stands where there is none."""
        return [null] * self.nulls + self.blocks(group)

    def last_block(self, group: int = 0) -> int:
        """The newest block of one of its groups."""
        return self.tail[group - self.width] if self.tail else self.extents()[-1].blocks[group - self.width]

    def first_unknown(self, last: int) -> int:
        """The first of its first `last` places whose block can't be found."""
        place = self.nulls
        for extent in self.extents():
            if extent.key is None:
                break
            place += extent.length
        return min(place, last)

    def add_rows(self, blocks: array[int], rows: int) -> None:
        """Adds rows to the end of `tail`; the blocks come group by group."""
        if self.width > 1:
            blocks = by_row(blocks, self.width)
        self.places += rows
        self.tail = self.tail + blocks if self.tail else blocks

    def take_tail(self, rows: int) -> array[int]:
        """Takes the first rows off `tail`."""
        taken = self.tail
        size = rows * self.width
        if size >= len(taken):
            self.tail = self._nothing
            return taken
        self.tail = taken[size:]
        return taken[:size]

    def add(self, extents: list[Extent]) -> None:
        """Adds extents that it holds from now on."""
        for extent in extents:
            self.held.append((extent, len(extent.blocks) // self.width - len(extent.free_rows)))

    def cut_to(self, extents: list[Extent]) -> None:
        """Leaves these of its extents, which are its last."""
        self.held = []
        self.add(extents)


class Tables:
    """One request's block tables, in the order of the memory's `groups`.

    `pending` rows are taken for it but are not in its tables yet: a row has a block for each group that
    grows. `blocks` has them row by row, where blocks have numbers.
    """

    __slots__ = ("blocks", "by_group", "pending", "published")

    def __init__(self, by_group: list[Table], nothing: array[int]) -> None:
        self.by_group = by_group
        self.published = 0  # of so many tokens every full block is published; 0 makes a publisher look again
        self.pending = 0
        self.blocks = nothing


Leaver = tuple[Request, Table, int, int]
"""A table some of whose rows leave its window: `(request, table, number, null rows)`.

`number` is the table's among its request's tables. So many of its rows are null then. A plain tuple, as very
many are made.
"""
