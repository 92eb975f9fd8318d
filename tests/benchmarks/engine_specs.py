"""Cache specifications of models as vLLM 0.33 makes them, for the checks of `model_sizes.py`.

Needs vLLM and PyTorch (no GPU, no compiled extension). Each function follows the layers of one family in
vLLM's own modules, with vLLM's own classes for the specifications and its own functions for states' shapes
and for the grouping; nothing here is taken from pagecast.
"""

from __future__ import annotations

from math import lcm
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.core import kv_cache_planning
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

Config = dict[str, Any]
Specs = dict[str, KVCacheSpec]
BF16, FP32, BYTE = torch.bfloat16, torch.float32, torch.uint8
BLOCK = 16
_KERNEL_BLOCK, _LATENT_KERNEL_BLOCK = 16, 128


def groups_of(specs: Specs) -> tuple[list[tuple[str, int, int]], int]:
    """vLLM's groups (class, block size, layers) and the bytes of a block."""
    # Index keys and compressed caches lie beside others in a block; their backends take no other layout.
    packed = any(getattr(s, "cache_role", None) is SparseCacheRole.INDEXER for s in specs.values())
    packed = packed or any(getattr(s, "model_version", None) for s in specs.values())
    layout = KVCacheLayout.BLHNC if packed else KVCacheLayout.LBNHC
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )
    groups = kv_cache_planning.get_kv_cache_groups(config, dict(specs))
    named = []
    for group in groups:
        spec = group.kv_cache_spec
        one = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        named.append((type(one).__name__, one.block_size, len(group.layer_names)))
    if packed:
        return named, kv_cache_planning._get_kv_cache_bytes_per_block(groups, layout)
    first = groups[0].kv_cache_spec
    widest = 1 if isinstance(first, UniformTypeKVCacheSpecs) else max(len(g.layer_names) for g in groups)
    return named, first.page_size_bytes * widest


def token_bytes(specs: Specs) -> float:
    """Bytes that one token adds to the caches of every layer, while it is inside all windows."""
    total = 0.0
    for spec in specs.values():
        if isinstance(spec, (MambaSpec, CircularBufferSpec)):
            continue
        content = spec.num_heads * spec.state_content_size_bytes
        total += content / float(spec.tokens_per_state)
    return total


def specs_of(config: Config, draft_tokens: int = 0) -> Specs:
    """The specifications of one GPU that holds the whole model. Errors: KeyError for another family.

    `draft_tokens`: so many are drafted by the checkpoint's own layers, which are loaded then.
    """
    text = config.get("text_config") or config.get("llm_config") or config
    text = {**{k: v for k, v in config.items() if k not in ("text_config", "vision_config")}, **text}
    text["draft_tokens"] = draft_tokens
    return _FAMILIES[text["model_type"]](text)


def _drafts(c: Config) -> int:
    """Draft layers that are loaded."""
    if not c["draft_tokens"]:
        return 0
    return next(
        (c[k] for k in ("num_mtp_modules", "mtp_num_hidden_layers", "num_nextn_predict_layers") if k in c), 0
    )


def _full(c: Config, heads: int, dim: int, v_dim: int | None = None, block: int = BLOCK) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=dim, head_size_v=v_dim or dim, dtype=BF16
    )


def _window(heads: int, dim: int, window: int, v_dim: int | None = None) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK,
        num_kv_heads=heads,
        head_size=dim,
        head_size_v=v_dim or dim,
        dtype=BF16,
        sliding_window=window,
    )


def _dim(c: Config) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def _plain(c: Config) -> Specs:
    heads = c.get("num_key_value_heads") or c["num_attention_heads"]
    layers = c["num_hidden_layers"] + (_drafts(c) if c["model_type"] == "mimo" else 0)
    return {f"l{i}": _full(c, heads, _dim(c)) for i in range(layers)}


def _by_types(c: Config) -> Specs:
    """Layers with and without a window, of the same heads."""
    specs: Specs = {}
    for i, kind in enumerate(c["layer_types"]):
        heads, dim = c["num_key_value_heads"], _dim(c)
        windowed = kind == "sliding_attention"
        specs[f"l{i}"] = _window(heads, dim, c["sliding_window"]) if windowed else _full(c, heads, dim)
    for i in range(_drafts(c) if c["model_type"] == "step3p7" else 0):
        specs[f"mtp{i}"] = _window(c["num_key_value_heads"], _dim(c), c["sliding_window"])
    return specs


def _gemma4(c: Config) -> Specs:
    specs: Specs = {}
    for i, kind in enumerate(c["layer_types"]):
        if kind == "sliding_attention":
            specs[f"l{i}"] = _window(c["num_key_value_heads"], c["head_dim"], c["sliding_window"])
        else:
            specs[f"l{i}"] = _full(c, c["num_global_key_value_heads"], c["global_head_dim"])
    return specs


