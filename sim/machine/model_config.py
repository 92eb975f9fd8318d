"""Reader of a transformers `config.json` into `ModelFacts`.

The layout of each architecture (which biases, norms, windows, experts) is not in the file: it follows
from `model_type`, and stands in `architectures.py`. A field that matters and is read by nobody is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.architectures import ARCHITECTURES, REFUSED, Architecture
from pagecast.sim.machine.attention_config import attentions, indexed_layers, recurrent_layers
from pagecast.sim.machine.config_fields import Config, ConfigFields
from pagecast.sim.machine.layer_plan import LayerPlan, layer_plan
from pagecast.sim.machine.matrix import Matrix
from pagecast.sim.machine.model_facts import AttentionShape, ModelFacts, Moe
from pagecast.sim.machine.quantization import Placed, Quantization, read_quantization
from pagecast.sim.machine.towers import tower_params
from pagecast.sim.note import Caution

# A float32 checkpoint is served in 16 bits, as vLLM's dtype `auto` does.
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "bf16", "float": "bf16"}
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
_GATED = ("silu", "swish", "swiglu")  # whose MLPs have a gate in all decoders of transformers and vLLM


def model_from_config(
    config: Config, name: str, where: str, *, quantization: Config | None = None, assume_dense: bool = False
) -> ModelFacts:
    """`ModelFacts` of a parsed `config.json`; `where` names the file in messages.

    `quantization`: what stands in a `hf_quant_config.json` beside it. `assume_dense`: fields that matter and
    that pagecast does not know are a note, not an error. Errors: `BadInput` for a field that is missing,
    malformed or unknown, and for architectures that pagecast can't size.
    """
    outer, notes = config, list[str]()
    text = next((config[part] for part in _TEXT_PARTS if isinstance(config.get(part), Mapping)), None)
    around: Config = {}
    if text is not None:
        around = {k: v for k, v in outer.items() if not k.endswith("_config")}
        config = text
    kind = str(config.get("model_type") or outer.get("model_type") or "llama")
    if kind in REFUSED:
        raise BadInput(f"{where}: model_type {kind!r} {REFUSED[kind]}")
    architecture = ARCHITECTURES.get(kind)
    fields = ConfigFields(config, where, around)
    if architecture is None:
        notes.append(
            f"model_type {kind!r} is not one pagecast knows: norms, biases and gates are taken for Llama's"
        )
        architecture = Architecture()
        if not assume_dense:
            _check_gated(fields, kind)
    facts = _decoder(fields, architecture, kind, name)
    params, known = tower_params(outer, facts.hidden)
    if not known:
        notes.append("only the text decoder is counted: add the weights of the vision or audio tower")
    dtype = _dtype(config, outer, where)
    scheme = config.get("quantization_config") or outer.get("quantization_config")
    quantized = _quantization(fields, facts, architecture, scheme or quantization, dtype)
    _check_unread(fields, assume_dense, notes)
    return replace(
        facts,
        tower_params=params,
        tied=_tied(config, outer, architecture),
        dtype=dtype,
        weight_dtype=quantized.weight_dtype or dtype,
        quantized=quantized.covers,
        weight_bits=quantized.weight_bits,
        kv_dtype=quantized.kv_dtype,
        draft_plain=quantized.draft_plain,
        notes=tuple(notes),
    )


def _tied(config: Config, outer: Config, architecture: Architecture) -> bool:
    """Whether the output projection is the embedding; a whole that says no overrules its decoder.

    Source: with_hf_config and maybe_untie_word_embeddings in vLLM 0.33. A decoder that says no has, for all
    that is known, a projection in its checkpoint, which vLLM takes whatever the whole says.
    """
    said = [part["tie_word_embeddings"] for part in (config, outer) if "tie_word_embeddings" in part]
    return all(said) if said else architecture.tied


def _check_gated(fields: ConfigFields, kind: str) -> None:
    """Errors: BadInput where an unknown architecture may have an MLP of two matrices."""
    activation = next((fields.get(name) for name in _ACTIVATIONS if fields.has(name)), None)
    if activation not in _GATED:
        raise BadInput(
            f"{fields.where}: model_type {kind!r} is not one pagecast knows, and an MLP with "
            f"hidden_act {activation!r} may have a gate or none; assume_dense reads it with a gate"
        )


def _check_unread(fields: ConfigFields, assume_dense: bool, notes: list[str]) -> None:
    unread = fields.unread()
    if not unread:
        return
    text = f"{', '.join(unread[:4])}{' and more' if len(unread) > 4 else ''}"
    if not assume_dense:
        raise BadInput(
            f"{fields.where}: {text} may change attention, caches, experts or weights, and pagecast does not "
            "know how; assume_dense reads the model without them"
        )
    notes.append(Caution(f"READ WITHOUT {text}: sizes and times may be wrong by any factor"))


def _decoder(fields: ConfigFields, architecture: Architecture, kind: str, name: str) -> ModelFacts:
    """The decoder in the model's own dtype."""
    hidden, layers = fields.integer("hidden_size", "n_embd", "d_model"), fields.layers()
    plan = layer_plan(fields, architecture, layers)
    if fields.get("block_configs"):
        return _listed_blocks(fields, kind, name, hidden, layers)
    shapes = attentions(fields, architecture, plan, hidden, layers)
    moe = _moe(fields, architecture, plan)
    intermediate = fields.integer(
        "intermediate_size_mlp",
        "dense_intermediate_size",
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        default=4 * hidden,
    )
    if fields.get("word_embed_proj_dim") not in (None, hidden):
        raise fields.wrong("word_embed_proj_dim", f"the hidden size, {hidden}")
    more, small = _hyper_connections(fields, hidden, layers)
    if moe and architecture.beside:
        small += layers * (architecture.norms_beside_experts * hidden + hidden + moe.experts)
    if fields.get("attn_res_block_size"):  # Kimi-K3: gates of residuals from earlier blocks
        small += layers * 4 * hidden
    positions = fields.integer("max_position_embeddings", "n_positions", default=2048)
    return ModelFacts(
        name=name,
        model_type=kind,
        hidden=hidden,
        layers=layers,
        vocab=fields.integer("vocab_size"),
        intermediate=intermediate,
        attention=shapes[0],
        more_attention=shapes[1:],
        recurrent=recurrent_layers(fields, architecture, plan, hidden),
        tied=False,
        max_position=positions,
        gated=architecture.gated_mlp and not architecture.biased,
        mlp_bias=bool(fields.get("mlp_bias", architecture.biased)),
        norms_per_layer=architecture.norms,
        norm_bias=architecture.biased,
        learned_positions=positions + 2 if architecture.learned_positions else 0,
        moe=moe,
        dense_layers=len(plan.dense),
        more_matrices=more,
        more_small=small,
        untimed="compressed sparse attention" if architecture.compressed else "",
        draft_layers=_draft_layers(fields)
        if architecture.draft_layers is None
        else architecture.draft_layers,
        draft_window=architecture.draft_window,
        draft_dense=architecture.draft_dense,
    )


