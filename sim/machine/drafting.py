"""Drafting memory: draft layers or a draft model that a GPU holds beside the decoder.

A checkpoint's draft layers (multi-token prediction, MTP) are decoder layers that join the last hidden state
with the next token's embedding. An engine loads all of them, whatever the number of draft tokens.

Source: the models' MTP modules in vLLM 0.33 (models/*/mtp.py, model_executor/models/*_mtp.py);
`MambaSpec.max_memory_usage_bytes` for states.
"""

from __future__ import annotations

from dataclasses import replace

from pagecast.sim.machine.indexer import Indexer
from pagecast.sim.machine.matrix import Matrix
from pagecast.sim.machine.model_facts import AttentionShape, ModelFacts


def with_draft_layers(model: ModelFacts) -> ModelFacts:
    """The model with the draft layers of its checkpoint loaded; with a note alone where none are known."""
    count = model.draft_layers
    if not count:
        return replace(
            model, notes=(*model.notes, "no draft layers of this model are known: none are counted")
        )
    moe, dense = model.moe, model.dense_mlps
    if moe and not model.draft_dense:
        moe = replace(moe, layers=moe.layers + count)
    else:
        dense += count
    loaded = replace(
        model,
        layers=model.layers + count * (1 if _mixing_layers(model) == model.layers else 2),
        moe=moe,
        dense_layers=dense,
        more_matrices=(*model.more_matrices, Matrix("draft_in", 2 * model.hidden, model.hidden, count)),
        more_small=model.more_small + 3 * count * model.hidden,
        draft_layers=0,
        checkpoint_bytes=None,
        notes=(*model.notes, f"draft layers are loaded: {count}"),
    )
    shapes = _shapes(model, count)
    loaded = replace(loaded, attention=shapes[0], more_attention=shapes[1:])
    loaded = replace(loaded, weight_bits=_bits(model, loaded))
    if model.checkpoint_bytes is None:
        return loaded
    return replace(loaded, checkpoint_bytes=model.checkpoint_bytes + _added(model, loaded))


def draft_bytes(model: ModelFacts) -> int:
    """Bytes of the draft layers of the model's checkpoint, by their shapes."""
    return _added(model, replace(with_draft_layers(model), checkpoint_bytes=None))


def _added(model: ModelFacts, loaded: ModelFacts) -> int:
    return loaded.weight_bytes() - replace(model, checkpoint_bytes=None).weight_bytes()


def _mixing_layers(model: ModelFacts) -> int:
    """Layers that mix tokens; fewer than all where an MLP is a layer of its own."""
    states = model.recurrent.layers if model.recurrent else 0
    return states + sum(len(shape.windows) for shape in model.attentions)


def _shapes(model: ModelFacts, count: int) -> tuple[AttentionShape, ...]:
    """The shapes of attention with so many layers more: with a window where draft layers have one."""
    shapes = list(model.attentions)
    windowed = model.draft_window

    def fits(shape: AttentionShape) -> bool:
        return bool(shape.compressed) or any(bool(window) == windowed for window in shape.windows)

    place = next((i for i, shape in enumerate(shapes) if fits(shape)), 0)
    shape = shapes[place]
    window = max(shape.windows) if windowed else 0
    indexer, compressed = shape.indexer, shape.compressed
    shapes[place] = replace(
        shape,
        windows=(*shape.windows, *(window,) * count),
        indexer=_more_indexers(indexer, count) if indexer else None,
        compressed=compressed.with_windows(count) if compressed else None,
    )
    return tuple(shapes)


def _more_indexers(indexer: Indexer, count: int) -> Indexer:
    return replace(
        indexer,
        layers=indexer.layers + count,
        sparse_layers=indexer.sparse_layers + count,
        matrices=tuple(matrix._replace(layers=matrix.layers + count) for matrix in indexer.matrices),
    )


def _bits(model: ModelFacts, loaded: ModelFacts) -> tuple[tuple[str, float], ...]:
    """Bits of a weight by matrix: those of the decoder, or the model's own dtype in draft layers."""
    if not model.weight_bits and model.weight_dtype == model.dtype:
        return ()
    plain = 8.0 * model.dtype_bytes
    before = {linear.name: linear for linear in model.linears()}
    bits: dict[str, float] = {}
    for linear in loaded.linears():
        old = before.get(linear.name)
        own = model.linear_bits(old) if old else plain
        drafted = 1 - (old.params / linear.params if old else 0)
        bits[linear.name] = own + drafted * (plain - own) if model.draft_plain else own
    return tuple(bits.items())


def with_draft_model(model: ModelFacts, name: str, draft: ModelFacts | None) -> ModelFacts:
    """The model with a draft model beside it, whose weights and KV lie on the same GPUs.

    With a note alone where nothing is known of it.
    """
    note = f"{name} is loaded to draft" if draft else f"{name}, which drafts, is not known: it is not counted"
    return replace(model, draft_model=draft, notes=(*model.notes, note))


def holding_states(
    model: ModelFacts, draft_tokens: int, cached_states: int, step_tokens: int = 1, *, found: bool = False
) -> ModelFacts:
    """The model whose recurrent states make room for drafts and cached prefixes; itself where it has none.

    A sequence holds a state for each of `draft_tokens`, whose inputs the convolution keeps too, and
    `cached_states` more. Blocks have a multiple of `step_tokens`. `found`: groups are made of which cached
    states are found; else of those that are only counted.
    """
    recurrent = model.recurrent
    if recurrent is None:
        return model
    return replace(
        model,
        recurrent=replace(
            recurrent,
            kernel=recurrent.kernel + draft_tokens,
            blocks=1 + draft_tokens + cached_states,
            drafts=draft_tokens,
            step_tokens=step_tokens,
            cached=found and cached_states > 0,
            exports=cached_states > 1,
        ),
    )
