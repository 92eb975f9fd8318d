"""Key blocks of prompt attention, as tiled kernels count them."""

from __future__ import annotations

BLOCK = 128  # keys in a block, and query rows in a tile: the unit that coefficients are given in


def tile_rows(group: int) -> int:
    """Query tokens of a tile, which holds the heads of a group."""
    return max(1, BLOCK // group)


def chunk_tiles(group: int, tokens: int, context: int) -> float:
    """Tiles x key blocks of one prompt chunk on one KV head; halves stand for blocks cut by the mask."""
    rows = tile_rows(group)
    count = -(-tokens // rows)
    return count * (context + rows * (count + 1) / 2) / BLOCK + count / 2
