"""Defaults of `vllm serve MODEL`, for options that are not given.

Source: vllm/engine/arg_utils.py (`get_batch_defaults` for an API server,
`_set_default_max_num_seqs_and_batched_tokens_args`), config/cache.py, config/model.py
(`is_prefix_caching_supported`) and platforms/cuda.py (block sizes of attention kernels).
"""

from __future__ import annotations

from typing import Any

from pagecast.sim.core.engines.deployment import GIB, Deployment
from pagecast.sim.core.engines.version_order import since

_GPU_MEMORY_UTILIZATION = 0.92
_LARGE_BYTES, _LARGEST_BYTES = 70 * GIB, 160 * GIB
_BLOCK_SIZE = 16


def defaults(version: str, deployment: Deployment) -> dict[str, Any]:
    """Values of open options by flat name."""
    longest = deployment.given("max_model_len", deployment.longest)
    seqs, tokens = _batch(version, deployment)
    if not deployment.given("enable_chunked_prefill", True):
        tokens = max(tokens, longest)
    tokens = min(tokens, deployment.given("max_num_seqs", seqs) * longest)
    return {
        "block_size": _block_size(deployment),
        "gpu_memory_utilization": _GPU_MEMORY_UTILIZATION,
        "max_num_seqs": min(seqs, deployment.given("max_num_batched_tokens", tokens)),
        "max_num_batched_tokens": tokens,
        "max_model_len": longest,
        "enable_prefix_caching": not deployment.states or since(version, "0.28"),
    }


def _batch(version: str, deployment: Deployment) -> tuple[int, int]:
    """Requests, and tokens of a step, by the GPU."""
    memory_bytes = deployment.memory_bytes
    if memory_bytes >= _LARGEST_BYTES and since(version, "0.28"):
        return 1024, 16384
    if memory_bytes >= _LARGE_BYTES and "a100" not in deployment.gpu.lower():
        return 1024, 8192
    return 256, 2048


def _block_size(deployment: Deployment) -> int:
    """Of the attention kernel that is tried first: those for latents have sizes of their own."""
    if deployment.latent and deployment.data_centre_blackwell:
        return 32  # FlashInfer's
    if deployment.latent and deployment.hopper and deployment.quantized_kv:
        return 64  # FlashMLA: FlashAttention's kernel reads no FP8
    return _BLOCK_SIZE
