"""GPU memory beside weights and KV cache: peak activations, samplers, CUDA graphs.

An engine measures its peak with one dummy step of `max_num_batched_tokens` tokens that ends in sampling for
`max_num_seqs` requests (vLLM's profile run). These functions list the tensors alive together at that step's
widest points, read off the order in which the layers' kernels make and drop them. vLLM has two runners with
different samplers; `lean_runner` says which one a model gets.
"""

from __future__ import annotations

from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import Gpu
from pagecast.sim.machine.graphs import capture_sizes
from pagecast.sim.machine.model_facts import ModelFacts

MIB = 1 << 20
# Decode attention in a captured graph may split a sequence in up to 32 parts (FlashAttention 3).
_SPLITS = 32
# Device memory of captured graphs, from logs of models with 28 to 64 layers: about 4 MiB for a size's set of
# pieces and 140 KiB for each piece; a full decode graph adds about 1 MiB.
_GRAPH_SET_BYTES, _GRAPH_PIECE_BYTES, _FULL_GRAPH_BYTES = 4 * MIB, 140 << 10, MIB

# Sparse latent attention: longest sequences whose index keys, or unpacked latents, a workspace holds, and the
# scores of a step (v1/attention/backends/mla/indexer.py, flashmla_sparse.py; model_executor/layers/
# sparse_attn_indexer.py, VLLM_SPARSE_INDEXER_MAX_LOGITS_MB).
_GATHERED_KEYS, _UNPACKED_LATENTS, _SCORE_BYTES = 40, 5, 512 * MIB

# Model types that vLLM 0.24 runs on its second model runner, by architecture.
_LEAN = {"qwen3", "llama", "mistral", "deepseek_v2", "qwen2_moe", "granitemoe"}


def lean_runner(model: ModelFacts, model_runner: str = "auto") -> bool:
    """Whether vLLM runs the model on its newer runner: a light sampler, graphs outside the profile.

    `model_runner`: `v1`, `v2`, or `auto` for what vLLM 0.24 chooses. Errors: `BadInput` for another word.
    """
    if model_runner not in ("auto", "v1", "v2"):
        raise BadInput(f"model_runner is {model_runner!r}; it must be auto, v1 or v2")
    return model.model_type in _LEAN if model_runner == "auto" else model_runner == "v2"


def workspace_bytes(gpu: Gpu) -> int:
    """PyTorch's cuBLAS workspace: 32 MiB on Hopper (measured on an H200) and later, 8 MiB before."""
    return 32 * MIB if gpu.peak_flops("bf16") > 500e12 or gpu.name == "H20" else 8 * MIB


def _gathers(model: ModelFacts) -> bool:
    """Whether an indexer's keys are gathered for prompts: where latents are chosen by one."""
    a = model.attention
    return bool(a.compressed) or (a.mla is not None and a.indexer is not None)


def sparse_workspace_bytes(model: ModelFacts, max_model_len: int, kv_cache_dtype: str) -> int:
    """Bytes that sparse latent attention keeps for prompts: gathered keys of the indexer, or latents.

    Of a packed cache the latents of several longest sequences are unpacked into the same place.
    """
    if not _gathers(model):
        return 0
    a = model.attention
    key_bytes = a.indexer.token_bytes if a.indexer else a.compressed.index_token_bytes if a.compressed else 0
    gathered = _GATHERED_KEYS * max_model_len * key_bytes
    if a.mla is None or "ds_mla" not in kv_cache_dtype:
        return int(gathered)
    latent = (a.mla.kv_lora_rank + a.mla.rope_dim) * 2
    return int(max(gathered, _UNPACKED_LATENTS * max_model_len * latent))


def activation_bytes(
    model: ModelFacts,
    gpu: Gpu,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    tensor_parallel_size: int = 1,
    lean: bool = True,
) -> int:
    """Bytes of tensors alive at the widest point of a step of that size, workspace included."""
    tokens, tp = max_num_batched_tokens, tensor_parallel_size
    scores = _SCORE_BYTES if _gathers(model) else 0
    layer = max(tokens * _attention_stage(model, tp) + scores, tokens * _mlp_stage(model, tp))
    rows = min(max_num_seqs, tokens)
    sampler = tokens * model.hidden * model.dtype_bytes + rows * _sampler_row(model, lean)
    return max(layer, sampler) + workspace_bytes(gpu)


def _attention_stage(model: ModelFacts, tp: int) -> int:
    """Bytes per token: residual, hidden, fused QKV, and query, key, value after norms and rotation."""
    a = model.attention
    heads, kv = a.heads // tp, model.local_kv_heads(tp)
    if a.mla:
        latent = a.mla.kv_lora_rank + a.mla.rope_dim + (a.mla.q_lora_rank or 0)
        wide = 2 * heads * a.head_dim + heads * (a.head_dim + a.v_head_dim) + latent
    else:
        wide = 2 * heads * a.head_dim + 2 * kv * (a.head_dim + a.v_head_dim)
    return (2 * model.hidden + wide) * model.dtype_bytes


def _mlp_stage(model: ModelFacts, tp: int) -> int:
    """Bytes per token: residual, hidden, gate and up, and their product; for experts once per active one."""
    twice = 2 if model.gated else 1
    moe = model.moe
    dense = (twice + 1) * model.intermediate // tp if moe is None or moe.layers < model.layers else 0
    routed = 0
    if moe:
        width = -(-moe.intermediate // tp)
        # The first product's workspace is shared with the experts' outputs, as wide as the hidden state.
        routed = moe.active * (max(twice * width, model.hidden) + width) + model.hidden
    return (2 * model.hidden + max(dense, routed)) * model.dtype_bytes


def _sampler_row(model: ModelFacts, lean: bool) -> int:
    """Bytes of a request's logits, as computed and as fp32; the older runner adds probabilities and noise."""
    return model.vocab * (model.dtype_bytes + (4 if lean else 12))


def sampler_state_bytes(model: ModelFacts, max_num_seqs: int) -> int:
    """Bytes of the newer runner's sampler: counts of output tokens (int32) and a bit for prompt tokens."""
    return max_num_seqs * 4 * (model.vocab + -(-model.vocab // 32))


def graph_bytes(model: ModelFacts, gpu: Gpu, max_num_seqs: int, tensor_parallel_size: int = 1) -> int:
    """Bytes that CUDA graphs keep: pieces for every size, full graphs for pure decode, one shared pool.

    The pool holds the activations of the largest size, or the split attention of the largest decode.
    """
    sizes = capture_sizes(max_num_seqs)
    decode = [size for size in sizes if size <= max_num_seqs]
    if not decode:
        return 0
    tp, a = tensor_parallel_size, model.attention
    layer = max(_attention_stage(model, tp), _mlp_stage(model, tp))
    pool = sizes[-1] * layer
    if gpu.hopper:
        splits = _SPLITS * decode[-1] * (a.heads // tp) * (a.v_head_dim + 1) * 4
        pool = max(pool, decode[-1] * layer + splits)
    pieces = len(sizes) * (_GRAPH_SET_BYTES + (model.layers + 1) * _GRAPH_PIECE_BYTES)
    return pieces + len(decode) * _FULL_GRAPH_BYTES + pool + workspace_bytes(gpu)
