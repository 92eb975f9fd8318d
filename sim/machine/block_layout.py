"""Layout of layers over KV blocks: one block table per group of layers, all blocks of as many bytes.

A plain model has one group. A model whose layers keep different tokens is cut as vLLM cuts it: groups of
equally many layers of one kind, the last one padded, so that any block can serve any group.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import GroupSpec, KvKind
from pagecast.sim.machine.model_facts import KvGroup, ModelFacts

_SMALLEST_STEP = 16  # tokens: attention kernels take blocks of a multiple of this


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """`specs` has one entry per group: what its layers keep, in blocks of how many tokens.

    Each group has `layers` layers, padding included. `block_bytes` is one block of one group, in all of its
    layers. `block_size` is the engine's option; where layers have heads of several sizes, groups have more
    tokens in a block.
    """

    specs: tuple[GroupSpec, ...]
    layers: int
    block_size: int
    block_bytes: int

    @property
    def groups(self) -> int:
        """Number of block tables per sequence."""
        return len(self.specs)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window or chunk of each group, in tokens; 0 where it keeps every token."""
        return tuple(spec.window for spec in self.specs)

    @property
    def plain(self) -> bool:
        """Whether every layer keeps every token, in one group."""
        return self.groups == 1 and self.specs[0].kind in (KvKind.FULL, KvKind.LATENT)

    def blocks_of(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` holds while it decodes, over all groups.

        A windowed group keeps the newest `window` tokens, which may begin inside a block.
        """
        return sum(_blocks_of_group(spec, tokens) for spec in self.specs)


def _blocks_of_group(spec: GroupSpec, tokens: int) -> int:
    blocks = spec.blocks_of(tokens)
    return min(blocks, -(-spec.window // spec.block_size) + 1) if spec.window else blocks


def block_layout(kv_groups: tuple[KvGroup, ...], block_size: int, element_bytes: int) -> BlockLayout:
    """vLLM's layout of `kv_groups`: groups have the size of the least numerous kind of layers.

    They have that of the most numerous kind where it is less than 1.5 times the least. Layers with less KV
    per token get blocks of more tokens, or padded ones where that does not come out even.
    """
    counts = [group.layers for group in kv_groups]
    layers = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    widest = max(group.elements_per_token for group in kv_groups)
    specs = []
    for group in kv_groups:
        times, rest = divmod(widest, group.elements_per_token)
        spec = GroupSpec(group.kind, block_size if rest else block_size * times, group.window)
        specs += [spec] * -(-group.layers // layers)
    return BlockLayout(tuple(specs), layers, block_size, layers * block_size * widest * element_bytes)


def _with_states(
    model: ModelFacts, groups: tuple[KvGroup, ...], block_size: int, tp: int, kv_cache_dtype: str
) -> BlockLayout:
    """The layout of a model with recurrent layers: a block holds the state of a layer, or its KV.

    As in vLLM the block gets as many tokens as make it as large as a state, in steps of the block size asked
    for; the state is padded to it.
    """
    recurrent = model.recurrent
    assert recurrent is not None
    if len(groups) > 1:
        raise BadInput(f"{model.name} has recurrent layers beside several kinds of attention: not simulated")
    token = groups[0].elements_per_token * model.kv_element_bytes(kv_cache_dtype)
    step = max(block_size, _SMALLEST_STEP)
    size = step * -(-recurrent.state_elements(tp) * model.dtype_bytes // (step * token))
    counts = [recurrent.layers, groups[0].layers]
    layers = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    states = [GroupSpec(KvKind.STATE, size)] * -(-recurrent.layers // layers)
    attention = [GroupSpec(groups[0].kind, size)] * -(-groups[0].layers // layers)
    specs = (*states, *attention) if recurrent.leads else (*attention, *states)
    return BlockLayout(specs, layers, size, layers * size * token)


def model_layout(
    model: ModelFacts,
    block_size: int,
    *,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    disable_hybrid_kv_cache_manager: bool = False,
) -> BlockLayout:
    """The layout of a model's KV on one GPU of `tensor_parallel_size`.

    `disable_hybrid_kv_cache_manager`: every layer keeps every token, in one group. Errors: BadInput for an
    unknown dtype.
    """
    groups = model.kv_groups(tensor_parallel_size, kv_cache_dtype)
    if model.recurrent is not None:
        return _with_states(model, groups, block_size, tensor_parallel_size, kv_cache_dtype)
    if disable_hybrid_kv_cache_manager and len(groups) > 1:
        layers = sum(group.layers for group in groups)
        widest = max(group.elements_per_token for group in groups)
        groups = (KvGroup(0, layers, widest),)
    return block_layout(groups, block_size, model.kv_element_bytes(kv_cache_dtype))
