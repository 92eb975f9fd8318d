"""Defaults of `trtllm-serve MODEL`, for options that are not given.

Source: tensorrt_llm/llmapi/llm_args.py.
"""

from __future__ import annotations

from typing import Any

from pagecast.sim.core.engines.deployment import Deployment


def defaults(deployment: Deployment) -> dict[str, Any]:
    """Values of open options by flat name."""
    return {
        "block_size": 32,
        "free_gpu_memory_fraction": 0.9,
        "max_num_seqs": 2048,
        "max_num_batched_tokens": 8192,
        "max_model_len": deployment.longest,
        "partial_reuse": "copy",
    }
