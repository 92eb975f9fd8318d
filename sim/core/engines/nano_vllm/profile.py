"""nano-vLLM: its profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagecast.sim.core.drafter import Drafter
from pagecast.sim.core.engines.deployment import Deployment
from pagecast.sim.core.engines.nano_vllm.mix import NanoVllmMix
from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.eviction import Eviction, LeastRecentlyUsed
from pagecast.sim.core.rules.admission import WholeSequence
from pagecast.sim.core.rules.rules import Mix
from pagecast.sim.core.rules.victim import Newest


def first_freed(limits: Limits) -> Eviction:
    """LRU; blocks without content take their turn."""
    return LeastRecentlyUsed(blanks_first=False)


@dataclass(frozen=True)
class NanoVllmProfile(Profile):
    """nano-vLLM's step."""

    def mix(self, limits: Limits) -> Mix:
        """Steps of prompts or of decodes."""
        return NanoVllmMix(WholeSequence(), Newest())

    def defaults(self, deployment: Deployment) -> dict[str, Any]:
        """Those of `Config` (nanovllm/config.py)."""
        return {
            "block_size": 256,
            "gpu_memory_utilization": 0.9,
            "max_num_seqs": 512,
            "max_num_batched_tokens": 16384,
            "max_model_len": deployment.given("max_model_len", min(4096, deployment.longest)),
        }

    def check(self, limits: Limits, drafter: Drafter | None = None) -> None:
        """Errors: BadInput for what nano-vLLM does not have."""
        super().check(limits, drafter)
        if limits.swap_blocks or limits.partial_reuse:
            raise BadInput("the profile nano-vllm has no swap space and no partial reuse; choose vllm")


NANO_VLLM = NanoVllmProfile(
    name="nano-vllm",
    summary="a step prefills or decodes; waiting prompts go first; blocks are published when their step is "
    "committed",
    version="bb823b3",
    title="nano-vLLM",
    eviction=first_freed,
    publish_at_commit=True,
    whole_prompt=True,
)
