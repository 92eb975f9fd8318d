"""Our own GPU engine: vLLM's rules, and what the engine takes where an option is not given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pagecast.sim.core.engines.deployment import Deployment
from pagecast.sim.core.engines.vllm.profile import VllmProfile


@dataclass(frozen=True)
class OwnProfile(VllmProfile):
    """The rules that `pagecast serve` and `pagecast record` run on a GPU; they have no other versions."""

    def defaults(self, deployment: Deployment) -> dict[str, Any]:
        """Those of `engine.options.Options`."""
        return {
            "block_size": 16,
            "gpu_memory_utilization": 0.9,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "max_model_len": deployment.given("max_model_len", deployment.longest),
        }

    @property
    def text(self) -> str:
        """Its name alone."""
        return self.name

    def at(self, version: str) -> Self:
        """The same rules, whatever the version."""
        return self


OWN = OwnProfile(
    name="pagecast",
    summary="our own GPU engine, which runs vLLM's rules",
    version="0.24",
    title="pagecast with the rules of vLLM",
    pipelined=True,
    offloads=True,
    hybrid=True,
)
