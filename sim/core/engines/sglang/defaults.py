"""What SGLang's server takes where an option is not given. Source: srt/arg_groups/memory_hook.py."""

from __future__ import annotations

from typing import Any

from pagecast.sim.core.engines.deployment import MIB, Deployment


def defaults(deployment: Deployment) -> dict[str, Any]:
    """Values of open options by flat name."""
    chunk, _ = _sizes(deployment)
    return {
        "block_size": 1,
        "gpu_memory_utilization": 0.9,
        "max_num_seqs": 4096,
        "max_num_batched_tokens": chunk,
        "max_model_len": deployment.longest,
    }


def _sizes(deployment: Deployment) -> tuple[int, int]:
    """The chunk, and the largest batch of decodes in a CUDA graph, by the GPU's memory."""
    memory_mib, few = deployment.memory_bytes / MIB, deployment.gpus < 4
    for below_gib, chunk, graph, graph_of_many in _BY_MEMORY:
        if memory_mib < below_gib * 1024:
            return chunk, graph if few else graph_of_many
    return 16384, 512


_BY_MEMORY = (
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
)
