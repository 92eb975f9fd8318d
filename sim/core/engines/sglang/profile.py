"""SGLang: its profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagecast.sim.core.drafter import Drafter
from pagecast.sim.core.engines.deployment import Deployment
from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.engines.sglang.defaults import defaults
from pagecast.sim.core.engines.sglang.inbox import Inbox
from pagecast.sim.core.engines.sglang.lifecycle import RadixLifecycle
from pagecast.sim.core.engines.sglang.memory import RadixMemory
from pagecast.sim.core.engines.sglang.mix import SglangMix
from pagecast.sim.core.engines.sglang.order import LongestPrefixFirst, SglangFcfs
from pagecast.sim.core.engines.sglang.settings import SglangSettings
from pagecast.sim.core.engines.sglang.stride import RadixStride
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import EventLog
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.parts import Parts
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.step import Step


@dataclass(frozen=True)
class SglangProfile(Profile):
    """SGLang's rules over a radix tree, for which its mix, stride and life cycle are made."""

    def defaults(self, deployment: Deployment) -> dict[str, Any]:
        """What SGLang's server takes."""
        return defaults(deployment)

    def check(self, limits: Limits, drafter: Drafter | None = None) -> None:
        """Errors: BadInput for what SGLang's rules here do not have."""
        if limits.policy == "priority":
            raise BadInput("the profile sglang has no priorities; choose the policy fcfs or lpm")
        if limits.tenants is not None and limits.tenants.fair:
            raise BadInput(
                "the profile sglang orders its queue and its tree itself: tenants may have ceilings (blocks) "
                "there, but no weights; leave weights out, or choose vllm"
            )
        if limits.host is not None or limits.swap_blocks or limits.partial_reuse:
            raise BadInput("the profile sglang has no host tier, swap space or partial reuse; choose vllm")
        super().check(limits, drafter)

    def parts(
        self, limits: Limits, log: EventLog, drafter: Drafter | None = None, *, numbered: bool = True
    ) -> Parts:
        """The parts of one replica's scheduler. Errors: BadInput as for `check`."""
        self.check(limits, drafter)
        settings = limits.settings(SglangSettings())
        running = self.running(limits)
        memory = RadixMemory(limits, log, settings.eviction)
        order = LongestPrefixFirst() if limits.policy == "lpm" else SglangFcfs()
        queue = Queue(order, memory)
        inbox = Inbox(settings.recv_interval, queue) if settings.recv_interval > 1 else None
        lifecycle = RadixLifecycle(limits, memory, queue, running, log, inbox)
        lifecycle.intake = None if self.intake is None else self.intake(limits)
        step = Step(lifecycle, self.drafting)
        mix = SglangMix(settings, memory, order, inbox)
        return Parts(lifecycle, step, mix, RadixStride(lifecycle, memory, step, mix))


SGLANG = SglangProfile(
    name="sglang",
    summary="batches of prompts or of decodes, memory reserved by the new-token ratio, radix tree",
    version="0.5.23",
    title="SGLang",
    option_names={
        "--tp": "tensor_parallel_size",
        "--tp-size": "tensor_parallel_size",
        "--mem-fraction-static": "gpu_memory_utilization",
        "--context-length": "max_model_len",
        "--max-running-requests": "max_num_seqs",
        "--page-size": "block_size",
        "--schedule-policy": "scheduling_policy",
    },
    publish_at_commit=True,
    pipelined=True,
    static_fraction=True,
    numbered=False,
)
