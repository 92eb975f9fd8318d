"""Cuts of the products of few tokens with packed weights, as were fastest on an H200.

The products of Qwen3-8B were measured that read the most weights: gate and up, down, and the output
projection. All others are left to bf16.
"""

from __future__ import annotations

from typing import NamedTuple

from pagecast.kernels.linear_cuts import Kind

MOST_PACKED_TOKENS = 128
"""Steps of more tokens are bound by the tensor cores and the power limit, so that they read bf16 weights."""
_SHARED_BYTES = 226 * 1024
# Through which results pass on their way to memory.
_STAGING_BYTES = 14 * 1024
_BLOCK = 64


class PackedCut(NamedTuple):
    """How `packed_hopper` cuts a product: items of `parts` times 64 outputs (two or three) and `tokens` +
    `rest` tokens, the inputs split in `splits`, fetched `depth` at a time."""

    parts: int
    tokens: int
    rest: int
    splits: int = 1
    depth: int = _BLOCK

    @property
    def stages(self) -> int:
        """Buffers of `depth` inputs: as many as shared memory holds."""
        stage = self.parts * _BLOCK * self.depth * 3 // 2 + (self.tokens + self.rest) * self.depth * 2 + 16
        return min((_SHARED_BYTES - _STAGING_BYTES) // stage, 10)

    def divides(self, inputs: int) -> bool:
        """Whether a product of so many inputs can be cut so."""
        steps, left = divmod(inputs, self.depth * self.splits)
        return left == 0 and steps >= self.stages

    def items(self, outputs: int, tokens: int) -> int:
        """Items of a product."""
        tiles = -(-outputs // (_BLOCK * self.parts))
        return -(-tokens // (self.tokens + self.rest)) * tiles * self.splits


# By kind, outputs and inputs: up to how many tokens, which cut.
_CUTS: dict[tuple[Kind, int, int], tuple[tuple[int, PackedCut], ...]] = {
    ("gated", 24576, 4096): (
        (16, PackedCut(3, 16, 0)),
        (32, PackedCut(3, 32, 0)),
        (48, PackedCut(3, 32, 16)),
        (64, PackedCut(3, 64, 0)),
        (80, PackedCut(3, 64, 16)),
        (96, PackedCut(3, 64, 32, 1, 128)),
        (128, PackedCut(3, 128, 0, 1, 128)),
    ),
    ("sums", 4096, 12288): (
        (16, PackedCut(2, 16, 0, 4, 128)),
        (32, PackedCut(2, 32, 0, 4)),
        (48, PackedCut(2, 32, 16, 4, 128)),
        (64, PackedCut(2, 64, 0, 4, 128)),
        (80, PackedCut(2, 64, 16, 4, 128)),
        (96, PackedCut(2, 64, 32, 4)),
        (128, PackedCut(2, 128, 0, 4, 128)),
    ),
    ("plain", 151936, 4096): (
        (16, PackedCut(3, 16, 0)),
        (32, PackedCut(3, 32, 0, 1, 128)),
        (48, PackedCut(3, 32, 16, 1, 128)),
        (64, PackedCut(3, 64, 0)),
        (80, PackedCut(3, 64, 16)),
        (96, PackedCut(3, 64, 32)),
        (128, PackedCut(3, 128, 0, 1, 128)),
    ),
}


def has_cuts(kind: Kind, outputs: int, inputs: int) -> bool:
    """Whether `packed_hopper` computes products of this kind and size."""
    return (kind, outputs, inputs) in _CUTS


def packed_sizes(kind: Kind, outputs: int, inputs: int) -> list[int]:
    """The most tokens of each cut of such products."""
    return [most for most, _ in _CUTS.get((kind, outputs, inputs), ())]


def packed_cut_of(kind: Kind, tokens: int, shape: tuple[int, int]) -> PackedCut | None:
    """How the product of so many tokens with a packed weight of this shape is cut; None: by bf16 weights."""
    for most, cut in _CUTS.get((kind, *shape), ()):
        if tokens <= most:
            return cut
    return None
