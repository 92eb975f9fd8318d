"""Hit ratio against cache capacity, without time: prompts of a trace against one LRU cache of blocks.

Counting: requests come in their order; each block of a prompt is tested, then moved to the newest end; a
block hits only if all earlier blocks of its request hit; the trailing partial block counts as one;
generated tokens are never inserted. As every block is moved whether it hits or not, the cache of capacity
C holds at any time the C blocks used last, so one pass serves all capacities: a block is there if fewer
than C others were used since its last use (its stack distance; Mattson et al., IBM Systems Journal 9(2),
1970), and it hits at the capacities above the greatest distance among the blocks up to it.

    >>> from pagecast.traces.hits import hits
    >>> from pagecast.traces.read import read
    >>> table = hits(read("chat", limit=50), (1000,), 16)
    >>> round(table.ratio(1000), 3), round(table.infinite, 3)
    (0.469, 0.651)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.traces.arrays import Floats, Ints
from pagecast.traces.blocks import BlockRuns, block_runs
from pagecast.traces.prefixes import paths
from pagecast.traces.schema import Trace, starts

BLOCK_SIZE = 16  # vLLM's


@dataclass(frozen=True, slots=True)
class Hits:
    """The result: counts of blocks, and the ratio of references that hit at each capacity asked for.

    `distances` and `counts` hold the whole curve: `counts[i]` references hit at capacities above
    `distances[i]` blocks, and only there.
    """

    block_size: int
    references: int
    unique_blocks: int
    infinite: float
    capacity: dict[int, float]
    distances: Ints
    counts: Ints

    def ratio(self, blocks: int) -> float:
        """The hit ratio at a capacity of `blocks`."""
        return float(self.counts[self.distances < blocks].sum() / max(self.references, 1))

    def to_dict(self) -> dict[str, object]:
        """The keys of `pagecast hits --json`."""
        return {
            "block_size": self.block_size,
            "references": self.references,
            "unique_blocks": self.unique_blocks,
            "infinite": self.infinite,
            "capacity": {str(blocks): ratio for blocks, ratio in self.capacity.items()},
        }


def hits(trace: Trace, capacities: Sequence[int], block_size: int | None = None) -> Hits:
    """Counts hits of an LRU cache of each of `capacities` blocks of `block_size` tokens.

    Without a block size it is what the trace's own hash ids name, or else vLLM's 16. Blocks are equal where
    their tokens and all tokens before them are, and their scope. Raises BadInput for a block size or capacity
    below 1.
    """
    if block_size is None:
        block_size = trace.block_tokens or BLOCK_SIZE
    if block_size < 1:
        raise BadInput(f"block size {block_size}: a block needs at least one token")
    if bad := [blocks for blocks in capacities if blocks < 1]:
        raise BadInput(f"capacity {bad[0]}: a cache needs at least one block")
    runs = block_runs(paths(trace), block_size)
    references = int(runs.length.sum())
    pieces = _reuses(runs)
    reach = _reach(pieces, _distances(pieces))
    hit = reach >= 0
    order = np.argsort(reach[hit], kind="stable")
    distances, counts = reach[hit][order], pieces.length[hit][order]
    unique = int(pieces.length[pieces.previous < 0].sum())
    result = Hits(
        block_size, references, unique, float(counts.sum() / max(references, 1)), {}, distances, counts
    )
    result.capacity.update((blocks, result.ratio(blocks)) for blocks in capacities)
    return result


@dataclass(frozen=True, slots=True)
class _Reuses:
    """Runs cut so that the blocks of each were last used one after the other, or never.

    `time` is the number of references before the piece, `previous` the time of its first block's last use
    (-1: never used before), `length` its blocks.
    """

    row: Ints
    time: Ints
    previous: Ints
    length: Ints


def _reuses(runs: BlockRuns) -> _Reuses:
    used = np.full(runs.names, -1, dtype=np.int64)
    times = starts(runs.length)
    fresh = np.flatnonzero(~runs.shared)
    parts = [np.stack([runs.row[fresh], times[fresh], np.full(len(fresh), -1), runs.length[fresh]])]
    reuses: list[tuple[int, int, int, int]] = []
    at = np.flatnonzero(runs.shared)
    columns = (runs.row[at], runs.first[at], runs.length[at], times[at])
    for row, first, length, time in zip(*(column.tolist() for column in columns), strict=True):
        before = used[first : first + length]
        # Within a piece each block was last used right after its neighbour, or none was ever used.
        joined = np.where(before[:-1] < 0, before[1:] < 0, before[1:] - before[:-1] == 1)
        cuts = np.flatnonzero(~joined) + 1
        edges = [0, *cuts.tolist(), length]
        reuses += [(row, time + a, int(before[a]), b - a) for a, b in itertools.pairwise(edges)]
        before[:] = np.arange(time, time + length)
    parts.append(np.array(reuses, dtype=np.int64).reshape(-1, 4).T)
    row_, time_, previous, length_ = np.concatenate(parts, axis=1)
    order = np.argsort(time_, kind="stable")
    return _Reuses(row_[order], time_[order], previous[order], length_[order])


def _distances(pieces: _Reuses) -> Ints:
    """How many other blocks were used since each piece's blocks were last used; -1: never used before.

    All blocks of a piece have one distance. It is the number of references since whose own last use lies
    before this block's: with `j < i` references, those of `previous[j] < previous[i]` less the
    `previous[i] + 1` that came up to that use.
    """
    earlier = _earlier_and_smaller(pieces.previous, pieces.length)
    return np.where(pieces.previous < 0, -1, earlier - pieces.previous - 1)


def _earlier_and_smaller(values: Ints, weights: Ints) -> Ints:
    """For each item the summed weights of those before it whose value is smaller; values are 64-bit.

    Goes down the bits of the values' ranks. Items equal in all higher bits stand together in order of
    time; one whose bit is 1 has those before it whose bit is 0 below it.
    """
    _, rank = np.unique(values, return_inverse=True)
    rank = rank.astype(np.int64)
    order = np.arange(len(rank))
    total = np.zeros(len(rank), dtype=np.int64)
    for bit in range(int(rank.max(initial=0)).bit_length() - 1, -1, -1):
        one = (rank[order] >> bit) & 1 == 1
        group = rank[order] >> (bit + 1)
        begins = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
        sizes = np.diff(np.append(begins, len(group)))
        zeros_before = starts(np.where(one, 0, weights[order]))[:-1]
        inside = zeros_before - np.repeat(zeros_before[begins], sizes)
        total[order[one]] += inside[one]
        # Split each group by this bit, keeping the order of time on both sides.
        zero_count = np.add.reduceat((~one).astype(np.int64), begins)
        zero_rank = np.cumsum(~one) - np.repeat(np.cumsum(zero_count) - zero_count, sizes) - 1
        one_rank = np.cumsum(one) - np.repeat(np.cumsum(sizes - zero_count) - (sizes - zero_count), sizes) - 1
        place = np.repeat(begins, sizes) + np.where(one, np.repeat(zero_count, sizes) + one_rank, zero_rank)
        split = np.empty_like(order)
        split[place] = order
        order = split
    return total


def _reach(pieces: _Reuses, distances: Ints) -> Ints:
    """The greatest distance among a request's blocks up to each piece; -1 from the first miss for ever on."""
    far = np.int64(1) << 40
    level = np.where(distances < 0, far, distances)
    _, owner = np.unique(pieces.row, return_inverse=True)
    owner = owner.astype(np.int64) * (far << 1)
    upto = np.maximum.accumulate(level + owner) - owner
    return np.where(upto >= far, -1, upto)


def curve(result: Hits, points: int = 20) -> tuple[Ints, Floats]:
    """Capacities, evenly spaced in their logarithm up to where nothing more is gained, and their ratios."""
    top = int(result.distances.max(initial=0)) + 1
    capacities = np.unique(np.geomspace(1, top, points).astype(np.int64))
    return capacities, np.array([result.ratio(blocks) for blocks in capacities.tolist()])
