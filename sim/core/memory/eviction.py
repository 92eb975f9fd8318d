"""Eviction of free blocks: which of them are taken next.

Freed blocks keep their content until their space is needed. The pool takes blocks from an extent's end, so
that a sequence loses its last block first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pagecast.sim.core.events import EventKind, EventLog
from pagecast.sim.core.memory.extent import Extent
from pagecast.sim.core.memory.tenant_ledger import TenantLedger
from pagecast.sim.core.retention import FOREVER


class Eviction:
    """The order in which a pool's free extents are taken.

    `first_freed_first`: the order is that in which extents became free, a sequence's end before what it
    follows; the pool keeps it by itself (`ExtentPool`). Where it is False, extents are added here
    (`RankedExtentPool`): those of `nexts` have `evictable() > 0`; only `at_once` blocks are taken of each.
    `blanks_first`: blocks without findable content are taken before all others (vLLM).
    `ledger`: the accounts of the tenants that it is fair to; None: it does not tell tenants apart.
    """

    first_freed_first: bool = False
    blanks_first: bool
    ledger: TenantLedger | None = None

    def add(self, extent: Extent) -> None:
        """Adds blocks that have just become free."""
        raise NotImplementedError

    def add_beside(self, extent: Extent, whole: Extent) -> None:
        """Adds an extent cut off the end of `whole`, to be taken just before it."""
        raise NotImplementedError

    def remove(self, extent: Extent) -> None:
        """Takes an extent out: its blocks are held again, or all were taken."""
        raise NotImplementedError

    def nexts(self) -> Callable[[], Extent]:
        """A function that returns the extent to take blocks from (there is one), to be called over and over
        while only the last blocks of each extent are taken."""
        raise NotImplementedError

    def at_once(self, extent: Extent) -> int:
        """How many of the last blocks of that extent are taken before the order is asked again."""
        return extent.evictable()

    def __iter__(self) -> Iterator[Extent]:
        """All extents, in any order."""
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

    def end_retention(self, now: int, log: EventLog) -> None:
        """Ends the retention that is over at `now`."""
        self.now = now
        while (extent := self.expired()) is not None:
            extent.keep = None
            self.revert(extent)
            if log.events is not None:
                log.add(EventKind.REVERTED, "", extent.blocks.tolist())

    def expired(self) -> Extent | None:
        """An extent whose retention has ended by now."""
        return None

    def revert(self, extent: Extent) -> None:
        """Puts an extent, which has no retention any more, behind all others of the default priority."""


class LeastRecentlyUsed(Eviction):
    """Least recently used first, a sequence's tail before its head: vLLM v1's free-block queue.

    The ring of `ExtentPool` is this order.
    """

    first_freed_first: bool = True

    def __init__(self, *, blanks_first: bool = True) -> None:
        self.blanks_first = blanks_first
