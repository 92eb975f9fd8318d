"""Time to compute one block of a prompt again, by its number in the sequence."""

from __future__ import annotations

from collections.abc import Callable

from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.step_costs import StepCosts

_CHUNK_TOKENS = 2048  # a block is computed as part of a chunk; alone it would cost the reading of all weights


def recompute_ns(costs: StepCosts, block_size: int) -> Callable[[int], float]:
    """Device time of a block of `block_size` tokens, its share of a chunk that begins near it, in ns."""
    per_chunk = max(_CHUNK_TOKENS // block_size, 1)
    block_ns_of_chunk: dict[int, float] = {}

    def recompute(block: int) -> float:
        chunk = block // per_chunk
        if chunk not in block_ns_of_chunk:
            there = chunk * per_chunk * block_size
            block_ns_of_chunk[chunk] = costs.device_ns(Batch(0, 0, 0, ((_CHUNK_TOKENS, there),))) / per_chunk
        return block_ns_of_chunk[chunk]

    return recompute


def prefill_ns(costs: StepCosts, step_tokens: int) -> Callable[[int], float]:
    """Device time of prompts of so many tokens together, in steps of `step_tokens`, in ns."""
    pace = costs.device_ns(Batch(0, 0, 0, ((step_tokens, 0),))) / step_tokens
    return lambda tokens: tokens * pace
