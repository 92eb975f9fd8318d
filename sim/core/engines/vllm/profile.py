"""vLLM v1: its profile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from pagecast.sim.core.drafter import Drafter
from pagecast.sim.core.encoder import Encoder
from pagecast.sim.core.engines.deployment import Deployment
from pagecast.sim.core.engines.profile import Profile, queue_order
from pagecast.sim.core.engines.vllm.aligned import ChunkEnds, caches_states
from pagecast.sim.core.engines.vllm.defaults import defaults
from pagecast.sim.core.engines.vllm.hybrid import VllmHybridMix
from pagecast.sim.core.engines.vllm.mix import VllmMix
from pagecast.sim.core.engines.vllm.settings import VllmSettings
from pagecast.sim.core.engines.vllm.tuned import Tuning, WithMargin
from pagecast.sim.core.engines.vllm.versions import OLDEST, VERSIONS, VllmRules, rules_of
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import EventLog
from pagecast.sim.core.intake import Intake
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.memory.window_rules import WindowRules
from pagecast.sim.core.parts import Parts
from pagecast.sim.core.queue import Order
from pagecast.sim.core.rules.admission import WholeSequence
from pagecast.sim.core.rules.fair_order import WeightedFair
from pagecast.sim.core.rules.order import FirstComeFirstServed
from pagecast.sim.core.rules.queue_limits import QueueLimits
from pagecast.sim.core.rules.rules import MakeAdmission, MakeVictim, Mix, Victim
from pagecast.sim.core.rules.victim import LeastUrgent, Newest
from pagecast.sim.core.running import Running
from pagecast.sim.core.stretch.single import SingleSteps
from pagecast.sim.core.tiers.offloading import Offloading
from pagecast.sim.core.tiers.tiered_offloading import TieredOffloading

_EXPORT_TOKENS = 64  # FlashInfer's kernel for the delta rule exports states at multiples of this


def vllm_admission(limits: Limits) -> WholeSequence | WithMargin:
    """vLLM's admission: the whole sequence has to fit, or what settings ask for (`WithMargin`)."""
    settings = limits.settings(VllmSettings())
    plain = not settings.watermark and settings.scheduler_reserve_full_isl
    return WholeSequence() if plain else WithMargin(settings, limits)


def queue_limits(limits: Limits) -> Intake | None:
    """vLLM's limits of the queue; None where there are none."""
    settings = limits.settings(VllmSettings())
    bounds = settings.max_num_queued_reqs, settings.max_num_queued_tokens
    return None if bounds == (None, None) else QueueLimits(*bounds)


def newest_or_least_urgent(limits: Limits) -> Victim:
    """vLLM's victim: the newest request, or with the policy priority the least urgent."""
    return LeastUrgent() if limits.policy == "priority" else Newest()


def first_back_first(limits: Limits) -> Order:
    """The order since 0.31: a request that is put back goes ahead of those passed over too."""
    order = queue_order(limits)
    return (
        FirstComeFirstServed(passed_over_stay_ahead=False) if type(order) is FirstComeFirstServed else order
    )