def _draft_layers(fields: ConfigFields) -> int:
    """Layers that the checkpoint has for drafting."""
    return fields.count("num_mtp_modules", "mtp_num_hidden_layers", "num_nextn_predict_layers")


def _hyper_connections(fields: ConfigFields, hidden: int, layers: int) -> tuple[tuple[Matrix, ...], int]:
    """Matrices that mix several residual streams, before attention and before the MLP, in float32."""
    streams = fields.count("hc_mult")
    if not streams:
        return (), 0
    mixed = streams * (streams + 2)
    # Twice, since they are held in 32 bits.
    return (Matrix("hyper_connection", streams * hidden, 2 * 2 * mixed, layers),), 4 * layers * (mixed + 3)


def _moe(fields: ConfigFields, architecture: Architecture, plan: LayerPlan) -> Moe | None:
    if not plan.sparse:
        return None
    intermediate = fields.integer("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    experts = fields.integer("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    active = fields.integer(
        "num_experts_per_tok", "moe_topk", "num_experts_per_token", "top_k_experts", "experts_per_token"
    )
    fields.has(
        "intermediate_size",
        "experts_per_token",
        "enable_moe_block",
        "expert_intermediate_size",
        "use_routing_bias",
    )
    fields.has("use_moe_router_bias", "moe_top_k", "moe_every_n_layer")
    if active > experts:
        raise BadInput(f"{fields.where}: {active} experts per token, but there are only {experts} experts")
    shared_count = fields.count("n_shared_experts", "num_shared_experts")
    width = fields.count(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
        "share_expert_dims",
        "shared_intermediate_size",
    )
    shared = width or (intermediate if architecture.shared_expert else shared_count * intermediate)
    return Moe(
        layers=len(plan.sparse),
        experts=experts,
        active=active,
        intermediate=intermediate,
        shared_intermediate=shared,
        shared_gate=architecture.shared_gate and bool(shared),
        router_bias=architecture.router_bias and fields.get("topk_method", "noaux_tc") == "noaux_tc",
        expert_bias=architecture.expert_bias,
        latent=fields.count("moe_latent_size", "routed_expert_hidden_size"),
    )


def _listed_blocks(fields: ConfigFields, kind: str, name: str, hidden: int, layers: int) -> ModelFacts:
    """A decoder whose layers are listed with their own heads and widths (Nemotron's NAS models)."""
    blocks = fields.get("block_configs")
    heads = fields.integer("num_attention_heads")
    if not isinstance(blocks, list) or len(blocks) != layers:
        raise fields.wrong("block_configs", f"a list of {layers} blocks")
    fields.has("intermediate_size", "num_key_value_heads", "attention_bias", "mlp_bias")
    groups: set[int] = set()
    widths: dict[int, int] = {}
    attended = 0
    for i, block in enumerate(blocks):
        where = f"{fields.where}: block_configs[{i}]"
        part = ConfigFields(block if isinstance(block, Mapping) else {}, where)
        attention, mlp = part.part("attention"), part.part("ffn")
        odd = [
            f"{side}.{field}"
            for side, each, known in (
                ("attention", attention, ("n_heads_in_group", "no_op")),
                ("ffn", mlp, ("ffn_mult", "no_op")),
            )
            for field in each.said()
            if field not in known
        ]
        if odd:
            raise BadInput(f"{where} has {odd[0]}, which pagecast can't size")
        if not attention.get("no_op"):
            groups.add(attention.integer("n_heads_in_group"))
            attended += 1
        if not mlp.get("no_op"):
            width = _scaled_width(mlp.number("ffn_mult"), hidden)
            widths[width] = widths.get(width, 0) + 1
    if len(groups) != 1:
        raise BadInput(
            f"{fields.where}: block_configs has groups of {sorted(groups)} heads; one size is known"
        )
    head_dim = hidden // heads
    shape = AttentionShape(heads, heads // groups.pop(), head_dim, head_dim, windows=(0,) * attended)
    up = tuple(Matrix("up", hidden, 2 * width, n, "outputs") for width, n in widths.items())
    down = tuple(Matrix("down", width, hidden, n, "inputs") for width, n in widths.items())
    return ModelFacts(
        name=name,
        model_type=kind,
        hidden=hidden,
        layers=layers,
        vocab=fields.integer("vocab_size"),
        intermediate=max(widths),
        attention=shape,
        tied=False,
        max_position=fields.integer("max_position_embeddings", default=2048),
        dense_layers=0,
        more_matrices=(*up, *down),
    )


def _scaled_width(multiple: float, hidden: int) -> int:
    """The MLP's width: two thirds of a multiple of the hidden state, rounded up to 256."""
    return -(-int(2 * multiple * hidden / 3) // 256) * 256


def _dtype(config: Config, outer: Config, where: str) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or outer.get("dtype") or outer.get("torch_dtype")
    name = str(dtype or "bfloat16").removeprefix("torch.")
    if name not in _DTYPES:
        raise BadInput(f"{where}: torch_dtype is {name[:40]!r}; it must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _quantization(
    fields: ConfigFields, facts: ModelFacts, architecture: Architecture, scheme: Any, dtype: str
) -> Quantization:
    plan = layer_plan(fields, architecture, facts.layers)
    mixer, recurrent, dense, sparse = architecture.blocks
    indexed = indexed_layers(fields, plan, facts.attention)
    places = {
        "attention": (plan.attention, mixer),
        "index": (indexed, mixer),
        "recurrent": (plan.recurrent, recurrent),
        "dense": (plan.dense, dense),
        "sparse": (plan.sparse, sparse),
    }
    placed = tuple(
        Placed(linear, *places[place])
        for linear in facts.linears()
        if (place := _place_of(linear.name)) in places
    )
    expert_dtype = fields.get("expert_dtype")
    return read_quantization(scheme, fields.where, placed, dtype, expert_dtype, facts.layers)


def _place_of(name: str) -> str:
    """Which layers a matrix of that name belongs to."""
    if name in ("up", "down"):
        return "dense"
    for start, place in (
        ("recurrent", "recurrent"),
        ("index", "index"),
        ("expert", "sparse"),
        ("shared", "sparse"),
        ("latent", "sparse"),
        ("router", ""),
        ("compressor", ""),
        ("hyper", ""),
    ):
        if name.startswith(start):
            return place
    return "attention"
