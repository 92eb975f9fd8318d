"""Choice of the gated products of many tokens that our own kernel computes, and their tiles.

Tiles go round the multiprocessors. Where the last round is nearly full, the kernel is faster than the
library's product and a kernel for SiLU; where it is not, multiprocessors wait, and it is slower.
"""

from typing import NamedTuple

import torch
from pagecast.kernels.capabilities import processors_of, runs_hopper_kernels
from torch import Tensor

OUTPUTS = 96
"""Outputs of a tile, of two weights each."""

DEPTH = 64
"""Inputs of a step of the kernel's pipeline: 128 bytes, the widest row that shared memory is swizzled by."""


class GatedTile(NamedTuple):
    """A tile's tokens, and how many steps of the kernel's pipeline are under way."""

    tokens: int
    stages: int


# As many stages as shared memory has room for.
_FEW = GatedTile(128, 5)
_MANY = GatedTile(256, 3)

# Measured on an H200 with six dense models' shapes (tests/benchmarks/RESULTS.md): with fuller rounds the
# kernel takes 0.87 to 1.01 of the library's time, with emptier ones up to 2.3 times it.
_LEAST_FULL = 0.84

LEAST_INPUTS = DEPTH * _FEW.stages
"""A pipeline that is filled before it runs needs so many inputs."""


def tile_of(tokens: int) -> GatedTile:
    """The tiles of a step of so many tokens."""
    return _FEW if tokens <= _FEW.tokens else _MANY


def tiles_of(outputs: int) -> int:
    """Tiles of a weight with so many rows."""
    return -(-outputs // (2 * OUTPUTS))


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `gated_hopper` takes x [tokens, inputs] and a weight [outputs, inputs]."""
    return (
        weight.ndim == 2
        and x.shape[1] == weight.shape[1]
        and weight.shape[0] % 16 == x.shape[1] % 8 == 0
        and x.shape[1] >= LEAST_INPUTS
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == weight.dtype
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def gated_pays(tokens: int, weight: Tensor) -> bool:
    """Whether `gated_hopper` is faster than the library for so many tokens, on the weight's device."""
    return (
        runs_hopper_kernels(weight.device)
        and full_share(tokens, weight.shape[0], processors_of(weight.device)) >= _LEAST_FULL
    )


def full_share(tokens: int, outputs: int, processors: int) -> float:
    """The share of its rounds of tiles that a product fills with weights and tokens."""
    tile = tile_of(tokens)
    items = -(-tokens // tile.tokens) * tiles_of(outputs)
    rounds = -(-items // processors)
    return tokens * outputs / max(1, rounds * processors * tile.tokens * 2 * OUTPUTS)
