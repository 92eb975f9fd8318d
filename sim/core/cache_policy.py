"""Cache policy: how a replica's cache is run otherwise than by its engine's own rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.intake import Intake, InTurn
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.eviction import Eviction
from pagecast.sim.core.memory.eviction_orders import (
    ORDERS,
    POOL_ORDERS,
    REUSE_ORDERS,
    EvictionOrder,
    OrderSettings,
    ReuseOrder,
    equal_cost,
)
from pagecast.sim.core.memory.fair_eviction import FairEviction
from pagecast.sim.core.memory.ranked_eviction import RankedEviction
from pagecast.sim.core.memory.tenant_ledger import TenantLedger
from pagecast.sim.core.request import Request
from pagecast.sim.core.rules.admission import WholeSequence
from pagecast.sim.core.rules.reserving import (
    ReserveOutput,
    TokensToReserve,
    Watermarks,
    completion,
    with_output,
)
from pagecast.sim.core.rules.rules import Admission, Victim
from pagecast.sim.core.rules.shedding import PrefillNs, ShedByTtft
from pagecast.sim.core.rules.victim import LeastProgress, LeastUrgent, Newest

AdmissionName = Literal["prompt", "completion", "expected", "maximum"]
ADMISSIONS: tuple[str, ...] = get_args(AdmissionName)
VictimName = Literal["newest", "least-progress", "lowest-priority"]
VICTIMS: tuple[str, ...] = get_args(VictimName)
_VICTIMS: dict[str, Callable[[], Victim]] = {
    "newest": Newest,
    "least-progress": LeastProgress,
    "lowest-priority": LeastUrgent,
}
Recompute = Callable[[int], float]


def no_time(tokens: int) -> float:
    """Nothing, where nothing tells how long a prompt takes."""
    return 0.0


def _within(tokens_to_reserve: TokensToReserve, limits: Limits, request: Request) -> int:
    """A reservation of no more than the pool has, and a sequence may."""
    most = limits.num_blocks * limits.block_size
    return min(
        tokens_to_reserve(request), most if limits.max_model_len is None else min(most, limits.max_model_len)
    )


@dataclass(frozen=True)
class CachePolicy:
    """Rules that replace those of a profile; with the defaults it stays what it is.

    `eviction`: one of `POOL_ORDERS`. `protected_share`: of all blocks, what segmented LRU protects at most.
    `prefix_cap`: of all blocks, what the cost-aware order lets one prefix own. `recompute`: the time to
    compute the block of that number in a sequence.

    `admission`: one of `ADMISSIONS`; `expected_output` and `most_output` are the tokens that `expected` and
    `maximum` reserve for. `watermarks`: the shares of all blocks, low and high, between which admission stops
    and starts. `shed_ns`: the predicted TTFT above which a request is rejected, by `prefill_ns`. `victim`:
    one of `VICTIMS`, or None for the profile's.
    """

    eviction: str = "lru"
    protected_share: float = 0.8
    prefix_cap: float = 0.5
    recompute: Recompute = equal_cost
    admission: str = "prompt"
    expected_output: int = 1
    most_output: int = 1
    watermarks: tuple[float, float] | None = None
    shed_ns: int | None = None
    prefill_ns: PrefillNs = no_time
    victim: str | None = None

    def applied(self, profile: Profile) -> Profile:
        """The profile with these rules in place of its own. Errors: BadInput for a name that is not known."""
        if self.eviction not in POOL_ORDERS:
            raise BadInput(f"eviction order {self.eviction!r} is not known; choose {', '.join(POOL_ORDERS)}")
        changed = replace(profile, eviction=self._order_of(profile), hybrid_order=self._hybrid_order)
        if self.shed_ns is not None:
            changed = replace(changed, intake=self._intake_of(profile))
        if self.admission == "prompt" and self.watermarks is None and self.victim is None:
            return changed
        return changed.with_rules(self._admission, self._victim)

    def _admission(self, limits: Limits) -> Admission:
        if self.admission != "prompt" and limits.groups:
            raise BadInput("output is reserved for models whose layers all keep every token")
        rule: Admission = WholeSequence()
        if self.admission != "prompt":
            tokens_to_reserve: TokensToReserve = completion
            if self.admission != "completion":
                expected = self.admission == "expected"
                tokens_to_reserve = with_output(self.expected_output if expected else self.most_output)
            rule = ReserveOutput(partial(_within, tokens_to_reserve, limits))
        return rule if self.watermarks is None else Watermarks(rule, *self.watermarks)

    def _victim(self, limits: Limits) -> Victim:
        by_priority = limits.policy == "priority"
        name = self.victim or ("lowest-priority" if by_priority else "newest")
        return _VICTIMS[name]()

    def _intake_of(self, profile: Profile) -> Callable[[Limits], Intake]:
        """Makes the rule that sheds load, behind the profile's own."""
        shed_ns = self.shed_ns
        assert shed_ns is not None

        def make(limits: Limits) -> Intake:
            shedding = ShedByTtft(shed_ns, self.prefill_ns)
            return shedding if profile.intake is None else InTurn((profile.intake(limits), shedding))

        return make

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

    def _hybrid_order(self, limits: Limits) -> ReuseOrder | None:
        """The order for models whose layers keep different tokens; None: vLLM's. Errors: BadInput."""
        if self.eviction == "lru":
            return None
        if self.eviction not in REUSE_ORDERS:
            *others, last = REUSE_ORDERS
            raise BadInput(
                f"eviction {self.eviction} may rank a block below those that need it, and layers of this "
                f"model keep different tokens; choose {', '.join(others)} or {last}, "
                "or give disable_hybrid_kv_cache_manager"
            )
        return REUSE_ORDERS[self.eviction](self._order_settings(limits))

    def _ranked(self, limits: Limits, blanks_first: bool) -> RankedEviction:
        order: EvictionOrder = ORDERS[self.eviction](self._order_settings(limits))
        return RankedEviction(order, blanks_first=blanks_first)

    def _order_settings(self, limits: Limits) -> OrderSettings:
        return OrderSettings(
            most_protected=int(limits.num_blocks * self.protected_share),
            most_valued=max(int(limits.num_blocks * self.prefix_cap), 1),
            recompute=self.recompute,
        )
