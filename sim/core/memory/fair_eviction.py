"""Eviction that is fair to tenants: the one with most cached content for its weight loses content first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pagecast.sim.core.memory.eviction import LeastRecentlyUsed, TimedEviction
from pagecast.sim.core.memory.ranked_eviction import RankedEviction
from pagecast.sim.core.memory.run import FreePiece
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
        self.leaves_first = False
        self.blanks_first = blanks_first
        self.ledger = ledger
        self.cached = ledger.cached
        self.orders: dict[str, RankedEviction] = {}
        self._tenants = tenants
        self._make = make
        self._blank = LeastRecentlyUsed()
        self._place: dict[FreePiece, RankedEviction] = {}
        self._weights: dict[str, float] = {}
        self._timed: list[TimedEviction] = []  # the orders in which retention ends with time
        self._ends = False  # whether some retention had a duration

    def add(self, piece: FreePiece) -> None:
        """Adds a piece to its tenant's order."""
        if not piece.run.published:
            self._blank.add(piece)
            return
        order = self._order_of(piece.run.tenant)
        if self._timed:
            order.now = self.now
            keep = piece.run.keep
            self._ends = self._ends or (keep is not None and keep.duration_ns is not None)
        self._place[piece] = order
        order.add(piece)

    def _order_of(self, tenant: str) -> RankedEviction:
        order = self.orders.get(tenant)
        if order is None:
            order = self.orders[tenant] = self._make()
            self._weights[tenant] = self._tenants.share(tenant).weight
            timed = order.timed
            if timed is not None:
                self._timed.append(timed)
        return order

    def add_beside(self, piece: FreePiece, place: FreePiece) -> None:
        """Adds a piece with the rank of the one it was cut off."""
        order = self._place.get(place)
        if order is None:
            self._blank.add_beside(piece, place)
            return
        self._place[piece] = order
        order.add_beside(piece, place)

    def remove(self, piece: FreePiece) -> None:
        """Takes a piece out; content of another tenant may have waited for it."""
        order = self._place.pop(piece, None)
        if order is None:
            self._blank.remove(piece)
            return
        order.remove(piece)
        self.lose_front(piece)

    def lose_front(self, piece: FreePiece) -> None:
        """Lets what precedes a piece be evicted, which may be another tenant's."""
        parent = piece.run.parent
        if parent is not None:
            self._order_of(parent.tenant).wake(parent.free or ())

    def next(self) -> FreePiece:
        """The next piece of the tenant that is furthest above its share."""
        return next(self._in_turn())

    def nexts(self) -> Callable[[], FreePiece]:
        """`next`, to be called over and over while only the last blocks of each piece are taken."""
        return self._in_turn().__next__

    def at_once(self, piece: FreePiece) -> int:
        """As many as the order of the piece's tenant takes at once."""
        order = self._place.get(piece)
        return piece.evictable() if order is None else order.at_once(piece)

    def _in_turn(self) -> Iterator[FreePiece]:
        cached = self.cached
        # Nobody gains content meanwhile.
        weights = [(tenant, weight) for tenant, weight in self._weights.items() if cached.get(tenant)]
        blanks = self._blank.ring
        firsts: dict[str, FreePiece] = {}  # the first piece of each tenant, where that is sure not to change
        while True:
            furthest, most = "", -1.0
            for tenant, weight in weights:
                share = cached[tenant] / weight
                if share > most:
                    furthest, most = tenant, share
            piece = firsts.get(furthest)
            if piece is None:
                piece = blanks.after
                if piece.high == piece.low:
                    order = self._order_of(furthest)
                    first = order.first()
                    piece = self._first_of_others() if first is None else first
                    if first is not None and not (order.gains or piece.run.children):
                        firsts[furthest] = piece
            yield piece
            if piece.high == piece.low:
                # It is gone, and others may be evicted now.
                firsts.clear()

    def _first_of_others(self) -> FreePiece:
        """The next piece where the tenant furthest above its share has none to be evicted."""
        piece = self._next_of_others()
        if piece is None:
            # What followed the parked pieces was taken over or withdrawn.
            for order in self.orders.values():
                order.wake_all()
            piece = self._next_of_others()
        assert piece is not None, "free blocks, and none can be evicted"
        return piece

    def _next_of_others(self) -> FreePiece | None:
        """The next piece of the tenant furthest above its share that has one to be evicted."""
        cached, weights = self.cached, self._weights
        for tenant in sorted(weights, key=lambda name: -cached[name] / weights[name]):
            piece = self.orders[tenant].first()
            if piece is not None:
                return piece
        return None

    def __iter__(self) -> Iterator[FreePiece]:
        """All pieces, those without content first."""
        yield from self._blank
        yield from self._place

    # ---- durations, where the tenants' orders have them

    @property
    def timed(self) -> TimedEviction | None:
        """Itself, where retention ends with time in the tenants' orders."""
        return None if self._order_of("").timed is None else self

    @property
    def due_ns(self) -> int:
        """When the next priority ends."""
        return min([order.due_ns for order in self._timed]) if self._ends else FOREVER

    def expired(self) -> FreePiece | None:
        """A piece whose priority has ended by now; None: there is none."""
        for order in self._timed:
            order.now = self.now
            piece = order.expired()
            if piece is not None:
                return piece
        return None

    def revert(self, piece: FreePiece) -> None:
        """Puts a piece behind all others of the default priority."""
        self._place[piece].revert(piece)

    def figures(self) -> dict[str, object]:
        """The figures of each tenant's order, for a replay's summary."""
        counted = {tenant: order.figures() for tenant, order in self.orders.items()}
        return {"tenants": counted} if any(counted.values()) else {}
