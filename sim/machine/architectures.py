"""What a model's `model_type` says that its config.json does not: one line for each architecture.

A model of a known architecture is a line of data here, or in `models.json`. Facts are those of the
architectures' published modelling code (transformers 5.24, vLLM 0.33).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Architecture:
    """Layout of a decoder. The defaults are Llama's: RMS norms, rotary positions, a gated MLP, no biases.

    `norms`: of the hidden state in each layer. `qk_norm`: "head" over one head's width, "full" over all
    heads', "option" where `use_qk_norm` says so. `qkv_bias`: without a word in the file. `o_bias`: where
    `attention_bias` is set. `biased`: LayerNorm and biases everywhere, and an MLP without a gate. `tied`:
    the output projection is the embedding where the file is silent. `full_period`: every so many layers one
    attends to everything, where the file has windows but no pattern; `alternating`: every second one.
    `recurrent`: the form of layers with a state ("delta", "kimi", "mamba"). `gated`: attention's output has
    a gate ("yes", or "option" where `attn_output_gate` isn't false). `router_bias`: experts are chosen with a
    correction. `draft_layers`: those that the checkpoint has for drafting, where the file does not say it or
    the engine loads none; `draft_window`: they have a sliding window; `draft_dense`: and an ordinary MLP.
    `beside`: experts run beside an ordinary MLP in the same layer. `blocks`: names of the modules
    of attention, recurrent layers, dense and sparse MLPs in checkpoints.
    """

    norms: int = 2
    qk_norm: str = ""
    qkv_bias: bool = False
    o_bias: bool = False
    biased: bool = False
    tied: bool = False
    chunked: bool = False
    full_period: int = 0
    alternating: bool = False
    recurrent: str = ""
    gated: str = ""
    head_gated: bool = False
    gated_mlp: bool = True
    router_bias: bool = False
    shared_gate: bool = False
    shared_expert: bool = False
    expert_bias: bool = False
    sinks: bool = False
    compressed: bool = False
    draft_layers: int | None = None
    draft_window: bool = False
    draft_dense: bool = False
    beside: bool = False
    norms_beside_experts: int = 0
    learned_positions: bool = False
    blocks: tuple[str, str, str, str] = ("self_attn", "linear_attn", "mlp", "mlp")


_LLAMA = Architecture()
_QWEN2 = Architecture(qkv_bias=True)
_QWEN3 = Architecture(qk_norm="head", o_bias=True)
_GEMMA3 = Architecture(norms=4, qk_norm="head", tied=True, full_period=6)
_GEMMA4 = Architecture(norms=4, qk_norm="head", tied=True, full_period=6, norms_beside_experts=3, beside=True)
_GEMMA4 = replace(_GEMMA4, blocks=("self_attn", "", "mlp", ""))
_DELTA = Architecture(qk_norm="head", recurrent="delta", gated="option", shared_gate=True)
_DEEPSEEK = Architecture(router_bias=True)
_DEEPSEEK_V4 = Architecture(router_bias=True, sinks=True, compressed=True, blocks=("attn", "", "ffn", "ffn"))
_KIMI = Architecture(recurrent="kimi", router_bias=True, blocks=("self_attn", "self_attn", "mlp", "mlp"))
_SPARSE_BLOCK = ("self_attn", "", "mlp", "block_sparse_moe")
_MINIMAX_M2 = Architecture(qk_norm="full", router_bias=True, draft_layers=0, blocks=_SPARSE_BLOCK)
_MINIMAX_M3 = Architecture(qk_norm="head", router_bias=True, blocks=_SPARSE_BLOCK)
_STEP = Architecture(qk_norm="head", head_gated=True, router_bias=True, draft_window=True, draft_dense=True)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(o_bias=True),
    "llama4_text": Architecture(
        chunked=True, shared_expert=True, blocks=("self_attn", "", "feed_forward", "feed_forward")
    ),
    "mistral": _LLAMA,
    "mistral3": _LLAMA,
    "ministral": _LLAMA,
    "ministral3": _LLAMA,
    "mixtral": Architecture(blocks=_SPARSE_BLOCK),
    "mimo": Architecture(qkv_bias=True),
    "mimo_v2_flash": Architecture(router_bias=True, draft_layers=1, draft_window=True, draft_dense=True),
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": Architecture(qkv_bias=True, shared_gate=True),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_vl_moe_text": _QWEN3,
    "qwen3_next": replace(_DELTA, draft_layers=1),
    "qwen3_5": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "gemma": Architecture(tied=True),
    "gemma2": Architecture(norms=4, tied=True, alternating=True),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "phi3": _LLAMA,
    "deepseek_v2": _LLAMA,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_ref": _DEEPSEEK_V4,
    "kimi_k2": _DEEPSEEK,
    "kimi_linear": _KIMI,
    "glm5_next_text": _KIMI,
    "glm_moe_dsa": _DEEPSEEK,
    "glm4": Architecture(norms=4),
    "glm4_moe": Architecture(qk_norm="option", router_bias=True),
    "gpt_oss": Architecture(o_bias=True, alternating=True, sinks=True, router_bias=True, expert_bias=True),
    "olmo2": Architecture(qk_norm="full"),
    "olmo3": Architecture(qk_norm="full"),
    "olmoe": Architecture(qk_norm="full"),
    "cohere": Architecture(norms=1, qk_norm="option", tied=True),
    "cohere2": Architecture(norms=1, tied=True, full_period=4),
    "granite": Architecture(o_bias=True),
    "starcoder2": Architecture(qkv_bias=True, biased=True),
    "opt": Architecture(qkv_bias=True, biased=True, tied=True, learned_positions=True),
    "seed_oss": _LLAMA,
    "bitnet": _LLAMA,
    "vaultgemma": Architecture(tied=True),
    "apertus": Architecture(qk_norm="head", o_bias=True, gated_mlp=False),
    "apertus1p5_text": Architecture(qk_norm="head", o_bias=True, gated_mlp=False),
    "arcee": Architecture(o_bias=True, gated_mlp=False),
    "jais2": Architecture(gated_mlp=False),
    "smollm3": _LLAMA,
    "minimax_m2": _MINIMAX_M2,
    "minimax_m3": _MINIMAX_M3,
    "minimax_m3_vl": _MINIMAX_M3,
    "muse_glimmer_text": Architecture(norms=4, gated="yes", full_period=4),
    "nemotron-nas": _LLAMA,
    "nemotron_h": Architecture(
        norms=1,
        recurrent="mamba",
        gated_mlp=False,
        router_bias=True,
        blocks=("mixer", "mixer", "mixer", "mixer"),
    ),
    "step3p5": _STEP,
    "step3p7": _STEP,
}
# Layers that keep something which pagecast can't size yet.
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "mamba",
            "mamba2",
            "falcon_mamba",
            "jamba",
            "bamba",
            "zamba",
            "zamba2",
            "falcon_h1",
            "lfm2",
            "lfm2_moe",
            "rwkv",
            "granitemoehybrid",
            "recurrent_gemma",
            "minimax",
            "bailing_hybrid",
            "plamo2",
        ),
        "has recurrent layers that pagecast can't size",
    ),
    "moshi": "has several decoders that pagecast can't size",
    "deepseek_v41_text": (
        "has n-gram memories (engram_layer_ids) and shared caches (kv_source_layer_ids) that pagecast "
        "can't size"
    ),
}