@dataclass(frozen=True)
class VllmProfile(Profile):
    """vLLM's step, with its admission and preemption or others; `rules`: those of a version."""

    admission: MakeAdmission = vllm_admission
    victim: MakeVictim = newest_or_least_urgent
    rules: VllmRules = OLDEST

    def mix(self, limits: Limits) -> Mix:
        """The step for layers that all keep every token."""
        return VllmMix(self.admission(limits), self.victim(limits), self.rules, self._tuning(limits))

    def hybrid_mix(self, limits: Limits, memory: KvMemory) -> Mix:
        """The step for layers that keep different tokens."""
        tuning = self._tuning(limits)
        return VllmHybridMix(self.admission(limits), self.victim(limits), self.rules, memory, tuning)

    def window_rules(self) -> WindowRules:
        """Those of the version."""
        return self.rules.windows

    def _tuning(self, limits: Limits) -> Tuning | None:
        settings = limits.settings(VllmSettings())
        if settings == VllmSettings() and not caches_states(limits.groups):
            return None
        own = self.admission is vllm_admission
        if not own and (settings.watermark or not settings.scheduler_reserve_full_isl):
            raise BadInput(
                "watermark and scheduler_reserve_full_isl belong to vLLM's own admission; leave out "
                "admission, watermarks and preemption_victim"
            )
        return Tuning(settings, limits, self.rules)

    def check(self, limits: Limits, drafter: Drafter | None = None) -> None:
        """Errors: BadInput for settings that this version does not have, or that leave prompts waiting."""
        super().check(limits, drafter)
        if caches_states(limits.groups) and not self.rules.finds_states:
            raise BadInput(
                f"prefix caching of recurrent states is not simulated for vLLM {self.version}, but for "
                f"{VERSIONS[-1]}; turn enable_prefix_caching off"
            )
        settings = limits.settings(VllmSettings())
        settings.check_version(self.version)
        tokens = settings.max_num_scheduled_tokens
        if (
            tokens is not None
            and drafter is not None
            and drafter.reserved
            and self.drafting.slots_per_request
        ):
            raise BadInput(
                "max_num_scheduled_tokens is not modelled beside a drafter that takes tokens of the step"
            )
        step = limits.max_num_batched_tokens if tokens is None else min(tokens, limits.max_num_batched_tokens)
        if not settings.chunked_prefill and (limits.max_model_len is None or limits.max_model_len > step):
            raise BadInput(
                f"without chunked prefill a prompt must fit in one step, and max_model_len "
                f"({limits.max_model_len}) is more than its {step} tokens; lower it, or raise "
                "max_num_batched_tokens"
            )

    def defaults(self, deployment: Deployment) -> dict[str, Any]:
        """What `vllm serve` takes."""
        return defaults(self.version, deployment)

    def _at(self, version: str) -> Self:
        rules = rules_of(version)
        order = queue_order if rules.passed_over_stay_ahead else first_back_first
        return replace(
            self,
            version=version,
            rules=rules,
            drafting=rules.drafting,
            order=order,
            clips_max_tokens=rules.clips_max_tokens,
        )

    def with_rules(self, admission: MakeAdmission, victim: MakeVictim) -> Self:
        """The profile with another admission and preemption."""
        return replace(self, admission=admission, victim=victim)

    def held_batches(self, pipeline_depth: int) -> int:
        """One; since 0.26, where blocks leave a window once a step is computed, all that are planned."""
        return 1 + pipeline_depth if self.rules.windows.leaves_computed else 1

    @property
    def finds_states(self) -> bool:
        """True since 0.33, whose rules are known."""
        return self.rules.finds_states

    def cached_states(self, *, exported: bool, whole: bool) -> tuple[int, int]:
        """The state at the last block's end; since 0.33 one more where kernels export it."""
        if not (exported and self.rules.exports_states):
            return 1, 1
        return 2, 1 if whole else _EXPORT_TOKENS

    def parts(
        self, limits: Limits, log: EventLog, drafter: Drafter | None = None, *, numbered: bool = True
    ) -> Parts:
        """The parts of one replica's scheduler. Errors: BadInput as for `check`."""
        if limits.groups:
            limits = replace(limits, held_batches=self.held_batches(limits.pipeline_depth))
        parts = super().parts(limits, log, drafter, numbered=numbered)
        settings = limits.settings(VllmSettings())
        tuning = parts.mix.tuning if isinstance(parts.mix, VllmMix) else None
        if settings.encoder_tokens is not None and tuning is not None:
            ahead = int(drafter is not None and drafter.recomputes_block)
            encoder = Encoder(settings.encoder_tokens, self.rules.encoder, parts.lifecycle.running, ahead)
            tuning.encoder = parts.lifecycle.encoder = encoder
        if settings.max_num_scheduled_tokens is not None:
            parts.step.bound(settings.max_num_scheduled_tokens)
        lifecycle = parts.lifecycle
        scattered = caches_states(limits.groups)
        if scattered:
            assert isinstance(lifecycle.memory, KvMemory) and tuning is not None
            lifecycle.memory.read_ahead(0 if drafter is None else drafter.lookahead)
            tuning.ends = ChunkEnds(limits, settings, lifecycle.memory)
        if scattered or (settings.prefill_schedule_interval > 1 and self.rules.keeps_interval):
            parts = parts._replace(stride=SingleSteps(lifecycle, lifecycle.memory, parts.step))
        return parts

    def holding_order(self, limits: Limits, order: Order) -> Order | None:
        """The order of requests that wait for a load, where they come before those of `order`."""
        if self.rules.passed_over_stay_ahead or limits.host is None:
            return None
        return order.beside() if isinstance(order, WeightedFair) else self.order(limits)

    def offloading(
        self, limits: Limits, memory: KvMemory, running: Running, log: EventLog
    ) -> Offloading | None:
        """vLLM's OffloadingConnector, with a disk behind it or without; None where there is no host tier."""
        if limits.host is None:
            return None
        kind = TieredOffloading if limits.host.disk else Offloading
        hit_ends = None
        if self.rules.windows.keeps_boundaries and limits.groups:
            hit_ends = memory.hit_ends
        return kind(limits.host, limits, memory, running, log, self.rules.offload, hit_ends)


VLLM = VllmProfile(
    name="vllm",
    summary="chunked prefill in mixed batches, running requests first, preemption by recompute",
    version=VERSIONS[0],
    title="vLLM",
    versions=VERSIONS,
    option_names={"-tp": "tensor_parallel_size"},
    keeps_planned=True,
    pipelined=True,
    offloads=True,
    hybrid=True,
    holds_longest=True,
    packs_latents=True,
    intake=queue_limits,
    drafting=OLDEST.drafting,
)


def vllm(version: str) -> VllmProfile:
    """vLLM as a version decides, one of `VERSIONS`. Errors: BadInput."""
    return VLLM.at(version)
