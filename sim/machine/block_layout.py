"""Layout of layers over KV blocks: one block table per group of layers, all blocks of one size.

A plain model has one group. A model whose layers keep different windows is cut as vLLM cuts it: groups of
equally many layers of one kind, the last one padded, so that any block can serve any group.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.machine.model_facts import KvGroup


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """`windows` has one entry a group (0: full attention); each group has `layers` layers.

    `block_bytes` is one block of one group: `block_size` tokens in all of its layers.
    """

    windows: tuple[int, ...]
    layers: int
    block_size: int
    block_bytes: int

    @property
    def groups(self) -> int:
        return len(self.windows)

    def blocks_of(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` holds while it decodes, over all groups.

        A windowed group keeps the newest `window` tokens, which may begin inside a block.
        """
        size = self.block_size
        full = -(-tokens // size)
        return sum(min(full, -(-window // size) + 1) if window else full for window in self.windows)


def block_layout(kv_groups: tuple[KvGroup, ...], block_size: int, element_bytes: int) -> BlockLayout:
    """vLLM's layout of `kv_groups`: groups have the size of the least numerous kind of layers.

    They have that of the most numerous kind where it is less than 1.5 times the least.
    """
    counts = [group.layers for group in kv_groups]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    windows = [group.window for group in kv_groups for _ in range(-(-group.layers // size))]
    page = block_size * max(group.elements_per_token for group in kv_groups) * element_bytes
    return BlockLayout(tuple(windows), size, block_size, size * page)
