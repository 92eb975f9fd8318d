"""Token counts of the steps with prompts that are captured as CUDA graphs."""

from __future__ import annotations

# Launching a step kernel by kernel takes as long as this much matrix work: larger steps need no graph.
_LAUNCH_FLOPS = 8e12
_SIZES = (
    *(16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
    *(1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096),
)


def engine_prompt_graphs(max_num_batched_tokens: int, flops_per_token: int) -> list[int]:
    """Captured token counts for a model whose layers' matrix products take so many FLOPs per token: those of
    steps that would end before all their kernels were launched."""
    most = min(max_num_batched_tokens, _LAUNCH_FLOPS / flops_per_token)
    return [size for size in _SIZES if size <= most]
