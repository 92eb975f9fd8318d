"""TensorRT-LLM's V1 block manager for one window, for the driver alone: it shares nothing with the core.

The engine's is C++ and needs CUDA. This one is written after kvCacheManager.cpp and evictionPolicy.cpp in
cpp/tensorrt_llm/batch_manager (`WindowBlockManager`, `KVCacheManager`, `LRUEvictionPolicy`): a tree of blocks
by their tokens, a queue of free blocks, and the two questions of the capacity schedulers. Blocks that are not
full are not kept, as in the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

Tokens = tuple[int, ...]


class NoFreeBlock(Exception):
    """A block is needed and none is free, where the engine throws."""


class PrefixReuseSummary(NamedTuple):
    """What a walk through the tree finds for a prompt."""

    reusable_blocks_all: int = 0
    reusable_blocks_allocated: int = 0
    first_new_block: tuple[Tokens, ...] | None = None


class Block:
    """A block: how many sequences hold it, and its place in the tree."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.refs = 0
        self.scheduling_refs = 0
        self.key: Tokens = ()
        self.before: Block | None = None
        self.after: dict[Tokens, Block] = {}

    def leave_tree(self) -> None:
        """Takes the block and all that come after it out of the tree."""
        for child in list(self.after.values()):
            child.leave_tree()
        if self.before is not None:
            del self.before.after[self.key]
        self.before, self.key = None, ()


