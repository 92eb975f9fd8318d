"""Chunks of prompts in models with recurrent states that can be found at the ends of blocks.

A state is kept where a chunk ends, so chunks end at the ends of blocks: at the last one before a prompt's
end, unless the kernel exports that state within the chunk, and where a prefix ends that other layers had
found. A chunk that would not reach the end of a block waits for a step that has room for it.

Source: vllm/v1/core/sched/scheduler.py, `Scheduler._mamba_block_aligned_split` (0.24 and 0.33).
"""

from __future__ import annotations

from pagecast.sim.core.engines.vllm.settings import VllmSettings
from pagecast.sim.core.group_spec import GroupSpec
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.memory.state_group import StateGroup
from pagecast.sim.core.request import Request


def caches_states(groups: tuple[GroupSpec, ...]) -> bool:
    """Whether some group keeps states that can be found."""
    return any(spec.rules.sparse for spec in groups)


class ChunkEnds:
    """The ends of chunks. `strict`: as since 0.26, where a chunk that begins within a block ends with it."""

    def __init__(self, limits: Limits, settings: VllmSettings, memory: KvMemory, *, strict: bool) -> None:
        self._memory = memory
        self._size = limits.block_size
        self._strict = strict
        step = settings.max_num_scheduled_tokens
        self._longest = limits.max_num_batched_tokens if step is None else step
        if settings.long_prefill_token_threshold:
            self._longest = min(self._longest, settings.long_prefill_token_threshold)
        self._groups = [group for group in memory.layers if isinstance(group, StateGroup)]
        self._drops = int(memory.recomputes_block and not memory.key_lookahead)

    def fit(self, request: Request, start: int, tokens: int, hit_tokens: int | None = None) -> int:
        """How many of `tokens` tokens from `start` on a request computes; 0: it waits.

        `hit_tokens`: the prefix hit of a request that joins.
        """
        prompt_end = max(request.prompt_tokens, request.known_tokens - 1)
        if start >= prompt_end:
            return tokens
        if not self._strict:
            return self._fit_first(request, start, tokens, hit_tokens)
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

    def _fit_first(self, request: Request, start: int, tokens: int, hit_tokens: int | None) -> int:
        """The rule of 0.24."""
        size = self._size
        last = request.known_tokens // size * size
        if self._drops:
            last = max(last - size, 0)
        end = start + tokens
        if end < last:
            tokens = tokens // size * size
        elif start < last < end:
            tokens = last - start
        if hit_tokens is not None:
            common = self._memory.junction(request) - hit_tokens
            if size <= common < tokens:
                tokens = common // size * size
        return tokens
