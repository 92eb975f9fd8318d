"""Cache policy: how a replica's cache is run otherwise than by its engine's own rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.eviction import Eviction
from pagecast.sim.core.memory.eviction_orders import (
    CostAware,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyFreed,
    SegmentedLru,
)
from pagecast.sim.core.memory.fair_eviction import FairEviction
from pagecast.sim.core.memory.priority_eviction import LowestPriority
from pagecast.sim.core.memory.ranked_eviction import RankedEviction
from pagecast.sim.core.memory.tenant_ledger import TenantLedger
from pagecast.sim.core.rules.rules import Profile

EvictionName = Literal["lru", "priority", "slru", "lfu", "fifo", "cost"]
EVICTIONS: tuple[str, ...] = get_args(EvictionName)
Recompute = Callable[[int], float]


def equal_cost(block: int) -> float:
    """The same for every block, where nothing tells what its prefill costs."""
    return 1.0


@dataclass(frozen=True)
class CachePolicy:
    """Rules that replace those of a profile; with the defaults it stays what it is.

    `eviction`: one of `EVICTIONS`. `protected_share`: of all blocks, what segmented LRU protects at most.
    `prefix_cap`: of all blocks, what the cost-aware order lets one prefix own. `recompute`: the time to
    compute the block of that number in a sequence.
    """

    eviction: str = "lru"
    protected_share: float = 0.8
    prefix_cap: float = 0.5
    recompute: Recompute = equal_cost

    def applied(self, profile: Profile) -> Profile:
        """The profile with these rules in place of its own. Errors: BadInput for a name that is not known."""
        if self.eviction not in EVICTIONS:
            raise BadInput(f"eviction order {self.eviction!r} is not known; choose {', '.join(EVICTIONS)}")
        return replace(profile, eviction=self._order_of(profile))

    def _order_of(self, profile: Profile) -> Callable[[Limits], Eviction]:
        """Makes the order: the profile's own, this policy's, or one of these for each tenant."""

        def make(limits: Limits) -> Eviction:
            plain = profile.eviction(limits)
            tenants = limits.tenants
            if tenants is not None and tenants.fair:
                each = partial(self._ranked, limits, plain.blanks_first)
                return FairEviction(tenants, each, TenantLedger(), blanks_first=plain.blanks_first)
            return plain if self.eviction == "lru" else self._ranked(limits, plain.blanks_first)

        return make

    def _ranked(self, limits: Limits, blanks_first: bool) -> RankedEviction:
        if self.eviction == "slru":
            protected = int(limits.num_blocks * self.protected_share)
            return SegmentedLru(protected, blanks_first=blanks_first)
        if self.eviction == "cost":
            most = max(int(limits.num_blocks * self.prefix_cap), 1)
            return CostAware(self.recompute, most, blanks_first=blanks_first)
        if self.eviction == "priority":
            return LowestPriority(blanks_first=blanks_first)
        if self.eviction == "lfu":
            return LeastFrequentlyUsed(blanks_first=blanks_first)
        if self.eviction == "fifo":
            return FirstInFirstOut(blanks_first=blanks_first)
        return LeastRecentlyFreed(blanks_first=blanks_first)
