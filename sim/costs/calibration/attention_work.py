"""The share of a GPU that attention keeps busy: tiles, waves, and the longest sequence.

FlashAttention 3 cuts a step's attention into tiles of 128 query rows (the heads of a group packed) by one
sequence's keys, walks them in blocks of 128 keys, and hands them to the SMs in order of request. Long
sequences of a decode batch are split so that no piece exceeds 1.1 times an SM's even share; beside a long
prompt chunk nothing is split (its `prepare_varlen_num_blocks` and `num_splits_heuristic`). What follows are
closed forms of that schedule, checked against a simulation of it over lognormal contexts and over those of
`azure_conv_repeat2`: an SM left alone runs at most twice as fast as its share of the memory allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pagecast.sim.costs.calibration.shape import TileShape

Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", float, Floats)

BLOCK = 128  # keys in a block, and query rows in a tile
EVEN_TOKENS = 64  # a batch is even when its longest context exceeds the mean by less than this
LONGEST_TILE = 0.36  # of the longest tile's time is not hidden behind other tiles
MOST_IMBALANCE = 0.15  # splitting long sequences keeps the idle share below this
SHARE = 1.1  # of an SM's even share, the longest piece of a split sequence
# Of our own prefill kernel: the most pieces waiting to be merged, of an SM and of a head, the least key
# blocks of a piece, and what merging a round of pieces costs in key blocks.
PIECES_PER_SM, MOST_PIECES, LEAST_PIECE, MERGING = 2, 80, 2, 3
ALONE = 2.0  # how much faster an SM reads when few others do
# Of our own decode kernel on an H200, with KV of 128 dimensions: tokens x KV heads that a step reads before
# memory streams at its full rate, and those of a shared prefix of which half the readers find in the cache.
STREAMING, CACHED = 196_608, 8_192
LIGHT = 2_048  # tokens of a step that leaves a GPU half of what it gains by a rest


def imbalance_cap(shape: TileShape, n: Floats) -> Floats:
    """The most that idle SMs add to a decode batch of `n` requests, as a share of its work.

    With few requests every sequence is split finely and nothing is lost; the loss is in full once the
    tiles of whole sequences are about a third of the SMs.
    """
    waves = shape.kv_heads * n / shape.sms
    return MOST_IMBALANCE * np.clip((waves - 0.18) / 0.18, 0.0, 1.0)


def tail_tokens(shape: TileShape) -> float:
    """Context tokens whose reading takes as long as what shows of one token of the longest sequence."""
    return LONGEST_TILE * shape.sms / shape.kv_heads


def even_waves(shape: TileShape, n: int) -> float:
    """Time over work of a decode batch whose `n` contexts are equal: the last wave is seldom full."""
    pieces = max(1, -int(-shape.sms // (SHARE * shape.kv_heads * n)))
    tiles = n * shape.kv_heads * pieces
    full, rest = divmod(tiles, shape.sms)
    last = max(1.0 / ALONE, rest / shape.sms) if rest else 0.0
    return (full + last) * shape.sms / tiles


def spread_tokens(shape: TileShape, n: Floats, ctx: Floats, longest: Floats) -> Floats:
    """Context tokens to add for uneven sequences: the longest one's tail, or the cap where that is less."""
    mean = ctx / np.maximum(n, 1.0)
    return np.minimum(imbalance_cap(shape, n) * ctx, tail_tokens(shape) * (longest - mean))


def first_tokens(shape: TileShape) -> int:
    """Context tokens of a decode step that are read before memory streams: each costs somewhat more."""
    return STREAMING // shape.kv_heads


def short_share(shape: TileShape, shared: Number, n: Number) -> Number:
    """How much of what `n` decoding requests share is in a cache, by the mean length of their prefixes.

    `shared` counts the context tokens that stand in another one's blocks too.
    """
    others = (n > 2) * (n - 2) + 1  # n - 1, and at least one
    prefix = shared / others * shape.kv_heads / CACHED
    return 1 / (1 + prefix**2)


