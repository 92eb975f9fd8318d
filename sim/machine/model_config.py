"""Reader of a transformers `config.json` into `ModelFacts`.

The layout of each architecture (which biases, norms, windows, experts) is not in the file: it follows
from `model_type`. Layouts here are those of the architectures' published modelling code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.model_facts import AttentionShape, Mla, ModelFacts, Moe
from pagecast.sim.machine.recurrent import RecurrentLayers

Config = Mapping[str, Any]
_MAX_LAYERS = 10_000

# Decoders laid out as Llama is: RMS norms, rotary positions, a gated MLP; what differs is listed below.
_LLAMA_LIKE = {
    "llama",
    "llama4_text",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "phi3",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
    "gpt_oss",
    "olmo2",
    "olmo3",
    "olmoe",
    "cohere",
    "cohere2",
    "glm4",
    "glm4_moe",
    "granite",
    "starcoder2",
    "opt",
    "seed_oss",
    "smollm3",
    "minimax_m2",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
}
# Layers that keep a recurrent state instead of, or beside, a KV cache.
_RECURRENT = {
    "mamba",
    "mamba2",
    "falcon_mamba",
    "jamba",
    "bamba",
    "zamba",
    "zamba2",
    "falcon_h1",
    "nemotron_h",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "lfm2",
    "lfm2_moe",
    "rwkv",
    "granitemoehybrid",
    "recurrent_gemma",
    "minimax",
    "kimi_linear",
    "bailing_hybrid",
    "plamo2",
}
_DELTA_RULE = {"qwen3_next"}  # of these pagecast knows the recurrent layers
_QKV_BIAS = {"qwen2", "qwen2_moe", "starcoder2", "opt", "qwen2_vl_text", "qwen2_5_vl_text"}
_HEAD_QK_NORM = {"qwen3", "qwen3_moe", "gemma3_text", "gemma3", "qwen3_vl_text", "qwen3_vl_moe_text"}
_HEAD_QK_NORM |= _DELTA_RULE
_FULL_QK_NORM = {"olmo2", "olmo3", "olmoe", "minimax_m2"}
_FOUR_NORMS = {"gemma2", "gemma3_text", "gemma3", "glm4"}
_STARCODER_OPT = {"starcoder2", "opt"}  # LayerNorm with a bias, biases everywhere, an MLP without a gate
# A float32 checkpoint is served in 16 bits, as vLLM's dtype `auto` does.
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "bf16", "float": "bf16"}
_TIED = {"gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "opt"}  # where the file is silent


def model_from_config(config: Config, name: str, where: str) -> ModelFacts:
    """`ModelFacts` of a parsed `config.json`; `where` names the file in messages.

    Errors: `BadInput` for a field that is missing or not a positive integer, and for architectures with
    recurrent layers that pagecast does not know.
    """
    outer = config
    text = config.get("text_config") or config.get("llm_config") or config.get("language_config")
    notes: list[str] = []
    if any(key in outer for key in ("vision_config", "audio_config", "vision_tower")):
        notes.append("only the text decoder is counted: add the weights of the vision or audio tower")
    if isinstance(text, Mapping):
        config = {**{k: v for k, v in outer.items() if k not in text and not k.endswith("_config")}, **text}
    kind = str(config.get("model_type") or outer.get("model_type") or "llama")
    read = _Reader(config, where)
    recurrent = _recurrent(read) if kind in _DELTA_RULE else None
    if kind in _RECURRENT or (recurrent is None and "linear_attention" in read.layer_types()):
        raise BadInput(f"{where}: model_type {kind!r} has recurrent layers that pagecast can't size")
    if kind not in _LLAMA_LIKE | _DELTA_RULE:
        notes.append(f"model_type {kind!r} is not one pagecast knows: read as a Llama-like decoder")
    attention = _attention(read, kind)
    weight_dtype, quantized = _quantization(read, outer)
    dtype = _dtype(config, outer, where)
    return ModelFacts(
        name=name,
        model_type=kind,
        hidden=read.hidden,
        layers=read.layers,
        vocab=read.integer("vocab_size"),
        intermediate=read.integer(
            "intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner", default=4 * read.hidden
        ),
        attention=attention,
        recurrent=recurrent,
        tied=bool(config.get("tie_word_embeddings", outer.get("tie_word_embeddings", kind in _TIED))),
        max_position=read.integer("max_position_embeddings", "n_positions", default=2048),
        gated=kind not in _STARCODER_OPT,
        mlp_bias=bool(config.get("mlp_bias", kind in _STARCODER_OPT)),
        norms_per_layer=4 if kind in _FOUR_NORMS else 1 if kind in ("cohere", "cohere2") else 2,
        norm_bias=kind in _STARCODER_OPT,
        learned_positions=read.integer("max_position_embeddings") + 2 if kind == "opt" else 0,
        moe=_moe(read, kind),
        dtype=dtype,
        weight_dtype=weight_dtype or dtype,
        quantized=quantized,
        notes=tuple(notes),
    )


class _Reader:
    """Looks fields up under their several names, and says which one is wrong."""

    def __init__(self, config: Config, where: str) -> None:
        self.config, self.where = config, where
        self.hidden = self.integer("hidden_size", "n_embd", "d_model")
        self.layers = self.integer("num_hidden_layers", "n_layer", "num_layers")
        if self.layers > _MAX_LAYERS:
            raise BadInput(f"{where}: {self.layers:,} layers are more than the {_MAX_LAYERS:,} that are read")

    def wrong(self, field: str, must: str) -> BadInput:
        """The error for a field that is not what it must be."""
        return BadInput(f"{self.where}: {field} is {str(self.config.get(field))[:80]!r}; it must be {must}")

    def integer(self, *names: str, default: int | None = None) -> int:
        for field in names:
            value = self.config.get(field)
            if value is None:
                continue
            if isinstance(value, list):  # some vision models list one size per layer
                value = value[0] if value and all(each == value[0] for each in value) else value
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise BadInput(f"{self.where}: {field} is {value!r}; it must be a positive integer")
            return value
        if default is None:
            raise BadInput(f"{self.where}: {names[0]} is missing; it is needed to size the model")
        return default

    def count(self, *names: str, default: int = 0) -> int:
        """A whole number of 0 or more; `default` where no field of these names says one."""
        for field in names:
            value = self.config.get(field)
            if value is None or value is False:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.wrong(field, "a whole number of 0 or more")
            return value
        return default

    def layer_types(self) -> tuple[str, ...]:
        """The name of each layer's attention; empty where the file does not have it."""
        types = self.config.get("layer_types")
        if not types:
            return ()
        if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
            raise self.wrong("layer_types", "a list of names")
        if len(types) != self.layers:
            raise BadInput(f"{self.where}: layer_types has {len(types)} entries for {self.layers} layers")
        return tuple(types)

    def layer_list(self, field: str) -> set[int]:
        """Numbers of layers."""
        layers = self.config.get(field) or []
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise self.wrong(field, "a list of layer numbers")
        return set(layers)


