"""Parts of each layer of a decoder: attention or a state, an MLP or experts."""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.architectures import Architecture
from pagecast.sim.machine.config_fields import ConfigFields

_FULL_NAMES = ("full_attention", "attention", "deepseek_sparse_attention", "indexed_attention")
_WINDOW_NAMES = ("sliding_attention", "local", "chunked_attention")
_BLOCK_NAMES = {"full_attention": "attention", "linear_attention": "mamba"}
_BLOCK_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Numbers of the layers that have attention, a recurrent state, an ordinary MLP, or experts."""

    attention: tuple[int, ...]
    recurrent: tuple[int, ...]
    dense: tuple[int, ...]
    sparse: tuple[int, ...]


def layer_plan(fields: ConfigFields, architecture: Architecture, layers: int) -> LayerPlan:
    """The plan of `layers` layers. Errors: BadInput for lists of another length or with unknown names."""
    blocks = _block_types(fields, layers)
    if blocks:
        return LayerPlan(*(_where(blocks, kind) for kind in ("attention", "mamba", "mlp", "moe")))
    if architecture.recurrent == "mamba":
        raise BadInput(f"{fields.where}: layers_block_type is missing; it is needed to size the model")
    recurrent = _recurrent_layers(fields, architecture, layers)
    sparse = _sparse_layers(fields, layers)
    without = set(recurrent)
    dense = range(layers) if architecture.beside else (i for i in range(layers) if i not in set(sparse))
    return LayerPlan(tuple(i for i in range(layers) if i not in without), recurrent, tuple(dense), sparse)


def _where(kinds: tuple[str, ...], wanted: str) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(kinds) if kind == wanted)


def _block_types(fields: ConfigFields, layers: int) -> tuple[str, ...]:
    """The one block that each layer is, where layers are blocks of one kind."""
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        types = tuple(_BLOCK_LETTERS.get(letter, letter) for letter in pattern)
    else:
        types = tuple(_BLOCK_NAMES.get(name, name) for name in fields.names("layers_block_type"))
    unknown = sorted(set(types) - set(_BLOCK_LETTERS.values()))
    if unknown:
        raise BadInput(
            f"{fields.where}: a layer is a block of kind {unknown[0]!r}, which pagecast can't size"
        )
    if types and len(types) != layers:
        raise BadInput(f"{fields.where}: {len(types)} blocks are listed for {layers} layers")
    return types


def _recurrent_layers(fields: ConfigFields, architecture: Architecture, layers: int) -> tuple[int, ...]:
    types = fields.names("layer_types", layers)
    if not architecture.recurrent:
        if "linear_attention" in types:
            raise BadInput(
                f"{fields.where}: layer_types has recurrent layers that pagecast can't size in a model_type "
                "that it does not know"
            )
        return ()
    if types:
        return _where(types, "linear_attention")
    if architecture.recurrent == "kimi":
        listed = sorted(fields.part("linear_attn_config").layer_list("kda_layers"))
        first = 0 if listed and listed[0] == 0 else 1
        if not listed or listed[-1] - first >= layers:
            raise BadInput(f"{fields.where}: linear_attn_config.kda_layers must list some of {layers} layers")
        return tuple(layer - first for layer in listed)
    period = fields.integer("full_attention_interval", default=4)
    return tuple(i for i in range(layers) if (i + 1) % period)


def _sparse_layers(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    """The layers that have experts."""
    if not fields.has("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        return ()
    types = fields.names("mlp_layer_types", layers)
    first = fields.count("first_k_dense_replace")
    dense = fields.layer_list("mlp_only_layers")
    step = fields.count("decoder_sparse_step", "interleave_moe_layer_step") or 1
    listed = fields.get("moe_layers")
    if types:
        return _where(types, "sparse")
    if listed:
        return tuple(sorted(layer for layer in fields.layer_list("moe_layers") if layer < layers))
    if isinstance(fields.get("moe_layer_freq"), list):
        often = fields.numbers("moe_layer_freq", layers)
        return tuple(i for i, has in enumerate(often) if has)
    often_step = fields.count("moe_layer_freq") or 1
    return tuple(
        i for i in range(first, layers) if i not in dense and (i + 1) % step == 0 and i % often_step == 0
    )


def windows(
    fields: ConfigFields, architecture: Architecture, plan: LayerPlan, layers: int
) -> tuple[int, ...]:
    """The window of each layer that has attention; 0 for those that attend to everything."""
    if architecture.chunked:  # three layers of four attend within chunks
        chunk = fields.integer("attention_chunk_size", default=8192)
        return tuple(chunk if (i + 1) % 4 else 0 for i in plan.attention)
    types = fields.names("layer_types", layers)
    pattern = fields.get("hybrid_layer_pattern")
    window = fields.count("sliding_window")
    longest = fields.integer("max_position_embeddings", "n_positions", default=2048)
    first = fields.count("max_window_layers", default=layers)
    period = fields.count(
        "sliding_window_pattern", "_sliding_window_pattern", default=architecture.full_period
    )
    unknown = sorted(set(types) - {*_FULL_NAMES, *_WINDOW_NAMES, "linear_attention"})
    if unknown:
        raise BadInput(f"{fields.where}: layer_types has {unknown[0]!r}, which pagecast can't size")
    if fields.get("attention_chunk_size") not in (None, window):
        raise fields.wrong("attention_chunk_size", f"the sliding window, {window}, in this model_type")
    if fields.get("attn_type_list") and set(fields.numbers("attn_type_list", layers)) != {1}:
        raise fields.wrong("attn_type_list", "a list of 1: other layers can't be sized")
    if not window or window >= longest or fields.get("use_sliding_window") is False:
        return (0,) * len(plan.attention)
    if types:
        return tuple(window if types[i] in _WINDOW_NAMES else 0 for i in plan.attention)
    if pattern:
        has = fields.numbers("hybrid_layer_pattern", layers)
        return tuple(window if has[i] else 0 for i in plan.attention)
    if architecture.alternating:
        return tuple(0 if i % 2 else window for i in plan.attention)
    if period:
        return tuple(window if (i + 1) % period else 0 for i in plan.attention)
    if fields.has("max_window_layers"):
        return tuple(window if i >= first else 0 for i in plan.attention)
    return (window,) * len(plan.attention)
