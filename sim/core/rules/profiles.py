"""The profiles there are, by name."""

from __future__ import annotations

from collections.abc import Callable

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import EventLog
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.eviction import Eviction, LeastRecentlyUsed
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.memory.radix_memory import RadixMemory
from pagecast.sim.core.queue import Order
from pagecast.sim.core.rules.admission import WholeSequence
from pagecast.sim.core.rules.fair_order import WeightedFair
from pagecast.sim.core.rules.nano_vllm import NanoVllmMix
from pagecast.sim.core.rules.order import ByPriority, FirstComeFirstServed
from pagecast.sim.core.rules.rules import Mix, Profile, Victim
from pagecast.sim.core.rules.sglang import SglangMix
from pagecast.sim.core.rules.sglang_order import LongestPrefixFirst, SglangFcfs
from pagecast.sim.core.rules.trtllm import Capacity, FitsWhole, GuaranteedNoEvict, MaxUtilization, TrtllmMix
from pagecast.sim.core.rules.victim import LeastUrgent, Newest
from pagecast.sim.core.rules.vllm import VllmMix
from pagecast.sim.core.rules.vllm_hybrid import VllmHybridMix
from pagecast.sim.core.rules.vllm_offloading import VllmHybridOffloadingMix, VllmOffloadingMix
from pagecast.sim.core.sglang_settings import SglangSettings
from pagecast.sim.core.trtllm_settings import TrtllmSettings


def _order(limits: Limits) -> Order:
    if limits.policy == "lpm":
        raise BadInput("the policy lpm is SGLang's; choose fcfs or priority, or the profile sglang")
    if limits.tenants is not None and limits.tenants.fair:
        return WeightedFair(limits.tenants)
    return ByPriority() if limits.policy == "priority" else FirstComeFirstServed()


def _victim(limits: Limits) -> Victim:
    return LeastUrgent() if limits.policy == "priority" else Newest()


def _vllm_mix(limits: Limits) -> Mix:
    kind = VllmMix if limits.host is None else VllmOffloadingMix
    return kind(WholeSequence(), _victim(limits))


def _vllm_hybrid_mix(limits: Limits) -> Mix:
    kind = VllmHybridMix if limits.host is None else VllmHybridOffloadingMix
    return kind(WholeSequence(), _victim(limits))


def _nano_vllm_mix(limits: Limits) -> Mix:
    if limits.swap_blocks or limits.partial_reuse:
        raise BadInput("the profile nano-vllm has no swap space and no partial reuse; choose vllm")
    return NanoVllmMix(WholeSequence(), Newest())


def _vllm_eviction(limits: Limits) -> Eviction:
    return LeastRecentlyUsed(blanks_first=limits.caching or limits.host is not None)


def _nano_vllm_eviction(limits: Limits) -> Eviction:
    return LeastRecentlyUsed(blanks_first=False)


def _sglang_settings(limits: Limits) -> SglangSettings:
    settings = limits.sglang or SglangSettings()
    settings.check()
    return settings


def _sglang_order(limits: Limits) -> Order:
    if limits.policy == "priority":
        raise BadInput("the profile sglang has no priorities; choose the policy fcfs or lpm")
    if limits.tenants is not None and limits.tenants.fair:
        raise BadInput(
            "the profile sglang orders its queue and its tree itself: tenants may have ceilings (blocks) "
            "there, but no weights; leave weights out, or choose vllm"
        )
    if limits.host is not None or limits.swap_blocks or limits.partial_reuse:
        raise BadInput("the profile sglang has no host tier, swap space or partial reuse; choose vllm")
    return LongestPrefixFirst() if limits.policy == "lpm" else SglangFcfs()


def _sglang_mix(limits: Limits) -> Mix:
    return SglangMix(_sglang_settings(limits))


def _sglang_memory(limits: Limits, log: EventLog) -> KvMemory:
    return RadixMemory(limits, log, _sglang_settings(limits).eviction)


VLLM = Profile(
    name="vllm",
    summary="vLLM v1 (0.24 to 0.33): chunked prefill in mixed batches, running requests first, "
    "preemption by recompute, newest first",
    order=_order,
    mix=_vllm_mix,
    hybrid_mix=_vllm_hybrid_mix,
    eviction=_vllm_eviction,
    pipelined=True,
    offloads=True,
)
NANO_VLLM = Profile(
    name="nano-vllm",
    summary="nano-vLLM: a step prefills or decodes; waiting prompts go first; blocks are published "
    "when their step is committed",
    order=_order,
    mix=_nano_vllm_mix,
    eviction=_nano_vllm_eviction,
    publish_at_commit=True,
    whole_prompt=True,
)
SGLANG = Profile(
    name="sglang",
    summary="SGLang (0.5.23): batches of prompts or of decodes, memory reserved by the new-token ratio, "
    "retraction, radix tree",
    order=_sglang_order,
    mix=_sglang_mix,
    eviction=_vllm_eviction,
    memory=_sglang_memory,
    publish_at_commit=True,
    pipelined=True,
)


def _trtllm_settings(limits: Limits) -> TrtllmSettings:
    settings = limits.trtllm or TrtllmSettings()
    settings.check()
    unit = settings.unit or limits.block_size
    if settings.chunked_context and unit > limits.max_num_batched_tokens:
        raise BadInput(
            f"a chunk of {unit} tokens does not fit in max_num_batched_tokens "
            f"({limits.max_num_batched_tokens}); raise it, or lower block_size"
        )
    if limits.policy != "fcfs":
        raise BadInput("TensorRT-LLM serves requests as they come; choose the policy fcfs")
    if limits.swap_blocks or limits.host is not None:
        raise BadInput("the profiles of TensorRT-LLM have no swap space and no host tier; choose vllm")
    return settings


def _trtllm(name: str, summary: str, capacity: Callable[[], Capacity]) -> Profile:
    return Profile(
        name=name,
        summary=f"TensorRT-LLM (V1 scheduler): {summary}; whole prompts' blocks, context chunks",
        order=_order,
        mix=lambda limits: TrtllmMix(capacity(), limits, _trtllm_settings(limits)),
        eviction=_vllm_eviction,
        intake=lambda limits: FitsWhole(limits, _trtllm_settings(limits)),
        publish_at_commit=True,
        publish_whole_prompts=True,
        whole_prompt=True,
        pipelined=True,
    )


TRTLLM = (
    _trtllm("trtllm-guaranteed-no-evict", "admits what can run to its end", GuaranteedNoEvict),
    _trtllm("trtllm-max-utilization", "admits what fits now, and pauses the last begun", MaxUtilization),
    _trtllm(
        "trtllm-static",
        "a batch of requests ends before another begins",
        lambda: GuaranteedNoEvict(static=True),
    ),
)
PROFILES = {profile.name: profile for profile in (VLLM, NANO_VLLM, SGLANG, *TRTLLM)}


def profile(name: str) -> Profile:
    """The profile of that name. Errors: BadInput, with the names there are."""
    try:
        return PROFILES[name]
    except KeyError:
        raise BadInput(f"profile {name!r} is not known; choose one of {', '.join(PROFILES)}") from None
