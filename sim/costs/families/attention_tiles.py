"""Key blocks of prompt attention, as tiled kernels count them, and the tiles of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 128  # keys in a block, and query rows in a tile: the unit that coefficients are given in


@dataclass(frozen=True)
class Tiles:
    """Tiles of a kernel that computes prompts and decoding requests together.

    `rows`: query rows of a tile; `packed`: whether the query heads of a group fill rows of one tile.
    `exposed`: of decoding requests beside prompts, the share of the shorter of reading their contexts and
    computing their tiles that the longer does not hide. In a step whose longest chunk has no more than
    `narrow_rows` rows, tiles have that many; 0 where the kernel knows one size alone.
    """

    rows: int
    packed: bool
    exposed: float
    narrow_rows: int = 0

    def tokens(self, group: int) -> int:
        """Query tokens that fill a tile."""
        return max(1, self.rows // group) if self.packed else self.rows


def tile_rows(group: int) -> int:
    """Query tokens of a tile, which holds the heads of a group."""
    return max(1, BLOCK // group)


def chunk_tiles(group: int, tokens: int, context: int) -> float:
    """Tiles x key blocks of one prompt chunk on one KV head; halves stand for blocks cut by the mask."""
    rows = tile_rows(group)
    count = -(-tokens // rows)
    return count * (context + rows * (count + 1) / 2) / BLOCK + count / 2
