"""Eviction that is fair to tenants: the one with most cached content for its weight loses content first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pagecast.sim.core.memory.eviction import TimedEviction
from pagecast.sim.core.memory.extent import Extent
from pagecast.sim.core.memory.ranked_eviction import RankedEviction
from pagecast.sim.core.memory.tenant_ledger import TenantLedger
from pagecast.sim.core.retention import FOREVER
from pagecast.sim.core.tenants import Tenants


class FairEviction(TimedEviction):
    """An order of its own for each tenant (`make`), over one pool.

    Blocks without content go first, then the content of the tenant that has the most cached blocks, divided
    by its weight. Content that others' blocks follow waits, as in every order.
    """

    def __init__(
        self,
        tenants: Tenants,
        make: Callable[[], RankedEviction],
        ledger: TenantLedger,
        *,
        blanks_first: bool = True,
    ) -> None:
        self.blanks_first = blanks_first
        self.ledger = ledger
        self.cached = ledger.cached
        self.orders: dict[str, RankedEviction] = {}
        self._tenants = tenants
        self._make = make
        self._blank: dict[Extent, None] = {}  # without content, in the order in which they go
        self._orders_of: dict[Extent, RankedEviction] = {}
        self._weights: dict[str, float] = {}
        self._timed: list[TimedEviction] = []  # the orders in which retention ends with time
        self._ends = False  # whether some retention had a duration

    def add(self, extent: Extent) -> None:
        """Adds an extent to its tenant's order."""
        if extent.key is None:
            self._blank[extent] = None
            return
        order = self._order_of(extent.tenant)
        if self._timed:
            order.now = self.now
            keep = extent.keep
            self._ends = self._ends or (keep is not None and keep.duration_ns is not None)
        self._orders_of[extent] = order
        order.add(extent)

    def _order_of(self, tenant: str) -> RankedEviction:
        order = self.orders.get(tenant)
        if order is None:
            order = self.orders[tenant] = self._make()
            self._weights[tenant] = self._tenants.share(tenant).weight
            timed = order.timed
            if timed is not None:
                self._timed.append(timed)
        return order

    def add_beside(self, extent: Extent, whole: Extent) -> None:
        order = self._orders_of[extent] = self._orders_of[whole]
        order.add_beside(extent, whole)

    def remove(self, extent: Extent) -> None:
        order = self._orders_of.pop(extent, None)
        if order is None:
            del self._blank[extent]
            return
        order.remove(extent)
        if extent.parent is not None:
            self._order_of(extent.parent.tenant).wake((extent.parent,))

    def nexts(self) -> Callable[[], Extent]:
        """The next extent of the tenant that is furthest above its share, each time."""
        return self._in_turn().__next__

    def at_once(self, extent: Extent) -> int:
        """As many as the order of the extent's tenant takes at once."""
        order = self._orders_of.get(extent)
        return extent.evictable() if order is None else order.at_once(extent)

    def _in_turn(self) -> Iterator[Extent]:
        cached = self.cached
        # Nobody gains content meanwhile.
        weights = [(tenant, weight) for tenant, weight in self._weights.items() if cached.get(tenant)]
        blanks = self._blank
        firsts: dict[str, Extent] = {}  # the first extent of each tenant, where that is sure not to change
        while True:
            furthest, most = "", -1.0
            for tenant, weight in weights:
                share = cached[tenant] / weight
                if share > most:
                    furthest, most = tenant, share
            extent = firsts.get(furthest)
            if extent is None:
                extent = next(iter(blanks), None)
                if extent is None:
                    order = self._order_of(furthest)
                    first = order.first()
                    extent = self._first_of_others() if first is None else first
                    if first is not None and not (order.gains or extent.children):
                        firsts[furthest] = extent
            yield extent
            if not extent.blocks:
                # It is gone, and others may be evicted now.
                firsts.clear()

    def _first_of_others(self) -> Extent:
        """The next extent where the tenant furthest above its share has none to be evicted."""
        extent = self._next_of_others()
        if extent is None:
            # What followed the parked extents was taken over or withdrawn.
            for order in self.orders.values():
                order.wake_all()
            extent = self._next_of_others()
        assert extent is not None, "free blocks, and none can be evicted"
        return extent

    def _next_of_others(self) -> Extent | None:
        """The next extent of the tenant furthest above its share that has one to be evicted."""
        cached, weights = self.cached, self._weights
        for tenant in sorted(weights, key=lambda name: -cached[name] / weights[name]):
            extent = self.orders[tenant].first()
            if extent is not None:
                return extent
        return None

    def __iter__(self) -> Iterator[Extent]:
        yield from self._blank
        yield from self._orders_of

    # ---- durations, where the tenants' orders have them

    @property
    def timed(self) -> TimedEviction | None:
        return None if self._order_of("").timed is None else self

    @property
    def due_ns(self) -> int:
        return min([order.due_ns for order in self._timed]) if self._ends else FOREVER

    def expired(self) -> Extent | None:
        for order in self._timed:
            order.now = self.now
            extent = order.expired()
            if extent is not None:
                return extent
        return None

    def revert(self, extent: Extent) -> None:
        self._orders_of[extent].revert(extent)

    def figures(self) -> dict[str, object]:
        counted = {tenant: order.figures() for tenant, order in self.orders.items()}
        return {"tenants": counted} if any(counted.values()) else {}
