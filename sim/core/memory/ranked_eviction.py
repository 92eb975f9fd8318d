"""Eviction by rank: of all pieces that no other free block depends on, the one with the lowest rank.

The orders themselves are in `eviction_orders.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from pagecast.sim.core.memory.eviction import LeastRecentlyUsed
from pagecast.sim.core.memory.run import FreePiece

Rank = tuple[float, ...]
_PARKED = -1
_SPARE = 64  # stale entries that a heap may always have


class RankedEviction:
    """A heap of free pieces. A subclass says in `rank` which goes first; equal ranks go oldest first.

    Only leaves are evicted: a piece that free blocks follow in the tree is parked, and put back when one of
    them is gone. Blocks without content are taken before all others. Every operation is O(log pieces),
    amortised. `gains`: whether a piece may gain while it waits.
    """

    leaves_first: bool = False
    blanks_first: bool

    def __init__(self, *, blanks_first: bool = True) -> None:
        self.blanks_first = blanks_first
        self._blank = LeastRecentlyUsed()
        self._heap: list[tuple[Rank, int, FreePiece]] = []
        self._entries: dict[FreePiece, int] = {}  # the number of each piece's entry, or _PARKED
        self._ranks: dict[FreePiece, Rank] = {}
        self._count = 0
        self.gains = type(self).rank_now is not RankedEviction.rank_now

    # ---- what an order says

    def rank(self, piece: FreePiece) -> Rank:
        """Where a piece stands that has just become free; the lowest rank is evicted first."""
        raise NotImplementedError

    def rank_now(self, piece: FreePiece, rank: Rank) -> Rank:
        """The rank of the first piece as it is now, if a piece may gain while it waits."""
        return rank

    def at_once(self, piece: FreePiece) -> int:
        """How many of the last blocks of the first piece are taken before its rank changes."""
        return piece.evictable()

    def removed(self, piece: FreePiece) -> None:
        """Takes note that a piece with content is gone: evicted (it is empty then), or held again."""

    def figures(self) -> dict[str, object]:
        """The order's figures, for a replay's summary."""
        return {}

    # ---- the protocol

    def add(self, piece: FreePiece) -> None:
        """Adds a piece where its rank puts it; one without content behind the others of this kind."""
        if piece.run.published:
            self._push(piece, self.rank(piece))
        else:
            self._blank.add(piece)

    def add_beside(self, piece: FreePiece, place: FreePiece) -> None:
        """Adds a piece with the rank of the one it was cut off."""
        if place in self._entries:
            self._push(piece, self._ranks[place])
        else:
            self._blank.add_beside(piece, place)

    def remove(self, piece: FreePiece) -> None:
        """Takes a piece out; what waited for its end may be evicted now."""
        if self._entries.pop(piece, None) is None:
            self._blank.remove(piece)
            return
        del self._ranks[piece]
        self.removed(piece)
        self.wake(piece.run.free or ())
        self.lose_front(piece)

    def lose_front(self, piece: FreePiece) -> None:
        """Lets what precedes a piece be evicted: its first blocks are gone or held again."""
        parent = piece.run.parent
        if parent is not None:
            self.wake(parent.free or ())

    def next(self) -> FreePiece:
        """The piece without content that was added first, or the evictable piece with the lowest rank."""
        blank = self._blank.next()
        if blank.high > blank.low:
            return blank
        piece = self.first()
        if piece is None:
            self.wake_all()
            piece = self.first()
        assert piece is not None
        return piece

    def first(self) -> FreePiece | None:
        """The evictable piece with the lowest rank; None where other orders' pieces follow all of these."""
        heap, entries = self._heap, self._entries
        while heap:
            rank, number, piece = heap[0]
            if entries.get(piece) != number:
                heapq.heappop(heap)
                continue
            run = piece.run
            if (run.children or piece.high < len(run.blocks)) and not piece.evictable():
                heapq.heappop(heap)
                entries[piece] = _PARKED
                continue
            if not self.gains:
                return piece
            now = self.rank_now(piece, rank)
            if now == rank:
                return piece
            self._push(piece, now)
            heap = self._heap
        return None

    def __iter__(self) -> Iterator[FreePiece]:
        """All pieces, those without content first."""
        yield from self._blank
        yield from self._entries

    # ---- the heap

    def _push(self, piece: FreePiece, rank: Rank) -> None:
        if len(self._heap) > 2 * len(self._entries) + _SPARE:
            self._sweep()
        self._count += 1
        self._entries[piece] = self._count
        self._ranks[piece] = rank
        heapq.heappush(self._heap, (rank, self._count, piece))

    def wake(self, pieces: Iterable[FreePiece]) -> None:
        """Puts parked pieces back: what followed them may be gone."""
        for piece in pieces:
            if self._entries.get(piece) == _PARKED:
                self._push(piece, self._ranks[piece])

    def wake_all(self) -> None:
        """Puts every parked piece back."""
        self.wake(list(self._entries))

    def _sweep(self) -> None:
        """Drops entries of pieces that are gone, or have another entry."""
        self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
        heapq.heapify(self._heap)
