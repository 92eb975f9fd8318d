"""Reader of attention and recurrent layers from a configuration: heads, latents, indexers, states."""

from __future__ import annotations

from dataclasses import replace

from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.architectures import Architecture
from pagecast.sim.machine.compressed import RATIOS, CompressedCaches, CompressedShape, compressed_caches
from pagecast.sim.machine.config_fields import ConfigFields
from pagecast.sim.machine.indexer import Indexer, IndexHeads, hidden_indexer, latent_indexer
from pagecast.sim.machine.layer_plan import LayerPlan, windows
from pagecast.sim.machine.model_facts import AttentionShape, Mla
from pagecast.sim.machine.recurrent import (
    DeltaHeads,
    MambaHeads,
    RecurrentLayers,
    gated_delta_rule,
    kimi_delta_attention,
    mamba2,
)

_STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def attentions(
    fields: ConfigFields, architecture: Architecture, plan: LayerPlan, hidden: int, layers: int
) -> tuple[AttentionShape, ...]:
    """The shapes of attention in the order of their first layers: two where windows come with other heads."""
    if architecture.compressed:
        fields.has("layer_types", "mlp_layer_types")  # the ratios say it
        return (_compressed(fields, hidden, layers),)
    spans = windows(fields, architecture, plan, layers)
    if fields.get("kv_lora_rank"):
        return (_latent(fields, plan, spans, hidden),)
    base = _plain(fields, architecture, hidden, spans)
    indexed = _listed_sparse_layers(fields, plan)
    if indexed:
        part = fields.part("sparse_attention_config")
        return (
            replace(
                base,
                indexer=hidden_indexer(
                    len(indexed),
                    hidden,
                    IndexHeads(
                        part.integer("sparse_num_index_heads"),
                        part.integer("sparse_index_dim"),
                        part.integer("sparse_topk_blocks") * part.integer("sparse_block_size"),
                    ),
                ),
            ),
        )
    changed = _other_shapes(fields, base)
    if changed is None or not any(spans):
        return (base,)
    full, windowed = changed
    full = replace(full, windows=tuple(window for window in spans if not window))
    windowed = replace(windowed, windows=tuple(window for window in spans if window))
    both = (windowed, full) if spans[0] else (full, windowed)
    return both if full.windows else (windowed,)


def _other_shapes(fields: ConfigFields, base: AttentionShape) -> tuple[AttentionShape, AttentionShape] | None:
    """The shapes of full and of windowed layers, where they differ."""
    full = windowed = base
    if fields.has("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"):
        dim = fields.integer("global_head_dim", default=base.head_dim)
        heads = fields.integer("num_global_key_value_heads", default=base.kv_heads)
        shared = bool(fields.get("attention_k_eq_v"))
        full = replace(base, head_dim=dim, v_head_dim=dim, kv_heads=heads, shared_kv=shared)
    names = ("swa_num_attention_heads", "num_sliding_attention_heads")
    if fields.has(*names, "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"):
        dim = fields.integer("swa_head_dim", default=base.head_dim)
        windowed = replace(
            base,
            heads=fields.integer(*names, default=base.heads),
            kv_heads=fields.integer("swa_num_key_value_heads", default=base.kv_heads),
            head_dim=dim,
            v_head_dim=fields.integer("swa_v_head_dim", default=dim),
        )
    if fields.has("attention_other_setting"):
        other = fields.part("attention_other_setting")
        if other.get("attention_type") not in (None, "sliding_attention"):
            raise fields.wrong("attention_other_setting", "the heads of layers with a sliding window")
        windowed = replace(
            base,
            heads=other.integer("num_attention_heads", default=base.heads),
            kv_heads=other.integer("num_attention_groups", default=base.kv_heads),
            head_dim=other.integer("head_dim", default=base.head_dim),
            v_head_dim=other.integer("head_dim", default=base.head_dim),
        )
    windowed = replace(windowed, sinks=bool(fields.get("add_swa_attention_sink_bias", base.sinks)))
    full = replace(full, sinks=bool(fields.get("add_full_attention_sink_bias", base.sinks)))
    return None if full == windowed else (full, windowed)


