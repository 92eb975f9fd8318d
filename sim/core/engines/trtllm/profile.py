"""TensorRT-LLM: its profiles, one for each policy of its capacity scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagecast.sim.core.drafter import Drafter
from pagecast.sim.core.engines.deployment import Deployment
from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.engines.trtllm.defaults import defaults
from pagecast.sim.core.engines.trtllm.mix import (
    Capacity,
    FitsWhole,
    GuaranteedNoEvict,
    MaxUtilization,
    TrtllmMix,
)
from pagecast.sim.core.engines.trtllm.settings import TrtllmSettings
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.intake import Intake
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.eviction import Eviction, LeastRecentlyUsed
from pagecast.sim.core.rules.rules import Mix


@dataclass(frozen=True)
class TrtllmProfile(Profile):
    """TensorRT-LLM's V1 scheduler with the policy that `capacity` makes."""

    capacity: Callable[[], Capacity] = GuaranteedNoEvict

    def mix(self, limits: Limits) -> Mix:
        """The capacity policy and the micro batches."""
        return TrtllmMix(self.capacity(), limits, limits.settings(TrtllmSettings()))

    def defaults(self, deployment: Deployment) -> dict[str, Any]:
        """What `trtllm-serve` takes."""
        return defaults(deployment)

    def check(self, limits: Limits, drafter: Drafter | None = None) -> None:
        """Errors: BadInput for what TensorRT-LLM's rules here do not have, and chunks that fit no step."""
        if limits.policy != "fcfs":
            raise BadInput("TensorRT-LLM serves requests as they come; choose the policy fcfs")
        if limits.swap_blocks or limits.host is not None:
            raise BadInput("the profiles of TensorRT-LLM have no swap space and no host tier; choose vllm")
        super().check(limits, drafter)
        settings = limits.settings(TrtllmSettings())
        unit = settings.unit or limits.block_size
        if settings.chunked_context and unit > limits.max_num_batched_tokens:
            raise BadInput(
                f"a chunk of {unit} tokens does not fit in max_num_batched_tokens "
                f"({limits.max_num_batched_tokens}); raise it, or lower block_size"
            )


def _fits_whole(limits: Limits) -> Intake:
    return FitsWhole(limits, limits.settings(TrtllmSettings()))


def _one_queue(_limits: Limits) -> Eviction:
    """LRU of all free blocks, those without content too."""
    return LeastRecentlyUsed(blanks_first=False)


def _static() -> Capacity:
    return GuaranteedNoEvict(static=True)


def _profile(name: str, title: str, summary: str, capacity: Callable[[], Capacity]) -> TrtllmProfile:
    return TrtllmProfile(
        name=name,
        summary=f"V1 scheduler: {summary}; whole prompts' blocks, context chunks",
        version="1.2",
        title=title,
        option_names={
            "--tp_size": "tensor_parallel_size",
            "--kv-cache-free-gpu-mem-fraction": "free_gpu_memory_fraction",
            "--max-seq-len": "max_model_len",
            "--max-batch-size": "max_num_seqs",
            "--max-num-tokens": "max_num_batched_tokens",
            "--tokens-per-block": "block_size",
        },
        intake=_fits_whole,
        eviction=_one_queue,
        publish_at_commit=True,
        publish_output_at_end=True,
        whole_prompt=True,
        pipelined=True,
        clips_max_tokens=True,
        capacity=capacity,
    )


TRTLLM = (
    _profile(
        "trtllm-guaranteed-no-evict", "TensorRT-LLM", "admits what can run to its end", GuaranteedNoEvict
    ),
    _profile(
        "trtllm-max-utilization",
        "TensorRT-LLM (max utilization)",
        "admits what fits now, and pauses the last begun",
        MaxUtilization,
    ),
    _profile(
        "trtllm-static",
        "TensorRT-LLM (static batch)",
        "a batch of requests ends before another begins",
        _static,
    ),
)
