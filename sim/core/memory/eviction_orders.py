"""Eviction orders beside LRU: least frequently used, first in first out, segmented LRU, cost-aware."""

from __future__ import annotations

from collections.abc import Callable

from pagecast.sim.core.memory.ranked_eviction import Rank, RankedEviction
from pagecast.sim.core.memory.run import FreePiece

_USES = 8  # requests that have read a block are told apart up to this many
_MEMORY = 4096.0  # blocks after which what was learned of reuse counts half


class LeastRecentlyFreed(RankedEviction):
    """LRU as a ranked order, for those who keep several of them."""

    def rank(self, piece: FreePiece) -> Rank:
        """When the piece became free."""
        return (self._count,)


class LeastFrequentlyUsed(RankedEviction):
    """Content that the fewest requests have reused goes first; of equals, the least recently used (LFU)."""

    def rank(self, piece: FreePiece) -> Rank:
        """How many requests have reused the piece's run, and when it became free."""
        return piece.run.uses, self._count


class FirstInFirstOut(RankedEviction):
    """Content that was written first goes first, however often it was reused."""

    def rank(self, piece: FreePiece) -> Rank:
        """When the run's first block was taken."""
        return (piece.run.born,)


class SegmentedLru(RankedEviction):
    """Two LRU lists: content that was never reused is evicted before content that was.

    At most `most_protected` blocks are protected; beyond that the least recently used of them become the
    newest of the others (Karedy, Love and Wherry, 1994). A piece counts with the size it was freed with.
    """

    def __init__(self, most_protected: int, *, blanks_first: bool = True) -> None:
        super().__init__(blanks_first=blanks_first)
        self._most = most_protected
        self._protected: dict[FreePiece, int] = {}  # oldest first, with sizes
        self._blocks = 0

    def rank(self, piece: FreePiece) -> Rank:
        """The segment, and when the piece came into it."""
        if not piece.run.uses:
            return 0, self._count
        size = piece.high - piece.low
        self._protected[piece] = size
        self._blocks += size
        while self._blocks > self._most:
            oldest = next(iter(self._protected))
            self._leave(oldest)
            if oldest is piece:
                return 0, self._count
            self._push(oldest, (0, self._count))
        return 1, self._count

    def removed(self, piece: FreePiece) -> None:
        """Frees the piece's place in the protected segment."""
        self._leave(piece)

    def _leave(self, piece: FreePiece) -> None:
        self._blocks -= self._protected.pop(piece, 0)


class CostAware(RankedEviction):
    """Content whose loss is expected to cost the least prefill time goes first.

    A block's value is the time to compute it again, which grows with its position, times the probability
    that it is reused. The probability is learned: of blocks that as many requests had reused when they became
    free, the share that was reused again before it was evicted. Values age as in GreedyDual-Size-Frequency
    (Cherkasova, 1998): each eviction raises the value that later ones start from.

    `recompute(block)` is the time to compute the block with that number in its sequence; any unit. Blocks
    from number `most_blocks` on have no value, so that one huge prefix cannot own the cache.
    """

    def __init__(
        self, recompute: Callable[[int], float], most_blocks: int, *, blanks_first: bool = True
    ) -> None:
        super().__init__(blanks_first=blanks_first)
        self._recompute = recompute
        self._most_blocks = most_blocks
        self._floor = 0.0  # the value of what was evicted last
        self._reuses = [1.0] * (_USES + 1)
        self._evictions = [1.0] * (_USES + 1)
        self._freed: dict[FreePiece, tuple[int, int, int]] = {}  # uses, and numbers of its first and last + 1

    def probability(self, uses: int) -> float:
        """The share of blocks with so many uses that are reused before they are evicted."""
        uses = min(uses, _USES)
        return self._reuses[uses] / (self._reuses[uses] + self._evictions[uses])

    def rank(self, piece: FreePiece) -> Rank:
        """The floor and the value of the piece's last block."""
        run = piece.run
        self._freed[piece] = (run.uses, run.start + piece.low, run.start + piece.high)
        return self._floor + self._value(piece), self._count

    def figures(self) -> dict[str, object]:
        """By how often content was reused before: the learned probability that it is reused again, and from
        how many blocks it was learned (those of long ago count less)."""
        learned = zip(self._reuses, self._evictions, strict=True)
        return {
            "reuse_probability": [round(self.probability(uses), 4) for uses in range(_USES + 1)],
            "learned_blocks": [round(reused + evicted) for reused, evicted in learned],
        }

    def _value(self, piece: FreePiece) -> float:
        last = piece.run.start + piece.high - 1
        if last >= self._most_blocks:
            return 0.0
        return self.probability(piece.run.uses) * self._recompute(last)

    def rank_now(self, piece: FreePiece, rank: Rank) -> Rank:
        """A piece that was cut down to the cap has a value from then on."""
        uses, _, freed = self._freed[piece]
        end = piece.run.start + piece.high
        if freed > self._most_blocks >= end:
            self._evictions[min(uses, _USES)] += freed - end
            return self.rank(piece)
        self._floor = max(self._floor, rank[0])
        return rank

    def at_once(self, piece: FreePiece) -> int:
        """As many as may be evicted, but first only those beyond the cap, which have no value."""
        beyond = piece.run.start + piece.high - self._most_blocks
        most = piece.evictable()
        return min(most, beyond) if beyond > 0 else most

    def add_beside(self, piece: FreePiece, place: FreePiece) -> None:
        """Adds a piece with the rank of the one it was cut off."""
        super().add_beside(piece, place)
        if place in self._freed:
            uses, low, high = self._freed[place]
            cut = piece.run.start
            self._freed[place] = uses, low, cut
            self._freed[piece] = uses, cut, high

    def removed(self, piece: FreePiece) -> None:
        """Learns how much of the piece was reused: what was evicted is its end."""
        uses, low, high = self._freed.pop(piece)
        uses = min(uses, _USES)
        end = piece.run.start + piece.high
        self._reuses[uses] += end - low
        self._evictions[uses] += high - end
        if self._reuses[uses] + self._evictions[uses] > _MEMORY:
            self._reuses[uses] /= 2
            self._evictions[uses] /= 2