def _plain(
    fields: ConfigFields, architecture: Architecture, hidden: int, spans: tuple[int, ...]
) -> AttentionShape:
    heads = fields.integer("num_attention_heads", "n_head")
    head_dim = fields.integer("head_dim", "attention_head_dim", default=max(1, hidden // heads))
    kv_heads = fields.integer("num_key_value_heads", "num_attention_groups", default=heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a number that divides the {heads} attention heads")
    bias = fields.get("attention_bias")
    qk_norm = architecture.qk_norm
    if qk_norm == "option":
        qk_norm = ("full" if architecture.norms == 1 else "head") if fields.get("use_qk_norm") else ""
    else:
        fields.has("use_qk_norm", "qk_norm_type")
    gated = architecture.gated == "yes" or (
        architecture.gated == "option" and fields.get("attn_output_gate") is not False
    )
    if fields.has("attention_output_gate", "use_head_wise_attn_gate") and not architecture.head_gated:
        raise fields.wrong("attention_output_gate", "false: gates of this model_type are not known")
    return AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=fields.integer("v_head_dim", default=head_dim),
        windows=spans,
        chunked=architecture.chunked,
        gated=gated,
        head_gated=architecture.head_gated,
        qkv_bias=bool(architecture.qkv_bias if bias is None else bias),
        o_bias=architecture.biased or bool(bias and architecture.o_bias),
        qk_norm=qk_norm,
        sinks=architecture.sinks,
    )


def _latent(fields: ConfigFields, plan: LayerPlan, spans: tuple[int, ...], hidden: int) -> AttentionShape:
    """Multi-head latent attention, with an indexer where the file has one."""
    heads = fields.integer("num_attention_heads", "n_head")
    fields.has("head_dim", "num_key_value_heads", "attention_bias")  # they do not count here
    mla = Mla(
        kv_lora_rank=fields.integer("kv_lora_rank"),
        rope_dim=fields.count("qk_rope_head_dim"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        q_lora_rank=fields.integer("q_lora_rank") if fields.get("q_lora_rank") else None,
    )
    indexer: Indexer | None = None
    indexed = _latent_index_layers(fields, plan)
    if indexed:
        if mla.q_lora_rank is None:
            raise fields.wrong("q_lora_rank", "there: the indexer's queries come from that latent")
        indexer = latent_indexer(
            len(indexed),
            len(plan.attention),
            hidden,
            mla.q_lora_rank,
            IndexHeads(
                fields.integer("index_n_heads"),
                fields.integer("index_head_dim"),
                fields.integer("index_topk"),
            ),
            pool=fields.integer("index_kpool", default=1),
        )
    return AttentionShape(
        heads=heads,
        kv_heads=heads,
        head_dim=mla.nope_dim + mla.rope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        windows=spans,
        gated=bool(fields.get("mla_use_output_gate")),
        mla=mla,
        indexer=indexer,
    )


def _latent_index_layers(fields: ConfigFields, plan: LayerPlan) -> tuple[int, ...]:
    """The layers that have an indexer of their own; others use the choice of one before them."""
    if not fields.has("index_topk", "index_head_dim", "index_n_heads"):
        return ()
    types = fields.names("indexer_types")
    if types:
        return tuple(layer for layer in plan.attention if layer < len(types) and types[layer] == "full")
    often = fields.count("index_topk_freq", default=1) or 1
    offset = fields.count("index_skip_topk_offset", default=2)
    return tuple(layer for layer in plan.attention if max(layer - offset + 1, 0) % often == 0)


def _listed_sparse_layers(fields: ConfigFields, plan: LayerPlan) -> tuple[int, ...]:
    """MiniMax's layers of sparse attention, each with an indexer."""
    part = fields.part("sparse_attention_config")
    if not part.get("use_sparse_attention", bool(part.said())):
        return ()
    often = part.numbers("sparse_attention_freq", plan.attention[-1] + 1)
    return tuple(layer for layer in plan.attention if often[layer])


def _compressed(fields: ConfigFields, hidden: int, layers: int) -> AttentionShape:
    ratios = tuple(fields.numbers("compress_ratios", layers))
    odd = sorted(set(ratios) - {0, 1, *RATIOS})
    if odd:
        raise BadInput(f"{fields.where}: compress_ratios has {odd[0]}; pagecast knows 0, 1, 4 and 128")
    heads, dim = fields.integer("num_attention_heads"), fields.integer("head_dim")
    fields.has("num_key_value_heads", "qk_rope_head_dim", "index_topk", "attention_bias")
    caches: CompressedCaches = compressed_caches(
        CompressedShape(
            hidden=hidden,
            heads=heads,
            head_dim=dim,
            q_rank=fields.integer("q_lora_rank"),
            o_rank=fields.integer("o_lora_rank"),
            o_groups=fields.integer("o_groups"),
            window=fields.integer("sliding_window"),
            ratios=ratios,
            index_heads=fields.integer("index_n_heads"),
            index_dim=fields.integer("index_head_dim"),
        )
    )
    return AttentionShape(
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        v_head_dim=dim,
        windows=(0,) * layers,
        sinks=True,
        mla=None,
        compressed=caches,
    )


def indexed_layers(fields: ConfigFields, plan: LayerPlan, shape: AttentionShape) -> tuple[int, ...]:
    """The layers that have an indexer of their own."""
    if shape.compressed:
        return plan.attention
    if shape.indexer is None:
        return ()
    return _latent_index_layers(fields, plan) if shape.mla else _listed_sparse_layers(fields, plan)


def recurrent_layers(
    fields: ConfigFields, architecture: Architecture, plan: LayerPlan, hidden: int
) -> RecurrentLayers | None:
    if not plan.recurrent:
        return None
    count, leads = len(plan.recurrent), plan.recurrent[0] < min(plan.attention, default=0)
    if architecture.recurrent == "mamba":
        mamba = MambaHeads(
            heads=fields.integer("mamba_num_heads"),
            head_dim=fields.integer("mamba_head_dim"),
            groups=fields.integer("n_groups"),
            state_size=fields.integer("ssm_state_size"),
        )
        kernel = fields.integer("conv_kernel", default=4)
        state_bytes = _state_bytes(fields, "mamba_ssm_cache_dtype")
        return mamba2(count, hidden, mamba, kernel, state_bytes, leads=leads)
    if architecture.recurrent == "kimi":
        part = fields.part("linear_attn_config")
        heads, dim = part.integer("num_heads"), part.integer("head_dim")
        fields.has("linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads")  # they repeat the part
        kernel = part.integer("short_conv_kernel_size", default=4)
        delta = DeltaHeads(heads, heads, dim, dim)
        full_gate = bool(part.get("use_full_rank_gate"))
        return kimi_delta_attention(count, hidden, delta, kernel, full_gate=full_gate, leads=leads)
    delta = DeltaHeads(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
    )
    kernel = fields.integer("linear_conv_kernel_dim", default=4)
    return gated_delta_rule(
        count, hidden, delta, kernel, _state_bytes(fields, "mamba_ssm_dtype"), leads=leads
    )


def _state_bytes(fields: ConfigFields, field: str) -> int:
    """Bytes of an element of a state; 0 where the file does not say."""
    dtype = fields.get(field)
    if dtype is None:
        return 0
    if dtype not in _STATE_BYTES:
        raise fields.wrong(field, f"one of {', '.join(_STATE_BYTES)}")
    return _STATE_BYTES[dtype]
