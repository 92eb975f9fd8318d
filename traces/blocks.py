"""Names of prompt blocks, at any block size: equal names where blocks and all before them are equal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pagecast.traces.arrays import Flags, Ints
from pagecast.traces.prefixes import Paths
from pagecast.traces.schema import starts


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """References in order: runs of `length` blocks with consecutive names from `first`, of request `row`."""

    row: Ints
    first: Ints
    length: Ints
    shared: Flags  # whether any other run may have the same names
    names: int


def block_runs(where: Paths, block_size: int) -> BlockRuns:
    """Names blocks: on each chain in order; a trailing partial block by its chain and its end.

    A block lies on the chain of its last token, which tells everything before it.
    """
    begin, end = where.begin // block_size, where.end // block_size
    last = np.append(where.row[1:] != where.row[:-1], True)
    partial = np.flatnonzero(last & (where.end % block_size > 0))
    # Room for each chain's blocks, side by side.
    low = np.full(where.chains, np.iinfo(np.int64).max)
    high = np.zeros(where.chains, dtype=np.int64)
    np.minimum.at(low, where.chain, begin)
    np.maximum.at(high, where.chain, end)
    room = starts(np.maximum(high - np.minimum(low, high), 0))
    visits = np.bincount(where.chain, minlength=where.chains)
    ends = np.stack([where.chain[partial], where.end[partial]], axis=1)
    _, tail, tail_count = np.unique(ends, axis=0, return_inverse=True, return_counts=True)
    row = np.concatenate([where.row, where.row[partial]])
    first = np.concatenate([room[where.chain] + begin - low[where.chain], room[-1] + tail.ravel()])
    length = np.concatenate([end - begin, np.ones(len(partial), dtype=np.int64)])
    shared = np.concatenate([visits[where.chain] > 1, tail_count[tail.ravel()] > 1])
    order = np.argsort(row, kind="stable")
    order = order[length[order] > 0]
    return BlockRuns(row[order], first[order], length[order], shared[order], int(room[-1]) + len(tail_count))


def block_ids(runs: BlockRuns, rows: int) -> tuple[Ints, Ints]:
    """The names of all blocks, prompt after prompt, and where each of the `rows` prompts begins."""
    begins = starts(runs.length)
    ids = np.arange(begins[-1]) + np.repeat(runs.first - begins[:-1], runs.length)
    counts = np.bincount(runs.row, weights=runs.length, minlength=rows).astype(np.int64)
    return ids, starts(counts)