def _attention(read: _Reader, kind: str) -> AttentionShape:
    config = read.config
    heads = read.integer("num_attention_heads", "n_head")
    mla = None
    if config.get("kv_lora_rank"):
        mla = Mla(
            kv_lora_rank=read.integer("kv_lora_rank"),
            rope_dim=read.integer("qk_rope_head_dim"),
            nope_dim=read.integer("qk_nope_head_dim"),
            q_lora_rank=read.integer("q_lora_rank") if config.get("q_lora_rank") else None,
        )
        head_dim, v_head_dim = mla.nope_dim + mla.rope_dim, read.integer("v_head_dim")
        kv_heads = heads
    else:
        head_dim = v_head_dim = read.integer("head_dim", default=max(1, read.hidden // heads))
        kv_heads = read.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise read.wrong("num_key_value_heads", f"a number that divides the {heads} attention heads")
    bias = config.get("attention_bias")
    qk_norm = "head" if kind in _HEAD_QK_NORM else "full" if kind in _FULL_QK_NORM else ""
    if kind in ("glm4_moe", "cohere") and config.get("use_qk_norm"):
        qk_norm = "head" if kind == "glm4_moe" else "full"
    return AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        windows=_windows(read, kind),
        chunked=kind == "llama4_text",
        gated=kind in _DELTA_RULE and config.get("attn_output_gate") is not False,
        qkv_bias=bool(kind in _QKV_BIAS if bias is None else bias),
        o_bias=kind in _STARCODER_OPT or bool(bias and kind in ("llama", "gpt_oss", "granite", "qwen3")),
        qk_norm=qk_norm,
        sinks=kind == "gpt_oss",
        mla=mla,
    )


def _recurrent(read: _Reader) -> RecurrentLayers:
    """The gated delta-rule layers of a hybrid model."""
    kinds = _delta_rule_layers(read)
    return RecurrentLayers(
        layers=sum(kinds),
        key_heads=read.integer("linear_num_key_heads"),
        value_heads=read.integer("linear_num_value_heads"),
        key_dim=read.integer("linear_key_head_dim"),
        value_dim=read.integer("linear_value_head_dim"),
        kernel=read.integer("linear_conv_kernel_dim", default=4),
        leads=kinds[0],
    )


def _delta_rule_layers(read: _Reader) -> list[bool]:
    """For each layer whether it is recurrent: all but every fourth where the file does not say."""
    types = read.layer_types()
    if types:
        return [kind == "linear_attention" for kind in types]
    period = read.integer("full_attention_interval", default=4)
    return [(i + 1) % period > 0 for i in range(read.layers)]


def _windows(read: _Reader, kind: str) -> tuple[int, ...]:
    config, layers = read.config, read.layers
    if kind in _DELTA_RULE:
        return (0,) * _delta_rule_layers(read).count(False)
    if kind == "llama4_text":  # three layers of four attend within chunks
        chunk = read.integer("attention_chunk_size", default=8192)
        return tuple(chunk if (i + 1) % 4 else 0 for i in range(layers))
    window = read.count("sliding_window")
    longest = read.integer("max_position_embeddings", "n_positions", default=2048)
    if not window or window >= longest or config.get("use_sliding_window") is False:
        return (0,) * layers
    types = read.layer_types()
    if types:
        return tuple(window if layer_kind in ("sliding_attention", "local") else 0 for layer_kind in types)
    if kind == "gemma2" or kind == "gpt_oss":
        return tuple(window if i % 2 == 0 else 0 for i in range(layers))
    period = {"gemma3_text": 6, "gemma3": 6, "cohere2": 4}.get(kind, 0)
    pattern = read.count("sliding_window_pattern", default=period)
    if pattern:
        return tuple(window if (i + 1) % pattern else 0 for i in range(layers))
    if kind.startswith("qwen"):
        first = read.count("max_window_layers", default=layers)
        return tuple(window if i >= first else 0 for i in range(layers))
    return (window,) * layers


def _moe(read: _Reader, kind: str) -> Moe | None:
    config = read.config
    if not any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    intermediate = read.integer("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    shared = read.count("n_shared_experts") * intermediate
    if kind == "llama4_text":
        shared = intermediate
    shared = read.count("shared_expert_intermediate_size") or shared
    experts = read.integer("num_experts", "num_local_experts", "n_routed_experts")
    active = read.integer("num_experts_per_tok", "moe_topk", "num_experts_per_token")
    if active > experts:
        raise BadInput(f"{read.where}: {active} experts per token, but there are only {experts} experts")
    return Moe(
        layers=_sparse_layers(read),
        experts=experts,
        active=active,
        intermediate=intermediate,
        shared_intermediate=shared,
        shared_gate=kind in ("qwen2_moe", "qwen3_next"),
        router_bias=kind in ("deepseek_v3", "kimi_k2", "gpt_oss", "glm4_moe", "minimax_m2")
        and config.get("topk_method", "noaux_tc") == "noaux_tc",
        expert_bias=kind == "gpt_oss",
    )


def _sparse_layers(read: _Reader) -> int:
    """How many layers have experts."""
    first = read.count("first_k_dense_replace")
    dense = read.layer_list("mlp_only_layers")
    step = read.count("decoder_sparse_step") or read.count("interleave_moe_layer_step") or 1
    often = read.count("moe_layer_freq") or 1
    layers = range(first, read.layers)
    return sum(i not in dense and (i + 1) % step == 0 and i % often == 0 for i in layers)


def _dtype(config: Config, outer: Config, where: str) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or outer.get("dtype") or outer.get("torch_dtype")
    name = str(dtype or "bfloat16").removeprefix("torch.")
    if name not in _DTYPES:
        raise BadInput(f"{where}: torch_dtype is {name[:40]!r}; it must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _quantization(read: _Reader, outer: Config) -> tuple[str | None, str]:
    """Weight dtype that `quantization_config` asks for (None: not quantised) and what it covers."""
    scheme = read.config.get("quantization_config") or outer.get("quantization_config")
    if not isinstance(scheme, Mapping):
        return None, "all"
    method = str(scheme.get("quant_method", "")).lower()
    bits = scheme.get("bits") or scheme.get("w_bit")
    if bits not in (None, 4, 8):
        raise BadInput(
            f"{read.where}: quantization_config.bits is {str(bits)[:40]!r}; pagecast sizes weights of 4 or 8"
        )
    if method == "mxfp4":
        return "mxfp4", "experts"
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8", "all"
    if method in ("awq", "gptq", "auto-round", "bitsandbytes"):
        four = bits == 4 or scheme.get("load_in_4bit") or (bits is None and method == "awq")
        return ("int4" if four else "int8"), "all"
    if method in ("compressed-tensors", "modelopt"):
        weights = _group_weights(read, scheme.get("config_groups"))
        if "nvfp4" in str(scheme.get("format", "")) + str(scheme.get("quant_algo", "")).lower():
            return "nvfp4", "all"
        if weights.get("num_bits") == 4:
            return "int4", "all"
        return ("fp8" if weights.get("type", "float") == "float" else "int8"), "all"
    raise BadInput(
        f"{read.where}: quantization_config.quant_method {method!r} is unknown; "
        "remove it and give the weights' size another way, or use a bf16 configuration"
    )


def _group_weights(read: _Reader, groups: Any) -> Config:
    """How the first group of a compressed-tensors checkpoint stores its weights; empty where unsaid."""
    group = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else groups or {}
    weights = (group.get("weights") or {}) if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise BadInput(
            f"{read.where}: quantization_config.config_groups is not made of groups with `weights`; "
            "give the config.json that the quantised checkpoint came with"
        )
    return weights
