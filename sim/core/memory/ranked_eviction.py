"""Eviction by rank: of all pieces that no other free block depends on, the first in an `EvictionOrder`."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from pagecast.sim.core.memory.eviction import LeastRecentlyUsed, TimedEviction
from pagecast.sim.core.memory.eviction_orders import EvictionOrder
from pagecast.sim.core.memory.retention_clock import RetentionClock
from pagecast.sim.core.memory.run import FreePiece

_PARKED = -1
_SPARE = 64  # stale entries that a heap may always have


class RankedEviction(TimedEviction):
    """A heap of free pieces by the level that `order` gives them; of equal levels, the oldest goes first.

    Only leaves are evicted: a piece that free blocks follow in the tree is parked, and put back when one of
    them is gone. Blocks without content are taken before all others. Every operation is O(log pieces),
    amortised.
    """

    def __init__(self, order: EvictionOrder, *, blanks_first: bool = True) -> None:
        self.leaves_first = False
        self.blanks_first = blanks_first
        self.order = order
        self.gains = order.gains
        self.clock = RetentionClock() if order.keeps_retention else None
        self._most_protected = order.most_protected
        self._protected: dict[FreePiece, int] = {}  # oldest first, with the sizes they were freed with
        self._protected_blocks = 0
        self._blank = LeastRecentlyUsed()
        # Level, when it became free, number of the entry. A piece's other entries are stale.
        self._heap: list[tuple[float, int, int, FreePiece]] = []
        self._entries: dict[FreePiece, int] = {}  # the number of each piece's entry, or _PARKED
        self._count = 0

    # ---- adding and removing

    def add(self, piece: FreePiece) -> None:
        """Adds a piece where its level puts it; one without content behind the others of this kind."""
        if piece.run.published:
            self._rank(piece)
        else:
            self._blank.add(piece)

    def add_beside(self, piece: FreePiece, place: FreePiece) -> None:
        """Adds a piece with the level of the one it was cut off."""
        if place not in self._entries:
            self._blank.add_beside(piece, place)
            return
        self._push(piece, place.level, place.used)
        self.order.divided(piece, place)
        if self.clock is not None:
            self.clock.divide(piece, place)

    def remove(self, piece: FreePiece) -> None:
        """Takes a piece out; what waited for its end may be evicted now."""
        if self._entries.pop(piece, None) is None:
            self._blank.remove(piece)
            return
        if self._protected:
            self._protected_blocks -= self._protected.pop(piece, 0)
        self.order.removed(piece)
        if self.clock is not None:
            self.clock.remove(piece)
        self.wake(piece.run.free or ())
        self.lose_front(piece)

    def lose_front(self, piece: FreePiece) -> None:
        """Lets what precedes a piece be evicted: its first blocks are gone or held again."""
        parent = piece.run.parent
        if parent is not None:
            self.wake(parent.free or ())

    # ---- taking

    def next(self) -> FreePiece:
        """The piece without content that was added first, or the evictable piece with the lowest level."""
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
        """The evictable piece with the lowest level; None where other orders' pieces follow all of these."""
        heap, entries = self._heap, self._entries
        while heap:
            level, _, number, piece = heap[0]
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
            now = self.order.level_now(piece, level)
            if now is None:
                return piece
            self._push(piece, now, self._count)
            heap = self._heap
        return None

    def at_once(self, piece: FreePiece) -> int:
        """As many as may be evicted before the piece's level changes."""
        most = piece.evictable()
        return min(most, self.order.at_once(piece)) if self.gains else most

    def __iter__(self) -> Iterator[FreePiece]:
        """All pieces, those without content first."""
        yield from self._blank
        yield from self._entries

    # ---- levels

    def _rank(self, piece: FreePiece) -> None:
        """Puts a piece where its level puts it that becomes free now."""
        piece.used = self._count
        level = self.order.level(piece)
        if self.clock is not None:
            self.clock.add(piece, self.now)
        if self._most_protected is not None and level > 0:
            level = self._protect(piece, level, self._most_protected)
        self._push(piece, level, self._count)

    def _protect(self, piece: FreePiece, level: float, most: int) -> float:
        """Protects a piece and lets the oldest fall to level 0, until at most `most` blocks are above it.

        Returns the piece's level.
        """
        size = piece.high - piece.low
        self._protected[piece] = size
        self._protected_blocks += size
        while self._protected_blocks > most:
            oldest = next(iter(self._protected))
            self._protected_blocks -= self._protected.pop(oldest)
            if oldest is piece:
                return 0
            self._push(oldest, 0, self._count)
        return level

    # ---- the heap

    def _push(self, piece: FreePiece, level: float, used: int) -> None:
        if len(self._heap) > 2 * len(self._entries) + _SPARE:
            self._sweep()
        self._count += 1
        self._entries[piece] = self._count
        piece.level = level
        piece.used = used
        heapq.heappush(self._heap, (level, used, self._count, piece))

    def wake(self, pieces: Iterable[FreePiece]) -> None:
        """Puts parked pieces back: what followed them may be gone."""
        for piece in pieces:
            if self._entries.get(piece) == _PARKED:
                self._push(piece, piece.level, piece.used)

    def wake_all(self) -> None:
        """Puts every parked piece back."""
        self.wake(list(self._entries))

    def _sweep(self) -> None:
        """Drops entries of pieces that are gone, or have another entry."""
        self._heap = [entry for entry in self._heap if self._entries.get(entry[3]) == entry[2]]
        heapq.heapify(self._heap)

    # ---- retention that ends with time

    @property
    def timed(self) -> TimedEviction | None:
        """Itself, where the order keeps retention."""
        return None if self.clock is None else self

    @property
    def due_ns(self) -> int:
        """When the next retention ends."""
        assert self.clock is not None
        return self.clock.due_ns

    def expired(self) -> FreePiece | None:
        """A piece whose retention has ended by now."""
        assert self.clock is not None
        return self.clock.expired(self.now)

    def revert(self, piece: FreePiece) -> None:
        """Puts a piece, whose run has no retention any more, behind all others of the default priority."""
        assert self.clock is not None
        self.clock.revert(piece)
        self._rank(piece)

    def figures(self) -> dict[str, object]:
        """The figures of the order, and of retention where it is kept."""
        return self.order.figures() if self.clock is None else self.clock.figures()
