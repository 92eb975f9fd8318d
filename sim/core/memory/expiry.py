"""End of retention: free blocks lose a priority whose time is over."""

from __future__ import annotations

from pagecast.sim.core.events import EventKind
from pagecast.sim.core.memory.eviction import TimedEviction
from pagecast.sim.core.memory.pool import BlockPool


class Expiry:
    """Ends the retention of a pool's free blocks. `eviction` is the pool's."""

    def __init__(self, pool: BlockPool, eviction: TimedEviction) -> None:
        self._pool = pool
        self._eviction = eviction

    @property
    def due_ns(self) -> int:
        """When the next retention ends; far in the future where none does."""
        return self._eviction.due_ns

    def advance(self, now: int) -> None:
        """Blocks are freed at `now` from here on."""
        self._eviction.now = now

    def revert(self, now: int) -> None:
        """Ends the retention that is over at `now`."""
        pool, eviction = self._pool, self._eviction
        eviction.now = now
        while (piece := eviction.expired()) is not None:
            # Blocks of the run that are held, or were freed later, keep theirs.
            run = pool.split(piece.run, piece.low) if piece.low else piece.run
            run.keep = None
            eviction.revert(piece)
            if pool.log.events is not None:
                pool.log.add(EventKind.REVERTED, "", run.blocks[piece.low : piece.high])
