"""Eviction of free blocks: which of them are taken next.

Freed blocks keep their content until their space is needed. An `Eviction` has the pieces of free blocks; the
pool takes blocks from a piece's high end, so that a sequence loses its last block first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pagecast.sim.core.memory.run import FreePiece, Run
from pagecast.sim.core.memory.tenant_ledger import TenantLedger
from pagecast.sim.core.retention import FOREVER


class Eviction:
    """The pieces of free blocks of a pool, in the order in which they are taken.

    `leaves_first`: the order itself takes blocks before those that precede them in a sequence. Where it is
    False, `next` must return a piece with `evictable() > 0`, and only `at_once` blocks of it are taken.
    `blanks_first`: blocks without findable content are taken before all others (vLLM). Then they do not come
    here: the pool keeps them.
    `ledger`: the accounts of the tenants that it is fair to; None: it does not tell tenants apart.
    """

    leaves_first: bool
    blanks_first: bool
    ledger: TenantLedger | None = None

    def add(self, piece: FreePiece) -> None:
        """Adds blocks that have just become free."""
        raise NotImplementedError

    def add_beside(self, piece: FreePiece, place: FreePiece) -> None:
        """Adds a piece cut off the high end of `place`, to be taken just before it."""
        raise NotImplementedError

    def remove(self, piece: FreePiece) -> None:
        """Takes a piece out: its blocks are held again, or all were taken."""
        raise NotImplementedError

    def lose_front(self, piece: FreePiece) -> None:
        """Takes note that the first blocks of a piece are held again, while the others stay free."""

    def next(self) -> FreePiece:
        """The piece to take blocks from. There is one."""
        raise NotImplementedError

    def nexts(self) -> Callable[[], FreePiece]:
        """`next`, to be called over and over while only the last blocks of each piece are taken."""
        return self.next

    def at_once(self, piece: FreePiece) -> int:
        """How many of the last blocks of `next`'s piece are taken before the order is asked again."""
        return piece.evictable()

    def __iter__(self) -> Iterator[FreePiece]:
        """All pieces, in any order."""
        raise NotImplementedError

    @property
    def timed(self) -> TimedEviction | None:
        """Itself, where retention ends with time."""
        return None

    def figures(self) -> dict[str, object]:
        """Its figures, for a replay's summary."""
        return {}


class TimedEviction(Eviction):
    """An eviction in which retention may end with time. `now`: the time that blocks are freed at."""

    now: int = 0

    @property
    def due_ns(self) -> int:
        """When the next retention ends; far in the future where none does."""
        return FOREVER

    def expired(self) -> FreePiece | None:
        """A piece whose retention has ended by now."""
        return None

    def revert(self, piece: FreePiece) -> None:
        """Puts a piece, whose run has no retention any more, behind all others of the default priority."""


class LeastRecentlyUsed(Eviction):
    """Least recently used first, a sequence's tail before its head: vLLM v1's free-block queue.

    The fast form of `Lru`: a ring of pieces, with every operation O(1). Holders free their blocks from the
    tail on, and a holder of a block holds all before it, so a block is never taken before the blocks that
    follow it.
    """

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