def _mimo(c: Config) -> Specs:
    specs: Specs = {}
    for i, windowed in enumerate([*c["hybrid_layer_pattern"], *[1] * bool(c["draft_tokens"])]):
        if windowed:
            specs[f"l{i}"] = _window(
                c["swa_num_key_value_heads"], c["swa_head_dim"], c["sliding_window_size"], c["swa_v_head_dim"]
            )
        else:
            specs[f"l{i}"] = _full(c, c["num_key_value_heads"], c["head_dim"], c["v_head_dim"])
    return specs


def _llama4(c: Config) -> Specs:
    specs: Specs = {}
    for i in range(c["num_hidden_layers"]):
        if (i + 1) % 4:
            specs[f"l{i}"] = ChunkedLocalAttentionSpec(
                block_size=BLOCK,
                num_kv_heads=c["num_key_value_heads"],
                head_size=c["head_dim"],
                dtype=BF16,
                attention_chunk_size=c.get("attention_chunk_size", 8192),
            )
        else:
            specs[f"l{i}"] = _full(c, c["num_key_value_heads"], c["head_dim"])
    return specs


def _nas(c: Config) -> Specs:
    return {
        f"l{i}": _full(c, c["num_attention_heads"] // block["attention"]["n_heads_in_group"], _dim(c))
        for i, block in enumerate(c["block_configs"])
        if not block["attention"]["no_op"]
    }


def _latent(c: Config, block: int = BLOCK) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=c["kv_lora_rank"] + c["qk_rope_head_dim"],
        dtype=BF16,
    )


def _index_keys(c: Config, block: int = BLOCK, tokens: int = 1) -> MLAAttentionSpec:
    dim = c["index_head_dim"]
    return MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=dim + dim // 128 * 4,
        dtype=BYTE,
        cache_role=SparseCacheRole.INDEXER,
        tokens_per_state=tokens,
    )


def _mla(c: Config) -> Specs:
    return {f"l{i}": _latent(c) for i in range(c["num_hidden_layers"] + _drafts(c))}


def _sparse_mla(c: Config) -> Specs:
    """DeepSeek V3.2 and GLM-5: layers that reuse an earlier choice have no indexer."""
    specs: Specs = {}
    often, offset = c.get("index_topk_freq", 1), c.get("index_skip_topk_offset", 2)
    layers = c["num_hidden_layers"]
    for i in range(layers + _drafts(c)):
        specs[f"l{i}"] = _latent(c)
        if i >= layers or max(i - offset + 1, 0) % often == 0:
            specs[f"l{i}.index"] = _index_keys(c)
    return specs


def _minimax_m3(c: Config) -> Specs:
    sparse = c["sparse_attention_config"]
    specs: Specs = {}
    for i, has in enumerate([*sparse["sparse_attention_freq"], *[1] * _drafts(c)]):
        specs[f"l{i}"] = _full(c, c["num_key_value_heads"], c["head_dim"])
        if has:
            specs[f"l{i}.index"] = MLAAttentionSpec(
                block_size=BLOCK,
                num_kv_heads=1,
                head_size=sparse["sparse_index_dim"],
                dtype=BF16,
                cache_role=SparseCacheRole.INDEXER,
            )
    return specs


