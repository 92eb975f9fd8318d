"""Cache rules: those that a cache policy puts in the place of an engine's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pagecast.sim.core.cache_policy import (
    EVICTIONS,
    CachePolicy,
    CostAware,
    ForCompletion,
    ForPrompt,
    Slru,
)
from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.intake import Intake, InTurn
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.eviction import Eviction
from pagecast.sim.core.memory.eviction_orders import (
    ORDERS,
    OrderSettings,
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

_VICTIMS: dict[str, Callable[[], Victim]] = {
    "newest": Newest,
    "least-progress": LeastProgress,
    "lowest-priority": LeastUrgent,
}
Recompute = Callable[[int], float]


def no_time(tokens: int) -> float:
    """A prompt takes 0 ns where no cost model says how long."""
    return 0.0


def _within(tokens_to_reserve: TokensToReserve, limits: Limits, request: Request) -> int:
    """A reservation of no more than the pool has, and a sequence may."""
    most = limits.num_blocks * limits.block_size
    return min(
        tokens_to_reserve(request), most if limits.max_model_len is None else min(most, limits.max_model_len)
    )


@dataclass(frozen=True)
class CacheRules:
    """The rules of a policy. `recompute`: the time to compute the block of that number in a sequence.

    `prefill_ns`: the time of a prompt, by which load is shed. `outputs`: the output lengths of a trace, for
    admission that reserves.
    """

    policy: CachePolicy
    recompute: Recompute = equal_cost
    prefill_ns: PrefillNs = no_time
    outputs: Sequence[int] = ()

    def applied(self, profile: Profile) -> Profile:
        """The profile with these rules in place of its own. Errors: BadInput for rules it cannot have."""
        policy = self.policy
        reserve = self._tokens_to_reserve()
        changed = replace(profile, eviction=self._order_of(profile))
        if policy.shed_ttft_s is not None:
            changed = replace(changed, intake=self._intake_of(profile, round(policy.shed_ttft_s * 1e9)))
        if reserve is None and policy.watermarks is None and policy.victim is None:
            return changed
        return changed.with_rules(partial(self._admission, reserve), self._victim)

    def _tokens_to_reserve(self) -> TokensToReserve | None:
        """What a request reserves; None for the prompt alone. Errors: BadInput without lengths of outputs."""
        match self.policy.admission:
            case ForPrompt():
                return None
            case ForCompletion():
                return completion
            case admission:
                return with_output(admission.output(self.outputs))

    def _admission(self, reserve: TokensToReserve | None, limits: Limits) -> Admission:
        if reserve is not None and limits.groups:
            raise BadInput("output is reserved for models whose layers all keep every token")
        rule: Admission = WholeSequence()
        if reserve is not None:
            rule = ReserveOutput(partial(_within, reserve, limits))
        marks = self.policy.watermarks
        return rule if marks is None else Watermarks(rule, *marks)

    def _victim(self, limits: Limits) -> Victim:
        by_priority = limits.policy == "priority"
        name = self.policy.victim or ("lowest-priority" if by_priority else "newest")
        return _VICTIMS[name]()

    def _intake_of(self, profile: Profile, shed_ns: int) -> Callable[[Limits], Intake]:
        """Makes the rule that sheds load, behind the profile's own."""

        def make(limits: Limits) -> Intake:
            shedding = ShedByTtft(shed_ns, self.prefill_ns)
            own = None if profile.intake is None else profile.intake(limits)
            return shedding if own is None else InTurn((own, shedding))

        return make

    def _order_of(self, profile: Profile) -> Callable[[Limits], Eviction]:
        """Makes the order: the profile's own, this policy's, or one of these for each tenant."""

        def make(limits: Limits) -> Eviction:
            plain = profile.eviction(limits)
            tenants = limits.tenants
            if tenants is not None and tenants.fair:
                each = partial(self._ranked, limits, plain.blanks_first)
                return FairEviction(tenants, each, TenantLedger(), blanks_first=plain.blanks_first)
            own = self._eviction_word() == "lru"
            return plain if own else self._ranked(limits, plain.blanks_first)

        return make

    def _ranked(self, limits: Limits, blanks_first: bool) -> RankedEviction:
        order = ORDERS[self._eviction_word()](self._order_settings(limits))
        return RankedEviction(order, blanks_first=blanks_first)

    def _eviction_word(self) -> str:
        """The word of the policy's order, by which `ORDERS` knows it."""
        return next(word for word, kind in EVICTIONS.items() if type(self.policy.eviction) is kind)

    def _order_settings(self, limits: Limits) -> OrderSettings:
        """The settings of the policy's order, in blocks."""
        match self.policy.eviction:
            case Slru(protected_share):
                return OrderSettings(most_protected=int(limits.num_blocks * protected_share))
            case CostAware(prefix_cap):
                most = max(int(limits.num_blocks * prefix_cap), 1)
                return OrderSettings(most_valued=most, recompute=self.recompute)
        return OrderSettings()
