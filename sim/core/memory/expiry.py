"""End of retention: free blocks lose a priority whose time is over."""

from __future__ import annotations

from pagecast.sim.core.events import EventKind, EventLog
from pagecast.sim.core.memory.eviction import TimedEviction


class Expiry:
    """Ends the retention of free blocks in an eviction order."""

    def __init__(self, eviction: TimedEviction, log: EventLog) -> None:
        self._eviction = eviction
        self._log = log

    @property
    def due_ns(self) -> int:
        """When the next retention ends; far in the future where none does."""
        return self._eviction.due_ns

    def advance(self, now: int) -> None:
        """Blocks are freed at `now` from here on."""
        self._eviction.now = now

    def revert(self, now: int) -> None:
        """Ends the retention that is over at `now`."""
        eviction = self._eviction
        eviction.now = now
        while (extent := eviction.expired()) is not None:
            extent.keep = None
            eviction.revert(extent)
            if self._log.events is not None:
                self._log.add(EventKind.REVERTED, "", extent.blocks.tolist())