def _deepseek_v4(c: Config) -> Specs:
    block, packed, aligned = 256, 584, 576
    specs: Specs = {}

    def compressed(ratio: int, size: int, content: int | None = None) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=block,
            num_kv_heads=1,
            head_size=size,
            dtype=BYTE,
            tokens_per_state=ratio,
            alignment=aligned,
            state_content_bytes=content,
            model_version="deepseek_v4" if content else None,
        )

    def recent(size: int, window: int, rows: int, dtype: torch.dtype, content: int | None) -> KVCacheSpec:
        return SlidingWindowMLASpec(
            block_size=rows,
            num_kv_heads=1,
            head_size=size,
            dtype=dtype,
            sliding_window=window,
            alignment=aligned,
            state_content_bytes=content,
            model_version="deepseek_v4" if content else None,
        )

    for i, ratio in enumerate(c["compress_ratios"][: c["num_hidden_layers"] + _drafts(c)]):
        dim, index = c["head_dim"], c["index_head_dim"]
        specs[f"l{i}.swa"] = recent(dim, c["sliding_window"], 64, BYTE, packed)
        if ratio <= 1:
            continue
        twice = 2 if ratio == 4 else 1
        rows = 4 if ratio == 4 else 8
        specs[f"l{i}.kv"] = compressed(ratio, dim, packed)
        specs[f"l{i}.state"] = recent(2 * twice * dim, twice * ratio, rows, FP32, None)
        if ratio == 4:
            specs[f"l{i}.index"] = compressed(ratio, index + index // 128 * 4)
            specs[f"l{i}.index_state"] = recent(2 * twice * index, twice * ratio, rows, FP32, None)
    return specs


def _with_states(shapes: Any, dtypes: Any, token: int, latent: bool) -> tuple[int, MambaSpec]:
    """The block size that vLLM takes beside states, and a state's specification padded to it."""
    state = MambaSpec(block_size=-1, shapes=shapes, dtypes=dtypes)
    step = lcm(_KERNEL_BLOCK, _LATENT_KERNEL_BLOCK) if latent else _KERNEL_BLOCK
    block = step * -(-state.page_size_bytes // (step * token))
    padded = MambaSpec(block_size=block, shapes=shapes, dtypes=dtypes, page_size_padded=block * token)
    return block, padded


def _delta(c: Config) -> Specs:
    shapes = Shapes.gated_delta_net_state_shape(
        1,
        c["linear_num_key_heads"],
        c["linear_num_value_heads"],
        c["linear_key_head_dim"],
        c["linear_value_head_dim"],
        c["linear_conv_kernel_dim"],
        num_spec=c["draft_tokens"],
    )
    dtype = FP32 if c.get("mamba_ssm_dtype") == "float32" else BF16
    heads, dim = c["num_key_value_heads"], c["head_dim"]
    block, state = _with_states(shapes, (BF16, dtype), 2 * heads * dim * 2, latent=False)
    period = c.get("full_attention_interval", 4)
    layers = c["num_hidden_layers"]
    return {
        f"l{i}": state if i < layers and (i + 1) % period else _full(c, heads, dim, block=block)
        for i in range(layers + _drafts(c))
    }


def _nemotron_h(c: Config) -> Specs:
    letters = c.get("hybrid_override_pattern") or [
        {"mamba": "M", "attention": "*"}.get(kind, "-") for kind in c["layers_block_type"]
    ]
    inner = c["mamba_num_heads"] * c["mamba_head_dim"]
    shapes = Shapes.mamba2_state_shape(
        1,
        inner,
        c["n_groups"],
        c["mamba_num_heads"],
        c["mamba_head_dim"],
        c["ssm_state_size"],
        c["conv_kernel"],
        num_spec=c["draft_tokens"],
    )
    dtype = FP32 if c.get("mamba_ssm_cache_dtype") == "float32" else BF16
    heads, dim = c["num_key_value_heads"], c.get("head_dim") or c["attention_head_dim"]
    block, state = _with_states(shapes, (BF16, dtype), 2 * heads * dim * 2, latent=False)
    return {
        f"l{i}": state if letter == "M" else _full(c, heads, dim, block=block)
        for i, letter in enumerate([*letters, *"*" * _drafts(c)])
        if letter in "M*"
    }


def _kimi(c: Config) -> Specs:
    linear = c["linear_attn_config"]
    recurrent = set(linear["kda_layers"])
    first = 0 if 0 in recurrent else 1
    shapes = Shapes.kda_state_shape(
        1,
        linear["num_heads"],
        linear["head_dim"],
        conv_kernel_size=linear["short_conv_kernel_size"],
        num_spec=c["draft_tokens"],
    )
    token = (c["kv_lora_rank"] + c["qk_rope_head_dim"]) * 2
    block, state = _with_states(shapes, (BF16, FP32), token, latent=True)
    pool = c.get("index_kpool")
    specs: Specs = {}
    for i in range(c["num_hidden_layers"] + _drafts(c)):
        if i + first in recurrent:
            specs[f"l{i}"] = state
            continue
        specs[f"l{i}"] = _latent(c, block)
        if pool:
            specs[f"l{i}.index"] = _index_keys(c, block, pool)
            specs[f"l{i}.tail"] = CircularBufferSpec(
                block_size=pool, num_kv_heads=2, head_size=c["index_head_dim"], head_size_v=0, dtype=BF16
            )
    return specs


_FAMILIES = {
    **dict.fromkeys(
        (
            "llama",
            "mixtral",
            "mimo",
            "qwen3",
            "qwen3_moe",
            "qwen3_vl_text",
            "qwen3_vl_moe_text",
            "minimax_m2",
        ),
        _plain,
    ),
    **dict.fromkeys(("gpt_oss", "muse_glimmer_text", "step3p7"), _by_types),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), _mla),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _sparse_mla),
    **dict.fromkeys(("minimax_m3", "minimax_m3_vl"), _minimax_m3),
    **dict.fromkeys(("deepseek_v4", "deepseek_ref"), _deepseek_v4),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _delta),
    **dict.fromkeys(("kimi_linear", "glm5_next_text"), _kimi),
    "gemma4_text": _gemma4,
    "mimo_v2_flash": _mimo,
    "llama4_text": _llama4,
    "nemotron-nas": _nas,
    "nemotron_h": _nemotron_h,
}
