"""Cuts of the products of few tokens that our own kernel computes, as were fastest on an H200.

The products of Qwen3-0.6B and Qwen3-8B were measured inside whole decode steps. All others are left to the
library. So are those of Qwen3-8B with more than 96 tokens, where our kernel shortened no step.
"""

from typing import Literal, NamedTuple

import torch
from pagecast.kernels.capabilities import runs_hopper_kernels
from torch import Tensor

Kind = Literal["plain", "gated", "sums"]
"""What a product is for: its own sake, `silu(gate) * up`, or a norm that can add up its addends."""


class LinearCut(NamedTuple):
    """How `linear_hopper` cuts a product: tiles of `outputs` x (`tokens` + `rest`), the inputs split in
    `splits`, pipelines of `stages` steps of `depth` inputs, and `warps` per program."""

    outputs: int
    tokens: int
    rest: int
    splits: int
    stages: int
    depth: int = 64
    warps: int = 4

    def divides(self, outputs: int, inputs: int) -> bool:
        """Whether a product of this size can be cut so."""
        return outputs % self.outputs == 0 and inputs % (self.depth * self.splits) == 0


# By kind, outputs and inputs: up to how many tokens, which cut.
_CUTS: dict[tuple[Kind, int, int], tuple[tuple[int, LinearCut], ...]] = {
    ("sums", 1024, 3072): (
        (16, LinearCut(64, 16, 0, 4, 12)),
        (32, LinearCut(64, 32, 0, 4, 12)),
        (128, LinearCut(64, 32, 0, 2, 8, 128)),
        (160, LinearCut(64, 64, 16, 3, 5, 128)),
        (192, LinearCut(64, 64, 0, 2, 6, 128)),
        (256, LinearCut(64, 128, 0, 3, 4, 128)),
    ),
    ("sums", 1024, 2048): (
        (16, LinearCut(64, 16, 0, 4, 8)),
        (32, LinearCut(64, 32, 0, 4, 8)),
        (48, LinearCut(64, 32, 0, 2, 16)),
        (64, LinearCut(64, 64, 0, 4, 8)),
        (112, LinearCut(64, 32, 0, 2, 16)),
        (128, LinearCut(64, 64, 0, 2, 6, 128)),
        (144, LinearCut(64, 64, 16, 4, 8)),
        (256, LinearCut(64, 64, 0, 2, 6, 128)),
    ),
    ("gated", 6144, 1024): (
        (16, LinearCut(64, 16, 0, 1, 16)),
        (32, LinearCut(64, 32, 0, 1, 16)),
        (48, LinearCut(128, 32, 0, 1, 5, 128)),
        (64, LinearCut(64, 64, 0, 1, 6, 128)),
        (80, LinearCut(64, 64, 16, 1, 5, 128)),
        (96, LinearCut(64, 64, 32, 1, 5, 128)),
        (128, LinearCut(64, 128, 0, 1, 4, 128)),
        (160, LinearCut(64, 128, 32, 1, 3, 128)),
        (192, LinearCut(64, 128, 64, 1, 6)),
        (256, LinearCut(128, 128, 0, 1, 6, warps=8)),
    ),
    ("plain", 4096, 1024): (
        (16, LinearCut(64, 16, 0, 1, 16)),
        (48, LinearCut(64, 32, 0, 1, 16)),
        (64, LinearCut(64, 64, 0, 1, 6, 128)),
        (96, LinearCut(128, 32, 0, 1, 5, 128)),
        (128, LinearCut(64, 64, 0, 1, 6, 128)),
        (144, LinearCut(64, 64, 16, 1, 5, 128)),
        (192, LinearCut(128, 64, 0, 1, 8)),
        (256, LinearCut(64, 128, 0, 1, 8)),
    ),
    ("plain", 6144, 4096): (
        (16, LinearCut(128, 16, 0, 1, 6, 128)),
        (32, LinearCut(64, 32, 0, 1, 9, 128)),
        (64, LinearCut(64, 64, 0, 1, 7, 128)),
        (80, LinearCut(64, 64, 16, 1, 6, 128)),
        (96, LinearCut(64, 64, 32, 1, 5, 128)),
    ),
    ("sums", 4096, 4096): (
        (16, LinearCut(64, 16, 0, 2, 11, 128)),
        (32, LinearCut(64, 32, 0, 2, 9, 128)),
        (48, LinearCut(64, 64, 0, 2, 12)),
        (64, LinearCut(64, 32, 0, 2, 4, 128)),
        (80, LinearCut(64, 64, 16, 2, 6, 128)),
        (96, LinearCut(64, 64, 32, 2, 5, 128)),
    ),
    ("gated", 24576, 4096): (
        (16, LinearCut(128, 16, 0, 1, 3, 128)),
        (32, LinearCut(64, 32, 0, 1, 4, 128)),
        (64, LinearCut(128, 64, 0, 1, 4, warps=8)),
        (80, LinearCut(128, 64, 16, 1, 4, warps=8)),
        (96, LinearCut(128, 64, 32, 1, 4, warps=8)),
    ),
    ("sums", 4096, 12288): (
        (16, LinearCut(64, 16, 0, 4, 5, 128)),
        (32, LinearCut(64, 32, 0, 4, 4, 128)),
        (48, LinearCut(128, 64, 0, 4, 4, 128, warps=8)),
        (64, LinearCut(64, 64, 0, 2, 7, 128)),
        (80, LinearCut(64, 64, 16, 2, 6, 128)),
        (96, LinearCut(64, 64, 32, 2, 5, 128)),
    ),
}


def cut_of(kind: Kind, x: Tensor, weight: Tensor) -> LinearCut | None:
    """How the product of x [tokens, inputs] with a weight [outputs, inputs] is cut; None: by the library."""
    for most, cut in _CUTS.get((kind, weight.shape[0], weight.shape[1]), ()):
        if x.shape[0] <= most:
            return cut if _fits(x, weight) else None
    return None


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear_hopper` can compute their product."""
    short = x.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight.dtype
    return short and x.is_contiguous() and weight.is_contiguous() and runs_hopper_kernels(x.device)