class Held:
    """A sequence's blocks and number of tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.blocks: list[Block] = []


class Blocks:
    """The manager, with the names that the schedulers call."""

    def __init__(self, num_blocks: int, block_size: int, *, reuse: bool) -> None:
        self.size = block_size
        self.enable_block_reuse = reuse
        self.is_variable_window = False
        self.window = num_blocks * block_size
        self.max_attention_window_vec = [self.window]
        self.root = Block(-1)
        self.free: dict[int, Block] = {number: Block(number) for number in range(num_blocks)}
        self.sequences: dict[int, Held] = {}
        self._scheduling_free = 0

    # ---- asked by the schedulers

    def get_kv_cache_stats(self) -> Any:
        return SimpleNamespace(num_free_blocks_per_window_size={self.window: len(self.free)})

    def analyze_prefix_reuse(self, tokens: Sequence[int], _request: Any) -> PrefixReuseSummary:
        """Counts reusable blocks, and names the first one that is not there."""
        place, found, held = self.root, 0, 0
        keys = self._full(tokens, len(tokens))
        for number, key in enumerate(keys):
            block = place.after.get(key)
            if block is None:
                return PrefixReuseSummary(found, held, tuple(keys[: number + 1]))
            found += 1
            held += block.refs > 0
            place = block
        return PrefixReuseSummary(found, held)

    def get_remaining_blocks_to_completion(
        self, req: Any, _window: int, cached_summary: PrefixReuseSummary | None = None
    ) -> int:
        """`getRemainingBlocksToCompletion`; notes the reusable tokens on the request."""
        req.estimated_reusable_tokens = 0
        context = req.prompt_len // self.size
        total = -(-(req.prompt_len + req.max_new_tokens) // self.size)
        sequence = self.sequences.get(req.request_id)
        held = len(sequence.blocks) if sequence else 0
        shared = 0
        if self.enable_block_reuse and req.is_context_init_state and req.is_first_context_chunk and not held:
            summary = cached_summary or self.analyze_prefix_reuse(req.get_unique_tokens(0), req)
            shared = min(summary.reusable_blocks_allocated, context)
            req.estimated_reusable_tokens = min(summary.reusable_blocks_all, context) * self.size
        if held < context - shared:
            return context - shared - held + total - context
        return total - shared - held

    def get_needed_blocks_one_step(
        self, req: Any, two_steps: bool, _window: int, cached_summary: PrefixReuseSummary | None = None
    ) -> int:
        """`getNeededBlocksOneStep`; notes the reusable tokens on the request."""
        req.estimated_reusable_tokens = 0
        if req.is_context_init_state and req.is_first_context_chunk:
            needed = -(-req.prompt_len // self.size)
            if self.enable_block_reuse:
                summary = cached_summary or self.analyze_prefix_reuse(req.get_unique_tokens(0), req)
                full = req.prompt_len // self.size
                needed -= min(summary.reusable_blocks_allocated, full)
                req.estimated_reusable_tokens = min(summary.reusable_blocks_all, full) * self.size
            return needed
        if req.is_generation_in_progress_state:
            now = self.sequences[req.request_id].tokens
            left = req.max_new_tokens - (now - req.prompt_len)
            then = now + min(2 if two_steps else 1, left)
            return -(-then // self.size) - -(-now // self.size)
        return 0

    def start_scheduling(self) -> None:
        self._scheduling_free = len(self.free)
        for sequence in self.sequences.values():
            for block in sequence.blocks:
                block.scheduling_refs = block.refs

    def scheduling_remove_sequence(self, request_id: int) -> None:
        for block in self.sequences[request_id].blocks:
            block.scheduling_refs -= 1
            self._scheduling_free += not block.scheduling_refs

    def scheduling_has_free_blocks(self, blocks: int, _window: int) -> bool:
        return blocks <= self._scheduling_free

    # ---- what is scheduled

    def add_sequence_batch(self, requests: Sequence[Any]) -> None:
        """Gives requests the blocks of their prompts: first what is cached for all of them, then new ones."""
        for req in requests:
            sequence = self.sequences[req.request_id] = Held(req.prompt_len)
            place = self.root
            for key in self._full(req.get_unique_tokens(0), req.prompt_len - 1):
                block = place.after.get(key) if self.enable_block_reuse else None
                if block is None:
                    break
                self.free.pop(block.number, None)
                block.refs += 1
                sequence.blocks.append(block)
                place = block
            req.set_prepopulated_prompt_len(len(sequence.blocks) * self.size, self.size)
        for req in requests:
            sequence = self.sequences[req.request_id]
            while len(sequence.blocks) * self.size < req.prompt_len:
                self._allocate(sequence)

    def add_token(self, request_id: int) -> None:
        sequence = self.sequences[request_id]
        sequence.tokens += 1
        if (sequence.tokens - 1) % self.size == 0:
            self._allocate(sequence)

    def store_context_blocks(self, req: Any) -> None:
        """Makes the computed full blocks of a prompt findable."""
        if self.enable_block_reuse and req.request_id in self.sequences:
            tokens = req.get_unique_tokens(0)
            self._store(tokens, min(req.context_current_position, len(tokens) - 1), req.request_id)

    def remove_sequence(self, req: Any) -> None:
        """Makes all full blocks findable and gives the sequence's blocks back, the last first."""
        if self.enable_block_reuse:
            tokens = req.get_unique_tokens(0)
            self._store(tokens, len(tokens) - 1, req.request_id)
        for block in reversed(self.sequences.pop(req.request_id).blocks):
            block.refs -= 1
            if not block.refs:
                self.free[block.number] = block

    def _full(self, tokens: Sequence[int], usable: int) -> list[Tokens]:
        size = self.size
        return [tuple(tokens[at : at + size]) for at in range(0, usable // size * size, size)]

    def _allocate(self, sequence: Held) -> None:
        if not self.free:
            raise NoFreeBlock
        block = self.free.pop(next(iter(self.free)))
        block.leave_tree()
        block.refs = 1
        sequence.blocks.append(block)

    def _store(self, tokens: Sequence[int], usable: int, request_id: int) -> None:
        place, match = self.root, True
        for key, block in zip(self._full(tokens, usable), self.sequences[request_id].blocks, strict=False):
            there = place.after.get(key) if match else None
            if there is None:
                match = False
                if block.before is not None:
                    block.before.after.pop(block.key, None)
                block.key, block.before = key, place
                place.after[key] = block
                there = block
            place = there
