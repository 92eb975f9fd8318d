"""Group specifications: which tokens' KV a group of layers keeps, and in blocks of how many tokens.

The kinds carry vLLM's names (`KVCacheSpecKind`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import gcd, lcm

from pagecast.sim.core.errors import BadInput

_FOREVER = 1 << 62


class KvKind(Enum):
    """Kinds of layers, by the tokens whose KV they keep."""

    FULL = "full_attention"  # the KV of every token
    LATENT = "mla_attention"  # one latent of every token
    WINDOW = "sliding_window"  # the newest `window` tokens
    CHUNK = "chunked_local_attention"  # the tokens of the current chunk of `window` tokens
    STATE = "mamba"  # one recurrent state, however long the sequence is


@dataclass(frozen=True)
class GroupSpec:
    """Layers that share a block table. `block_size` is in tokens; `window` is the window's or chunk's length.

    A group of recurrent states holds `states` blocks per request; its `block_size` does not count.
    """

    kind: KvKind
    block_size: int = 16
    window: int = 0
    states: int = 1

    def skipped_tokens(self, computed: int) -> int:
        """Tokens, from the start, that no layer of the group reads once `computed` tokens are computed."""
        if self.kind is KvKind.WINDOW:
            return max(0, computed - self.window + 1)
        if self.kind is KvKind.CHUNK:
            return computed // self.window * self.window
        return 0

    def skipped_blocks(self, computed: int) -> int:
        """Whole blocks, from the start, that no layer reads once `computed` tokens are computed."""
        return self.skipped_tokens(computed) // self.block_size

    def blocks_of(self, tokens: int) -> int:
        """Places that a block table of so many tokens has."""
        if self.kind is KvKind.STATE:
            return min(tokens, 1) * self.states
        return -(-tokens // self.block_size)

    def most_blocks(self, held_tokens: int, max_model_len: int | None) -> int:
        """Blocks that a request holds at most, however long it is: vLLM's cap in the admission check.

        `held_tokens`: those of the steps that are planned at a time.
        """
        longest = _FOREVER if max_model_len is None else max_model_len
        if self.kind is KvKind.WINDOW:
            return -(-min(self.window - 1 + held_tokens, longest) // self.block_size) + 1
        if self.kind is KvKind.CHUNK:
            return -(-min(self.window + held_tokens, longest) // self.block_size)
        return _FOREVER

    def check(self) -> None:
        """Errors: BadInput for a size that cannot be."""
        if self.block_size < 1:
            raise BadInput(f"a KV group has block_size {self.block_size}; it must be at least 1")
        if self.kind in (KvKind.WINDOW, KvKind.CHUNK) and self.window < 1:
            raise BadInput(f"a KV group of kind {self.kind.value} needs a window of at least 1 token")


def unit_tokens(groups: tuple[GroupSpec, ...]) -> int:
    """Tokens per block key: the greatest common divisor of the groups' block sizes."""
    return gcd(*_sizes(groups)) or 1


def aligned_tokens(groups: tuple[GroupSpec, ...]) -> int:
    """Prefix hits are multiples of this many tokens: the least common multiple of the block sizes."""
    return lcm(*_sizes(groups)) or 1


def _sizes(groups: tuple[GroupSpec, ...]) -> list[int]:
    return [group.block_size for group in groups if group.kind is not KvKind.STATE]


def check_groups(groups: tuple[GroupSpec, ...], block_size: int, *, caching: bool) -> None:
    """Errors: BadInput where the groups do not fit together, or into keys of `block_size` tokens."""
    for group in groups:
        group.check()
    if not _sizes(groups):
        raise BadInput("KV groups of recurrent states alone are not simulated; one must keep KV per token")
    if any(size % block_size for size in _sizes(groups)):
        raise BadInput(
            f"block_size {block_size} does not divide the KV groups' block sizes {_sizes(groups)}; "
            f"use {unit_tokens(groups)}"
        )
    if not caching:
        return
    if any(group.kind is KvKind.STATE for group in groups):
        raise BadInput("prefix caching of recurrent states is not simulated; turn enable_prefix_caching off")
    chunked = [group.block_size for group in groups if group.kind is KvKind.CHUNK]
    if chunked and set(_sizes(groups)) != {chunked[0]}:
        raise BadInput("chunked local attention needs one block size in all KV groups (as in vLLM)")
