"""Weights as an engine holds them: fused matrices, padded vocabulary, and an allocator that rounds.

Counting parameters gives what a checkpoint takes. Loaded, a model takes a little more: PyTorch's caching
allocator keeps the rest of a 2 MiB step that it can't reuse, and rotary tables lie beside the weights. With
both, the sizes equal those in vLLM's logs ("Model loading took ... GiB") to the fourth digit.
"""

from __future__ import annotations

from pagecast.sim.machine.matrix import Linear
from pagecast.sim.machine.model_facts import ModelFacts

MIB = 1 << 20


def allocated_bytes(size: int) -> int:
    """Bytes that PyTorch's caching allocator counts for a tensor of `size` bytes.

    Sizes are rounded to 512 bytes. From 10 MiB on a tensor gets its own segment, a multiple of 2 MiB; the
    rest of it is split off only if it is larger than 1 MiB. (Source: CUDACachingAllocator's constants.)
    """
    size = -(-size // 512) * 512
    if size < 10 * MIB:
        return size
    segment = -(-size // (2 * MIB)) * 2 * MIB
    return segment if segment - size <= MIB else size


def loaded_weight_bytes(
    model: ModelFacts,
    tensor_parallel_size: int = 1,
    max_model_len: int | None = None,
    moe_data_parallel_size: int = 1,
) -> int:
    """Bytes of the loaded model on one GPU: matrices, vocabulary, norms and biases, rotary tables.

    Routed experts are spread over `moe_data_parallel_size` ranks.
    """
    tp = tensor_parallel_size
    matrices = 0
    for linear in model.linears(tp):
        ranks = moe_data_parallel_size if linear.name.startswith("expert_") else 1
        matrices += linear.layers * _matrix_bytes(model, linear) // ranks
    rows = -(-model.vocab // 64) * 64 // tp
    vocabulary = allocated_bytes(rows * model.hidden * model.dtype_bytes) * (1 if model.tied else 2)
    plain = (model.small_params() + model.learned_positions * model.hidden) * model.dtype_bytes
    towers = -(-model.tower_params // tp) * model.dtype_bytes
    rest = towers + model.uncounted_bytes // tp
    draft = model.draft_model
    beside = loaded_weight_bytes(draft, tp, max_model_len) if draft else 0
    return matrices + vocabulary + plain + rest + _rotary_bytes(model, max_model_len) + beside


def _matrix_bytes(model: ModelFacts, linear: Linear) -> int:
    inputs, outputs = linear.inputs, linear.outputs
    if model.weight_dtype == "mxfp4" and linear.experts > 1:
        # Kernels for mxfp4 want the hidden side in steps of 256 and the inner side in steps of 128.
        hidden_step, inner_step = 256, 128
        if linear.name == "expert_up":
            inputs, outputs = _round_up(inputs, hidden_step), 2 * _round_up(outputs // 2, inner_step)
        else:
            inputs, outputs = _round_up(inputs, inner_step), _round_up(outputs, hidden_step)
    return allocated_bytes(int(inputs * outputs * linear.experts * model.linear_bits(linear) / 8))


def _rotary_bytes(model: ModelFacts, max_model_len: int | None) -> int:
    """Sines and cosines for every position, in the model's dtype; one table for all layers."""
    if model.learned_positions:
        return 0
    a = model.attention
    width = a.mla.rope_dim if a.mla else a.head_dim
    if not width:
        return 0
    return allocated_bytes(max(model.max_position, max_model_len or 0) * width * model.dtype_bytes)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
