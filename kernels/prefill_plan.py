"""The plan of a step's prefill attention: who computes which tile, and which of its keys.

A tile is a few new tokens of one sequence, under all query heads of one KV head. Where tiles are fewer than
multiprocessors, or their number fills the last round of them badly, their keys are cut into pieces, which
`merge_pieces` brings together. Made on the host once a step; every layer uses the same plan.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

COLUMNS = 8
KV_TILE = 128
"""Pieces begin at multiples of so many keys, and work is counted in them."""

SHORT_KEYS = 1536
"""Up to so many keys per sequence small KV tiles are faster: they waste less on the diagonal."""

SLOTS_PER_SM = 2
MOST_SLOTS = 80
"""How many pieces may wait to be merged: of all heads together per multiprocessor, and of each head."""

# In KV tiles, of 1.5 us on an H200: what a piece costs beside its keys, what merging costs per step, and what
# a round of pieces costs that wait to be merged.
START_COST = 1
MERGE_COST = 1
WAIT_COST = 3
LEAST_TILES = 2

# What a piece of usual and of wide rows costs beside its keys, in KV tiles, and a row of a wide piece beside
# one of a usual piece; from timings on an H200. Wide pieces are fewer: they fill its multiprocessors evenly
# only in several rounds.
USUAL_START = 1
WIDE_START = 3
WIDE_ROW = 0.92
WIDE_ROUNDS = 2


def plan_prefill(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    tokens: int,
    *,
    first: int = 0,
    tables: NDArray[np.int32] | None = None,
    kv_heads: int = 1,
    processors: int = 0,
) -> NDArray[np.int32]:
    """The pieces of a step, int32 [1 + pieces + merges, 8]; the first row holds these two numbers.

    A piece, of most work first: its block table, first row of q, rows, the position of that row, first and
    last + 1 of the keys it sees, and its slot in the workspace (-1: it is a whole tile). A merge, of a tile
    that was cut: its first slot, slots, first row of q, rows.

    Sequence i brings query_lens[i] new tokens (0: none), the last of its seq_lens[i]; q holds them sequence
    after sequence from row `first` on. Its block table is row i, or row `tables[i]`, of those that
    `paged_prefill` is given. `tokens` is `tokens_per_tile`. Tiles are cut to keep `processors`
    multiprocessors busy (0: never; where a layer has a window). Copy the plan to the device with the step's
    other metadata; rows that follow it there are not looked at.
    """
    queries = np.asarray(query_lens, dtype=np.int64)
    sequence, start, rows, position = _whole_tiles(queries, seq_lens, tokens)
    row = (np.cumsum(queries) - queries)[sequence] + start + first
    table = sequence if tables is None else tables[sequence]
    end = position + rows
    lengths = -(-end // KV_TILE)
    tiles = np.zeros((sequence.size, COLUMNS), np.int64)
    tiles[:, :7] = np.stack((table, row, rows, position, np.zeros_like(row), end, np.full_like(row, -1)), 1)
    cuts = cut(lengths, kv_heads, processors)
    merges = np.zeros((0, COLUMNS), np.int64)
    if cuts.max(initial=1) > 1:
        tiles, merges = _pieces(tiles, lengths, cuts)
        lengths = -((tiles[:, 4] - tiles[:, 5]) // KV_TILE)
    # Tiles of one sequence read the same keys at about the same time, once from memory.
    order = np.lexsort((tiles[:, 4], -lengths))
    head = [[len(tiles), len(merges), 0, 0, 0, 0, 0, 0]]
    return np.concatenate((head, tiles[order], merges), dtype=np.int32, casting="same_kind")


def wide_tiles_pay(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    usual: int,
    wide: int,
    *,
    kv_heads: int,
    processors: int,
) -> bool:
    """Whether a step with many long pieces is faster with tiles of `wide` new tokens than with `usual`.

    Wide tiles read keys more seldom, but each begins later, and the last of a sequence may have few tokens.
    """
    queries = np.asarray(query_lens, dtype=np.int64)
    costs = []
    for tokens, start_cost in ((usual, USUAL_START), (wide, WIDE_START)):
        _, _, rows, position = _whole_tiles(queries, seq_lens, tokens)
        lengths = -(-(position + rows) // KV_TILE)
        costs.append(tokens * int((lengths + start_cost).sum()))
    return lengths.size * kv_heads >= WIDE_ROUNDS * processors and WIDE_ROW * costs[1] < costs[0]


def _whole_tiles(queries: Ints, seq_lens: Sequence[int], tokens: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Tiles of `tokens` new tokens: sequence, first of its new tokens, how many, and that one's position."""
    counts = -(-queries // tokens)
    sequence = np.repeat(np.arange(queries.size), counts)
    start = _nth(counts) * tokens
    rows = np.minimum(tokens, queries[sequence] - start)
    position = (np.asarray(seq_lens, dtype=np.int64) - queries)[sequence] + start
    return sequence, start, rows, position


def _pieces(tiles: Ints, lengths: Ints, cuts: Ints) -> tuple[Ints, Ints]:
    """Tiles cut into so many pieces each, and the merges of these."""
    nth, tile = _nth(cuts), np.repeat(np.arange(cuts.size), cuts)
    pieces = tiles[tile]
    pieces[:, 4] = nth * lengths[tile] // cuts[tile] * KV_TILE
    pieces[:, 5] = np.minimum((nth + 1) * lengths[tile] // cuts[tile] * KV_TILE, pieces[:, 5])
    waits = np.where(cuts > 1, cuts, 0)
    slot = np.cumsum(waits) - waits
    pieces[:, 6] = np.where(waits[tile], slot[tile] + nth, -1)
    split = np.flatnonzero(waits)
    merges = np.zeros((split.size, COLUMNS), np.int64)
    merges[:, :4] = np.stack((slot, cuts, tiles[:, 1], tiles[:, 2]), 1)[split]
    return pieces, merges


def cut(lengths: Ints, kv_heads: int, processors: int) -> Ints:
    """Into how many pieces each tile is cut, of these lengths in KV tiles; each is one of `kv_heads` alike.

    Pieces go round the multiprocessors, the longest first. Where no tile is longer than an even share, only
    those of the last round, which doesn't go all the way round, may be cut; else all may. All that may are
    cut to one greatest length: of the longest one's even fractions the one that ends first, by whichever of
    two bounds is lower: rounds of the longest piece, or an even share and one piece more.
    """
    cuts = np.ones_like(lengths)
    most = most_slots(kv_heads, processors)
    if not lengths.size or most < 2:
        return cuts
    among: Ints | slice = slice(None)
    longest = int(lengths.max())
    if longest * processors <= int(lengths.sum()) * kv_heads:
        lanes = processors // kv_heads
        among = np.argsort(-lengths, kind="stable")[lengths.size // lanes * lanes :]
        longest = int(lengths[among].max(initial=0))
    most_cuts = min(most, longest // LEAST_TILES)
    if most_cuts < 2:
        return cuts
    mine = lengths[among]
    greatest = -(-longest // np.arange(1, most_cuts + 1))
    pieces = -(-mine // greatest[:, None])
    number = pieces.sum(1)
    waiting = number - (pieces == 1).sum(1)
    rounds = -(-number * kv_heads // processors) * (greatest + START_COST)
    shared = -(-(mine.sum() + START_COST * number) * kv_heads // processors) + greatest + START_COST
    merging = np.where(waiting > 0, MERGE_COST, 0) + -(-WAIT_COST * waiting * kv_heads // processors)
    cost = np.minimum(rounds, shared) + merging
    cuts[among] = pieces[np.argmin(np.where(waiting <= most, cost, np.iinfo(np.int64).max))]
    return cuts


def most_slots(kv_heads: int, processors: int) -> int:
    """How many pieces of one head may wait to be merged."""
    return min(SLOTS_PER_SM * processors // kv_heads, MOST_SLOTS)


def most_rows(tiles: int, kv_heads: int, processors: int) -> int:
    """Rows that a plan of so many tiles has at most: each slot is a piece, and two or more make a merge."""
    most = most_slots(kv_heads, processors)
    return 1 + tiles + most + most // 2


def _nth(counts: Ints) -> Ints:
    """0, 1, ... up to each of `counts`, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
