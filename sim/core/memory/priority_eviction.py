"""Eviction by retention priority: the lowest first, then the least recently used (TensorRT-LLM)."""

from __future__ import annotations

import heapq
from collections import Counter

from pagecast.sim.core.memory.ranked_eviction import Rank, RankedEviction
from pagecast.sim.core.memory.run import FreePiece
from pagecast.sim.core.retention import DEFAULT_PRIORITY, FOREVER


class LowestPriority(RankedEviction):
    """Lowest priority first; of equals, the least recently used.

    A priority with a duration ends so long after its blocks became
    free; `expired` lists them, and `revert` puts them behind all others of the default priority.
    """

    def __init__(self, *, blanks_first: bool = True) -> None:
        super().__init__(blanks_first=blanks_first)
        self.now = 0  # the time that blocks are freed at
        self.evicted: Counter[int] = Counter()  # blocks by priority
        self.reverted_blocks = 0
        self._expiring: list[tuple[int, int, FreePiece]] = []
        self._freed: dict[
            FreePiece, tuple[int, int, int]
        ] = {}  # priority, end in the sequence, expiry's entry

    def rank(self, piece: FreePiece) -> Rank:
        """The priority of the piece's run, and when it became free."""
        keep = piece.run.keep
        priority = DEFAULT_PRIORITY if keep is None else keep.priority
        entry = 0
        if keep is not None and keep.duration_ns is not None and priority != DEFAULT_PRIORITY:
            entry = self._count + 1
            heapq.heappush(self._expiring, (self.now + keep.duration_ns, entry, piece))
        self._freed[piece] = (priority, piece.run.start + piece.high, entry)
        return priority, self._count

    def add_beside(self, piece: FreePiece, place: FreePiece) -> None:
        """Adds a piece with the rank and the expiry of the one it was cut off."""
        super().add_beside(piece, place)
        if place not in self._freed:
            return
        priority, end, entry = self._freed[place]
        self._freed[place] = (priority, piece.run.start, entry)
        if entry:
            due = next(due for due, number, _ in self._expiring if number == entry)
            entry = self._count + 1
            self._count = entry
            heapq.heappush(self._expiring, (due, entry, piece))
        self._freed[piece] = (priority, end, entry)

    def removed(self, piece: FreePiece) -> None:
        """Counts what was evicted of the piece, which is its end."""
        priority, end, _ = self._freed.pop(piece)
        evictions = end - piece.run.start - piece.high
        if evictions:
            self.evicted[priority] += evictions

    # ---- durations

    @property
    def due_ns(self) -> int:
        """When the next priority ends; far in the future where none does."""
        expiring = self._expiring
        while expiring and self._freed.get(expiring[0][2], (0, 0, 0))[2] != expiring[0][1]:
            heapq.heappop(expiring)
        return expiring[0][0] if expiring else FOREVER

    def expired(self) -> FreePiece | None:
        """A piece whose priority has ended by now; None: there is none."""
        return self._expiring[0][2] if self.due_ns <= self.now else None

    def revert(self, piece: FreePiece) -> None:
        """Puts a piece behind all others of the default priority; its run has no priority any more."""
        self.removed(piece)
        self.reverted_blocks += piece.high - piece.low
        self._push(piece, self.rank(piece))

    def figures(self) -> dict[str, object]:
        """Evicted blocks by priority, and blocks whose priority ended before they were evicted."""
        evicted = {str(priority): count for priority, count in sorted(self.evicted.items())}
        return {"evicted_by_priority": evicted, "reverted_blocks": self.reverted_blocks}
