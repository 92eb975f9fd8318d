"""Defaults of SGLang's server, for options that are not given.

Source: srt/arg_groups/memory_hook.py (`handle_gpu_memory_settings`), arg_groups/overrides.py (page sizes) and
mem_cache/kv_cache_configurator.py (running requests), 0.5.23.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from pagecast.sim.core.engines.deployment import MIB, Deployment

# GPUs of less memory, in GiB, with the chunk, and the largest CUDA graph of decodes on fewer than 4 GPUs and
# on more.
_BY_MEMORY = (
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
    (float("inf"), 16384, 512, 512),
)
_ROOMY_MIB = 60 * 1024  # GPUs of more memory reserve at least _ROOMY_RESERVE_MIB
_ROOMY_RESERVE_MIB = 10 * 1024
_LEAST_REQUESTS, _MOST_REQUESTS = 2048, 4096


def defaults(deployment: Deployment) -> dict[str, Any]:
    """Values of open options by flat name."""
    memory_mib = deployment.memory_bytes / MIB
    _, chunk, graph, graph_of_many = next(row for row in _BY_MEMORY if memory_mib < row[0] * 1024)
    chunk = deployment.given("max_num_batched_tokens", chunk)
    largest = graph if deployment.gpus < 4 else graph_of_many
    fraction = _static_fraction(deployment, chunk, min(largest, deployment.given("max_num_seqs", largest)))
    longest = deployment.given("max_model_len", deployment.longest)
    return {
        "block_size": 64 if deployment.data_centre_blackwell and not deployment.states else 1,
        "gpu_memory_utilization": fraction,
        "max_num_seqs": _requests(deployment.kv_tokens(fraction), longest),
        "max_num_batched_tokens": chunk,
        "max_model_len": longest,
    }


def _static_fraction(deployment: Deployment, chunk: int, graph: int) -> float:
    """What weights and KV may take (`mem_fraction_static`): all but an estimate of the rest."""
    memory_mib = deployment.memory_bytes / MIB
    reserved_mib = 512 + max(chunk, 2048) * 1.5 + deployment.gpus / 8 * 1024 + 2 * graph
    reserved_mib += 1.5 * 1024 if deployment.latent else 8 * _prompt_graphs(chunk)
    if memory_mib > _ROOMY_MIB:
        reserved_mib = max(reserved_mib, _ROOMY_RESERVE_MIB)
    return round((memory_mib - reserved_mib) / memory_mib, 3)


def _prompt_graphs(chunk: int) -> int:
    """How many sizes of prompts have CUDA graphs."""
    sizes = (
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, chunk + 1, 512),
    )
    return bisect_right(sizes, chunk)


def _requests(kv_tokens: int, longest: int) -> int:
    """Running requests, by the sequences of the longest length that the cache holds."""
    return max(min(kv_tokens * 512 // longest, _MOST_REQUESTS), _LEAST_REQUESTS)
