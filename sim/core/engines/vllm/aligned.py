"""Chunks of prompts in models with recurrent states that can be found at the ends of blocks.

A state is kept where a chunk ends, so chunks end at the ends of blocks: at the last one before a prompt's
end, unless the kernel exports that state within the chunk, and where a prefix ends that other layers had
found. A chunk that would not reach the end of a block waits for a step that has room for it.

Source: vllm/v1/core/sched/scheduler.py, `Scheduler._mamba_block_aligned_split` (0.33).
"""

from __future__ import annotations

from pagecast.sim.core.engines.vllm.settings import VllmSettings
from pagecast.sim.core.group_spec import GroupSpec
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.checkpoint_group import CheckpointGroup
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.request import Request


def caches_states(groups: tuple[GroupSpec, ...]) -> bool:
    """Whether some group keeps states that can be found."""
    return any(spec.rules.scattered for spec in groups)


class ChunkEnds:
    """The ends of chunks."""

    def __init__(self, limits: Limits, settings: VllmSettings, memory: KvMemory) -> None:
        self._memory = memory
        self._size = limits.block_size
        step = settings.max_num_scheduled_tokens
        self._longest = limits.max_num_batched_tokens if step is None else step
        if settings.long_prefill_token_threshold:
            self._longest = min(self._longest, settings.long_prefill_token_threshold)
        self._groups = [group for group in memory.groups if isinstance(group, CheckpointGroup)]

    def fit(self, request: Request, start: int, tokens: int) -> int:
        """How many of `tokens` tokens from `start` on a request computes; 0: it waits."""
        prompt_end = max(request.prompt_tokens, request.known_tokens - 1)
        if start >= prompt_end:
            return tokens
        size = self._size
        end = start + tokens
        last = self._groups[0].last_end(request.known_tokens)
        exports = all(group.exports_at(request, start, end, prompt_end) for group in self._groups)
        if exports:
            last = 0
        if end < prompt_end:
            whole = end // size * size
            if whole > start or size <= self._longest:
                end = whole
        stops = [last]
        if start % size and not exports:
            stops.append((start // size + 1) * size)
        junction = self._memory.junction(request)
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        return max(min([stop for stop in stops if start < stop < end], default=end) - start, 0)
