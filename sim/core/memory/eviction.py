"""Eviction orders: which free blocks are taken next.

Freed blocks keep their content until their space is needed. An order ranks pieces of free blocks; the pool
takes blocks from a piece's high end, so that a sequence loses its last block first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from pagecast.sim.core.memory.run import FreePiece, Run


class Eviction(Protocol):
    """Order in which free blocks are taken.

    `leaves_first`: the order itself takes blocks before those that precede them in a sequence. Where it is
    False, `next` must return a piece with `evictable() > 0`, and only `at_once` blocks of it are taken.
    `blanks_first`: blocks without findable content are taken before all others (vLLM). Then they do not come
    here: the pool keeps them.
    """

    leaves_first: bool
    blanks_first: bool

    def add(self, piece: FreePiece) -> None:
        """Adds blocks that have just become free."""

    def add_beside(self, piece: FreePiece, place: FreePiece) -> None:
        """Adds a piece cut off the high end of `place`, to be taken just before it."""

    def remove(self, piece: FreePiece) -> None:
        """Takes a piece out: its blocks are held again, or all were taken."""

    def lose_front(self, piece: FreePiece) -> None:
        """Takes note that the first blocks of a piece are held again, while the others stay free."""

    def next(self) -> FreePiece:
        """The piece to take blocks from. There is one."""
        ...

    def at_once(self, piece: FreePiece) -> int:
        """How many of the last blocks of `next`'s piece are taken before the order is asked again."""
        ...

    def __iter__(self) -> Iterator[FreePiece]:
        """All pieces, in any order."""
        ...


class LeastRecentlyUsed:
    """Least recently used first, a sequence's tail before its head: vLLM v1's free-block queue.

    A ring of pieces. Every operation is O(1). Holders free their blocks from the tail on, and whoever holds
    a block holds all before it, so the order never takes a block before the blocks that follow it.
    """

    leaves_first: bool
    blanks_first: bool

    def __init__(self, *, blanks_first: bool = True) -> None:
        self.leaves_first = True
        self.blanks_first = blanks_first
        self.ring = FreePiece(Run(None, 0, []), 0, 0)

    def add(self, piece: FreePiece) -> None:
        """Adds a piece at the end: taken last."""
        ring = self.ring
        last = ring.before
        piece.before = last
        piece.after = ring
        last.after = piece
        ring.before = piece

    def add_beside(self, piece: FreePiece, place: FreePiece) -> None:
        """Adds a piece just ahead of `place`."""
        before = place.before
        piece.before = before
        piece.after = place
        before.after = piece
        place.before = piece

    def remove(self, piece: FreePiece) -> None:
        """Takes a piece out of the ring."""
        before = piece.before
        after = piece.after
        before.after = after
        after.before = before

    def lose_front(self, piece: FreePiece) -> None:
        """Nothing: the piece keeps its place."""

    def next(self) -> FreePiece:
        """The piece at the head of the ring."""
        return self.ring.after

    def at_once(self, piece: FreePiece) -> int:
        """All of the piece."""
        return piece.high - piece.low

    def __iter__(self) -> Iterator[FreePiece]:
        """All pieces, first the one that is taken first."""
        piece = self.ring.after
        while piece is not self.ring:
            yield piece
            piece = piece.after
