"""What an engine holds on a GPU beside weights and KV cache: activations at peak, CUDA graphs, libraries.

An engine measures its peak with one dummy step of `max_num_batched_tokens` tokens that ends in sampling
for `max_num_seqs` requests (vLLM's profile run). These functions list the tensors that are alive together at
that step's widest points, and what capturing CUDA graphs leaves behind.
"""

from __future__ import annotations

from pagecast.sim.model_facts import ModelFacts

MIB = 1 << 20
# cuBLAS's workspace: 32 MiB on Hopper and later, about 8 MiB before (PyTorch's defaults); one per process.
_CUBLAS_WORKSPACE = 32 * MIB
# What a captured graph keeps on the device, for one layer's piece and for one layer of a full decode graph.
GRAPH_PIECE_BYTES = 230 << 10
GRAPH_LAYER_BYTES = 100 << 10
# Kernels loaded on first use: cuBLAS, attention, Triton and the engine's own.
LIBRARY_BYTES = 100 * MIB


def activation_bytes(
    model: ModelFacts, max_num_batched_tokens: int, max_num_seqs: int, tensor_parallel_size: int = 1
) -> int:
    """Bytes of tensors alive at the widest point of a step of that size, workspaces included."""
    tokens = max_num_batched_tokens
    layer = max(
        _attention_stage(model, tensor_parallel_size),
        _mlp_stage(model, tensor_parallel_size),
    )
    rows = min(max_num_seqs, tokens)
    sampler = tokens * model.hidden * model.dtype_bytes + rows * _sampler_row(model)
    return max(tokens * layer, sampler) + _CUBLAS_WORKSPACE


def _attention_stage(model: ModelFacts, tp: int) -> int:
    """Bytes a token: residual, hidden, fused QKV, and query, key, value after norms and rotation."""
    a = model.attention
    heads, kv = a.heads // tp, model.local_kv_heads(tp)
    if a.mla:
        latent = a.mla.kv_lora_rank + a.mla.rope_dim + (a.mla.q_lora_rank or 0)
        wide = 2 * heads * a.head_dim + heads * (a.head_dim + a.v_head_dim) + latent
    else:
        wide = 2 * heads * a.head_dim + 2 * kv * (a.head_dim + a.v_head_dim)
    return (2 * model.hidden + wide) * model.dtype_bytes


def _mlp_stage(model: ModelFacts, tp: int) -> int:
    """Bytes a token: residual, hidden, gate and up, and their product; for experts once per active one."""
    twice = 2 if model.gated else 1
    moe = model.moe
    dense = (twice + 1) * model.intermediate // tp if moe is None or moe.layers < model.layers else 0
    routed = 0
    if moe:
        width = -(-moe.intermediate // tp)
        # The product's workspace is shared with the experts' outputs, which are as wide as the hidden state.
        routed = moe.active * (max(twice * width, model.hidden) + width) + model.hidden
    return (2 * model.hidden + max(dense, routed)) * model.dtype_bytes


def _sampler_row(model: ModelFacts) -> int:
    """Bytes of one request's logits: as computed, as fp32, its probabilities and the noise beside them."""
    return model.vocab * (model.dtype_bytes + 3 * 4)


def capture_sizes(max_num_seqs: int, largest: int = 512) -> list[int]:
    """Batch sizes that vLLM captures: 1, 2, 4, every 8th to 256, every 16th, to twice the requests."""
    top = min(2 * max_num_seqs, largest)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return [size for size in sizes if size <= top]


def graph_bytes(model: ModelFacts, max_num_seqs: int, tensor_parallel_size: int = 1) -> int:
    """Bytes that CUDA graphs keep: piecewise ones for every size, full ones for pure decode sizes.

    Each size's graphs keep their nodes; all sizes share one pool for the activations of the largest.
    """
    sizes = capture_sizes(max_num_seqs)
    if not sizes:
        return 0
    decode = [size for size in sizes if size <= max_num_seqs]
    piece = (model.layers + 1) * GRAPH_PIECE_BYTES
    full = model.layers * GRAPH_LAYER_BYTES
    layer = max(_attention_stage(model, tensor_parallel_size), _mlp_stage(model, tensor_parallel_size))
    return len(sizes) * max(piece, MIB) + len(decode) * max(full, MIB) + sizes[-1] * layer
