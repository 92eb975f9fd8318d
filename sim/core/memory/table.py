"""Block table of one request in one group of layers."""

from __future__ import annotations

from pagecast.sim.core.memory.extent import Extent


class Table:
    """The null block in the first `nulls` of `places` places, then the blocks of `held`, then `tail`.

    `held` are extents, each with the number of blocks held of it and of what was split off it since. The
    blocks of `tail` are the request's own, and nobody can find them yet. The first `stored` places need no
    publishing any more: they are published, null, or of no use to any hit.
    """

    __slots__ = ("held", "nulls", "places", "stored", "tail")

    def __init__(self) -> None:
        self.held: list[tuple[Extent, int]] = []
        self.tail: list[int] = []
        self.nulls = 0
        self.places = 0
        self.stored = 0

    def extents(self) -> list[Extent]:
        """Its extents in order."""
        extents: list[Extent] = []
        for first, length in self.held:
            extent: Extent | None = first
            while length:
                assert extent is not None
                extents.append(extent)
                length -= len(extent.blocks)
                extent = extent.rest
        return extents

    def blocks(self) -> list[int]:
        """The blocks after the null ones, in order."""
        blocks: list[int] = []
        for extent in self.extents():
            blocks += extent.blocks
        return blocks + self.tail

    def last_block(self) -> int:
        """The newest block."""
        return self.tail[-1] if self.tail else self.extents()[-1].blocks[-1]

    def first_unknown(self, last: int) -> int:
        """The first of its first `last` places whose block can't be found."""
        place = self.nulls
        for extent in self.extents():
            if extent.key is None:
                break
            place += len(extent.blocks)
        return min(place, last)

    def add(self, extents: list[Extent]) -> None:
        """Adds extents that it holds from now on."""
        for extent in extents:
            self.held.append((extent, len(extent.blocks)))

    def cut_to(self, extents: list[Extent]) -> None:
        """Leaves these of its extents, which are its last."""
        self.held = []
        self.add(extents)
