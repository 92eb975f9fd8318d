"""Layout of layers over KV blocks: one block table per group of layers, all blocks of as many bytes.

A plain model has one group. A model whose layers keep different tokens is cut as vLLM cuts it: groups of
equally many layers of one kind, the last one padded, so that any block can serve any group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, lcm

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import GroupSpec, KvKind, unit_tokens
from pagecast.sim.machine.model_facts import KvGroup, ModelFacts
from pagecast.sim.machine.packed_groups import Pages, packed_groups

_SMALLEST_STEP = 16  # tokens: attention kernels take blocks of a multiple of this
_LATENT_STEP = 128  # tokens: the same beside recurrent layers for kernels of latent attention


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
    layers = _layers_of_group([group.layers for group in kv_groups])
    widest = max(group.elements_per_token for group in kv_groups)
    specs = []
    for group in kv_groups:
        times, rest = divmod(widest, group.elements_per_token)
        spec = GroupSpec(group.kind, block_size if rest else block_size * int(times), group.window)
        specs += [spec] * -(-group.layers // layers)
    token = layers * widest * element_bytes + sum(group.index_bytes for group in kv_groups)
    return BlockLayout(tuple(specs), layers, block_size, round(block_size * token))


def _layers_of_group(counts: list[int]) -> int:
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def _packed(pages: tuple[Pages, ...], block_size: int) -> BlockLayout:
    specs, block_bytes = packed_groups(pages)
    return BlockLayout(specs, max(each.layers for each in pages), block_size, block_bytes)


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
    full = groups[0]
    token = full.elements_per_token * model.kv_element_bytes(kv_cache_dtype)
    step = max(block_size, _LATENT_STEP if full.kind is KvKind.LATENT else _SMALLEST_STEP)
    step = lcm(step, recurrent.step_tokens)
    state = recurrent.bytes_of_state(tp, model.dtype_bytes)
    size = step * ceil(state / (step * token))
    attention = Pages(GroupSpec(full.kind, size), full.layers, round(size * token))
    kept = GroupSpec(KvKind.STATE, size, states=recurrent.blocks)
    if recurrent.cached:
        # Kernels that export states at any token do, the others at the ends of blocks.
        exported = (1 if recurrent.form == "mamba" else size) * recurrent.exports
        kept = GroupSpec.checkpoints(size, recurrent.drafts, exported)
    states = Pages(kept, recurrent.layers, attention.page_bytes)
    if full.index_bytes:
        return _beside_index_keys(model, states, attention)
    layers = _layers_of_group([recurrent.layers, full.layers])
    parts = (states, attention) if recurrent.leads else (attention, states)
    specs = tuple(part.spec for part in parts for _ in range(-(-part.layers // layers)))
    return BlockLayout(specs, layers, size, layers * attention.page_bytes)


def _beside_index_keys(model: ModelFacts, states: Pages, attention: Pages) -> BlockLayout:
    """States and latents beside keys of an indexer, and the keys that it is pooling."""
    indexer = model.attention.indexer
    assert indexer is not None
    size = attention.spec.block_size
    parts = [states, attention, Pages(attention.spec, indexer.layers, round(size * indexer.token_bytes))]
    if indexer.pool > 1:
        ring = GroupSpec(KvKind.RING, indexer.pool)
        parts.append(Pages(ring, indexer.layers, indexer.pool * indexer.pooled_token_bytes))
    return _packed(tuple(parts), size)


def model_layout(
    model: ModelFacts,
    block_size: int,
    *,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    disable_hybrid_kv_cache_manager: bool = False,
    context_ranks: int = 1,
) -> BlockLayout:
    """The layout of a model's KV on one GPU of `tensor_parallel_size`.

    `disable_hybrid_kv_cache_manager`: every layer keeps every token, in one group. `context_ranks`: so many
    of the GPUs share each sequence, with `block_size` tokens of a block on each (vLLM's decode context
    parallelism: `resolve_dcp_kv_block_size`). Errors: BadInput for an unknown dtype, and for ranks that the
    model cannot have.
    """
    if context_ranks == 1:
        return _whole_layout(
            model, block_size, tensor_parallel_size, kv_cache_dtype, one_group=disable_hybrid_kv_cache_manager
        )
    model.check_context_ranks(tensor_parallel_size, context_ranks)
    layout = _whole_layout(
        model, block_size, tensor_parallel_size, kv_cache_dtype, one_group=disable_hybrid_kv_cache_manager
    )
    if not layout.plain:
        raise BadInput(f"decode context parallelism of {model.name}, whose layers differ, is not simulated")
    tokens = block_size * context_ranks
    return replace(layout, specs=(replace(layout.specs[0], block_size=tokens),), block_size=tokens)


def _whole_layout(
    model: ModelFacts, block_size: int, tensor_parallel_size: int, kv_cache_dtype: str, *, one_group: bool
) -> BlockLayout:
    """The layout where each GPU has all tokens."""
    compressed = model.attention.compressed
    if compressed:
        pages = tuple(
            Pages(GroupSpec(c.kind, c.block_size, c.window), c.layers, c.page_bytes)
            for c in compressed.caches
        )
        return _packed(pages, unit_tokens(tuple(page.spec for page in pages)))
    groups = model.kv_groups(tensor_parallel_size, kv_cache_dtype)
    if model.recurrent is not None:
        return _with_states(model, groups, block_size, tensor_parallel_size, kv_cache_dtype)
    if one_group and len(groups) > 1:
        layers = sum(group.layers for group in groups)
        elements = sum(group.layers * group.elements_per_token for group in groups) / layers
        groups = (KvGroup(0, layers, elements, index_bytes=sum(group.index_bytes for group in groups)),)
    return block_layout(groups, block_size, model.kv_element_bytes(kv_cache_dtype))
