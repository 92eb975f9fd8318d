"""Runs: neighbouring blocks of one segment, handled as one.

A run's first blocks may be held by many requests, each from the run's start to a length of its own;
at most one request, the writer, is still filling it and holds all of it. What nobody holds is free, and
always a tail of the run: whoever held a later block held every block before it. So the free part is a
stack of pieces, the deepest freed first:

    blocks   [ 0 1 2 3 4 5 6 7 8 9 ]
    held       A A A A              by request A (length 4)
    free               [...] [...]  pieces 4..7 (freed later) and 7..10 (freed earlier, evicted first)
    published ------------------>|  how many blocks, from the start, others may find
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagecast.sim.core.request import Request


class Run:
    """Consecutive blocks of one segment: `blocks[i]` is block `start + i` of its sequence.

    `key` is the segment's digest (None: never to be found). `held` counts the readers by the length they
    hold; `writer` holds everything. `next` links runs published under one key, oldest first. `rest` is
    what was split off this run's end; holders of more than this run's length hold the rest as well.
    """

    __slots__ = ("blocks", "free", "held", "indexed", "key", "next", "published", "rest", "start", "writer")

    def __init__(self, key: bytes | None, start: int, blocks: list[int], writer: Request | None) -> None:
        self.key = key
        self.start = start
        self.blocks = blocks
        self.published = 0
        self.writer = writer
        self.held: dict[int, int] | None = None
        self.free: list[FreePiece] | None = None
        self.indexed = False
        self.next: Run | None = None
        self.rest: Run | None = None

    @property
    def end(self) -> int:
        """The number, in its sequence, of the block after the last."""
        return self.start + len(self.blocks)

    def owned(self) -> int:
        """How many blocks, from the start, some request holds."""
        if self.writer is not None:
            return len(self.blocks)
        return max(self.held) if self.held else 0


class FreePiece:
    """Blocks `low` to `high` of a run, free together: a link in the free queue."""

    __slots__ = ("after", "before", "high", "low", "run")

    def __init__(self, run: Run | None, low: int, high: int) -> None:
        self.run = run
        self.low = low
        self.high = high
        self.before: FreePiece = self
        self.after: FreePiece = self


class FreeQueue:
    """Free blocks in the order they will be taken: a ring of pieces, each taken from its high end.

    The head is evicted first. Putting in, taking out of the middle and taking from the head are O(1) a
    piece, and copying block numbers is a slice.
    """

    __slots__ = ("count", "ring")

    def __init__(self) -> None:
        self.ring = FreePiece(None, 0, 0)
        self.count = 0

    def append(self, run: Run, low: int, high: int) -> None:
        """Puts a piece at the end: taken last."""
        self._link(FreePiece(run, low, high), self.ring.before)
        self.count += high - low

    def prepend(self, run: Run, low: int, high: int) -> None:
        """Puts a piece at the head: taken first."""
        self._link(FreePiece(run, low, high), self.ring)
        self.count += high - low

    def insert_before(self, run: Run, low: int, high: int, place: FreePiece) -> None:
        """Puts a piece just ahead of `place`, without counting it: its blocks are in the queue already."""
        self._link(FreePiece(run, low, high), place.before)

    def _link(self, piece: FreePiece, before: FreePiece) -> None:
        after = before.after
        piece.before = before
        piece.after = after
        before.after = piece
        after.before = piece
        run = piece.run
        assert run is not None
        if run.free is None:
            run.free = [piece]
        else:
            run.free.append(piece)

    def unlink(self, piece: FreePiece) -> None:
        """Takes a piece out of the ring; its count and its run's list are the caller's business."""
        piece.before.after = piece.after
        piece.after.before = piece.before