def light_share(tokens: Number) -> Number:
    """How far a step of so many tokens leaves a GPU its clocks: attention is faster in such steps."""
    return 1 / (1 + (tokens / LIGHT) ** 2)


def chunk_tiles(shape: TileShape, tokens: Number, context: Number) -> Number:
    """Tiles x key blocks of one prompt chunk on one KV head; halves stand for blocks cut by the mask."""
    rows = max(1, BLOCK // shape.group)
    count = -(-tokens // rows)
    return count * (context + rows * (count + 1) / 2) / BLOCK + count / 2


def prompt_span(shape: TileShape, chunks: Sequence[tuple[int, int]]) -> float:
    """Key blocks that the busiest SM walks in our own kernel: chunks of (tokens, context).

    One program an SM takes every n-th of a step's (piece, KV head) pairs, most keys first, so that the first
    of them has the most to do: every share of the work is rounded up. Tiles are cut in pieces where they
    would leave SMs idle (`prompt_pieces`).
    """
    blocks = np.sort(prompt_pieces(shape, chunks))[::-1]
    turns = np.arange(-(-len(blocks) * shape.kv_heads // shape.sms))
    return float(blocks[turns * shape.sms // shape.kv_heads].sum())


def prompt_pieces(shape: TileShape, chunks: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Key blocks of each piece of prompt attention on one KV head, as `kernels.prefill_plan` cuts them."""
    rows = max(1, BLOCK // shape.group)
    tiles = np.concatenate([_tile_blocks(tokens, context, rows) for tokens, context in chunks])
    cuts = _cuts(tiles, shape.kv_heads, shape.sms)
    tile = np.repeat(np.arange(len(tiles)), cuts)
    nth = np.arange(len(tile)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    return np.asarray((nth + 1) * tiles[tile] // cuts[tile] - nth * tiles[tile] // cuts[tile], np.int64)


def _cuts(tiles: npt.NDArray[np.int64], kv_heads: int, sms: int) -> npt.NDArray[np.int64]:
    """Into how many pieces each tile is cut: where no tile exceeds an even share, only those of the last
    round of the SMs, else any, all to the greatest length with which attention and merging end first."""
    cuts = np.ones_like(tiles)
    most = min(PIECES_PER_SM * sms // kv_heads, MOST_PIECES)
    if most < 2:
        return cuts
    among = np.arange(len(tiles))
    if int(tiles.max()) * sms <= int(tiles.sum()) * kv_heads:
        among = np.argsort(-tiles, kind="stable")[len(tiles) // (sms // kv_heads) * (sms // kv_heads) :]
    mine = tiles[among]
    longest = int(mine.max(initial=0))
    if min(most, longest // LEAST_PIECE) < 2:
        return cuts
    greatest = -(-longest // np.arange(1, min(most, longest // LEAST_PIECE) + 1))
    pieces = -(-mine // greatest[:, None])
    number = pieces.sum(1)
    waiting = number - (pieces == 1).sum(1)
    rounds = -(-number * kv_heads // sms) * (greatest + 1)
    shared = -(-(mine.sum() + number) * kv_heads // sms) + greatest + 1
    merging = np.where(waiting > 0, 1, 0) + -(-MERGING * waiting * kv_heads // sms)
    cost = np.where(waiting <= most, np.minimum(rounds, shared) + merging, np.iinfo(np.int64).max)
    cuts[among] = pieces[np.argmin(cost)]
    return cuts


def _tile_blocks(tokens: int, context: int, rows: int) -> npt.NDArray[np.int64]:
    """Key blocks of each tile of a chunk, most first."""
    ends = np.minimum(np.arange(rows, tokens + rows, rows), tokens) + context
    return np.asarray(-(-ends[::-1] // BLOCK), np.int64)


def splits_beside(shape: TileShape, chunk_tokens: Any) -> Any:
    """Whether sequences are still split beside a prompt chunk of this many tokens (a number or an array)."""
    return shape.kv_heads * -(-chunk_tokens // max(1, BLOCK // shape.group)) < 0.8 * shape.sms
