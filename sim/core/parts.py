"""Parts of a scheduler: memory, queue, life cycle, step and stride, as limits and a profile ask for them."""

from __future__ import annotations

from pagecast.sim.core.drafter import Drafter
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import EventLog
from pagecast.sim.core.group_spec import KvKind
from pagecast.sim.core.hybrid_stride import HybridStride
from pagecast.sim.core.lifecycle import Lifecycle
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.fair_eviction import FairEviction
from pagecast.sim.core.memory.hybrid_memory import HybridMemory
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.memory.partial_reuse import PartialReuse
from pagecast.sim.core.memory.radix_memory import RadixMemory
from pagecast.sim.core.memory.tenant_ledger import TenantLedger
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.radix_lifecycle import RadixLifecycle
from pagecast.sim.core.radix_stride import RadixStride
from pagecast.sim.core.rules.rules import Profile
from pagecast.sim.core.rules.sglang import SglangMix
from pagecast.sim.core.running import Running
from pagecast.sim.core.step import Step
from pagecast.sim.core.stride import Stride
from pagecast.sim.core.tiers.offloading import Offloading
from pagecast.sim.core.tiers.tiered_offloading import TieredOffloading


class Parts:
    """The parts of one replica's scheduler, made for each other.

    Errors: BadInput where the profile and the limits do not go together.
    """

    def __init__(
        self,
        limits: Limits,
        profile: Profile,
        log: EventLog,
        drafter: Drafter | None,
        *,
        numbered: bool = True,
    ) -> None:
        limits.check()
        if drafter is not None:
            _check_drafter(limits, profile, drafter)
        self.log = log
        self.running = Running(
            limits.block_size,
            pipeline_depth=limits.pipeline_depth,
            at_commit=profile.publish_at_commit,
            whole_prompts=profile.publish_whole_prompts,
        )
        self.memory = _memory(limits, profile, log, self.running, numbered=numbered)
        self.queue = Queue(profile.order(limits), self.memory)
        if drafter is not None and drafter.recomputes_block:
            self.memory.leave_out_last_blocks()
        self.offloading = self._offloading(limits, profile)
        life = RadixLifecycle if isinstance(self.memory, RadixMemory) else Lifecycle
        self.lifecycle = life(
            limits,
            self.memory,
            self.queue,
            self.running,
            log,
            drafter,
            self.offloading,
            None if profile.intake is None else profile.intake(limits),
        )
        self.step = Step(self.lifecycle, self.memory, drafter)
        self.mix = profile.mix(limits) if not limits.groups else profile.hybrid_mix(limits)
        self.stride = self._stride()

    def _offloading(self, limits: Limits, profile: Profile) -> Offloading | None:
        if limits.host is None:
            return None
        if not profile.offloads:
            raise BadInput(f"the profile {profile.name} has no KV offloading; choose vllm")
        drops_last = self.memory.recomputes_block
        kind = TieredOffloading if limits.host.disk else Offloading
        return kind(limits.host, limits, self.memory, self.running, self.log, drops_last=drops_last)

    def _stride(self) -> Stride:
        if isinstance(self.mix, SglangMix) and isinstance(self.memory, RadixMemory):
            return RadixStride(self.lifecycle, self.memory, self.step, self.mix)
        if isinstance(self.memory, HybridMemory):
            return HybridStride(self.lifecycle, self.memory, self.step)
        return Stride(self.lifecycle, self.memory, self.step)


def _memory(limits: Limits, profile: Profile, log: EventLog, running: Running, *, numbered: bool) -> KvMemory:
    if limits.groups:
        ranks = profile.hybrid_ranks(limits)
        return HybridMemory(limits, log, running.findable, ranks, numbered=numbered)
    if profile.memory is not None:
        return profile.memory(limits, log)
    eviction = profile.eviction(limits)
    ledger = None if limits.tenants is None else TenantLedger()
    if isinstance(eviction, FairEviction):
        ledger = eviction.ledger
    partial = None
    if limits.partial_reuse and limits.caching:
        partial = PartialReuse(limits.block_size, copies=limits.partial_reuse == "copy")
    return KvMemory(
        limits.num_blocks,
        limits.block_size,
        log=log,
        progress=running.findable,
        caching=limits.caching,
        eviction=eviction,
        ledger=ledger,
        partial_reuse=partial,
        groups=profile.groups,
    )


def _check_drafter(limits: Limits, profile: Profile, drafter: Drafter) -> None:
    """Errors: BadInput where requests can't speculate under this profile and these limits."""
    if profile.publish_at_commit:
        raise BadInput(f"the profile {profile.name} has no speculative decoding; choose vllm")
    chunked = any(group.kind is KvKind.CHUNK for group in limits.groups)
    if chunked and drafter.recomputes_block:
        raise BadInput("EAGLE and MTP do not work with chunked local attention (as in vLLM)")
    reserved = drafter.reserved * limits.max_num_seqs
    if limits.max_num_batched_tokens <= reserved:
        raise BadInput(
            f"max_num_batched_tokens ({limits.max_num_batched_tokens}) leaves no token beside the {reserved} "
            f"that the drafter needs for max_num_seqs ({limits.max_num_seqs}); raise one or lower the other"
        )
