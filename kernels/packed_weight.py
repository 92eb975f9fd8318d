"""Weights in 12 bits: sign, seven bits of mantissa, and four of an exponent relative to the row's largest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64
"""Outputs and inputs of a packed tile."""
_BINADES = 16
_ONE = 127  # the exponent field of 1.0
# A tile's outputs: warp, half of 16, group. Its inputs: quarter, half of 16, lane, number of the pair.
_TILE_OUTPUTS = (4, 2, 8)
_TILE_INPUTS = (4, 2, 4, 2)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight of `shape` [outputs, inputs] in tiles of 64 x 64.

    `signs` int16 [outputs / 64, inputs / 2, 64] hold signs and mantissas, two to a number. `exponents` int16
    [outputs / 64, inputs / 4, 64] hold four to a number. Both have the order in which tensor cores take their
    operands from registers. A row's numbers are multiplied by its one of `scales` [outputs], powers of two in
    fp32. `gated`: rows are eight of the first half and eight of the second in turn.
    """

    signs: Tensor
    exponents: Tensor
    scales: Tensor
    shape: tuple[int, int]
    gated: bool

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.signs.nbytes + self.exponents.nbytes + self.scales.nbytes


def pack(weight: Tensor, *, gated: bool = False) -> PackedWeight:
    """Packs a bf16 weight [outputs, inputs], both multiples of 64.

    Numbers keep their value where their exponent is one of a row's 16 largest. Smaller ones, zeros included,
    become the least number that is kept, with their sign.
    """
    outputs, inputs = weight.shape
    if gated:
        weight = weight.view(2, outputs // 16, 8, inputs).transpose(0, 1).reshape(outputs, inputs)
    bits = weight.contiguous().view(torch.int16)
    largest = _exponents(bits).amax(1, keepdim=True)
    code = _exponents(bits) - largest + (_BINADES - 1)
    kept = code >= 0
    code = torch.where(kept, code, 0)
    mantissa = torch.where(kept, bits & 0x7F, 0)
    sign = (bits >> 15) & 1
    split = (outputs // BLOCK, *_TILE_OUTPUTS, inputs // BLOCK, *_TILE_INPUTS)
    # Tile; warp, group and lane, which are a thread; halves of inputs and outputs, number; and quarter.
    order = (0, 4, 1, 3, 7, 6, 2, 8, 5)
    code, mantissa, sign = (part.view(split).permute(order) for part in (code, mantissa, sign))
    exponents = code[..., 0] | code[..., 1] << 4 | code[..., 2] << 8 | code[..., 3] << 12
    even, odd = sign << 15 | mantissa, sign << 7 | mantissa << 8
    signs = torch.stack((even[..., 0] | odd[..., 1], even[..., 2] | odd[..., 3]), 2)
    scales = torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest.int() - _ONE)
    return PackedWeight(
        signs.reshape(outputs // BLOCK, inputs // 2, BLOCK),
        exponents.reshape(outputs // BLOCK, inputs // 4, BLOCK),
        scales.flatten(),
        (outputs, inputs),
        gated,
    )


def unpack(weight: PackedWeight) -> Tensor:
    """The bf16 weight [outputs, inputs] that a packed one stands for, in the order it was given in."""
    outputs, inputs = weight.shape
    tiles = (outputs // BLOCK, inputs // BLOCK)
    thread = (4, 8, 4, 2, 2, 2)
    low, high = (part.int() & 0xFFFF for part in weight.signs.view(*tiles, 2, *thread).unbind(2))
    exponents = weight.exponents.view(*tiles, *thread).int() & 0xFFFF
    shifts = torch.arange(0, 16, 4, device=low.device)
    code = (exponents[..., None] >> shifts) & 0xF
    signed = torch.stack((low, _swapped(low), high, _swapped(high)), -1) & 0x807F
    bits = (signed | (code + _ONE - _BINADES + 1) << 7).to(torch.int16)
    rows = bits.permute(0, 2, 6, 3, 1, 8, 5, 4, 7).reshape(outputs, inputs).view(torch.bfloat16)
    rows = (rows.float() * weight.scales[:, None]).bfloat16()
    if weight.gated:
        rows = rows.view(outputs // 16, 2, 8, inputs).transpose(0, 1).reshape(outputs, inputs)
    return rows


def packing_error(weight: Tensor) -> float:
    """The most that a row of a bf16 weight [outputs, inputs] changes when it is packed, relative to the row:
    the norm of what changes by the row's own; 0 for rows of zeros alone."""
    exponent = _exponents(weight.contiguous().view(torch.int16))
    largest = exponent.amax(1, keepdim=True)
    least = torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest.int() - _ONE - _BINADES + 1)
    change = torch.where(exponent <= largest - _BINADES, least - weight.abs(), 0.0)
    norms = weight.float().norm(dim=1)
    return float((change.norm(dim=1) / norms.clamp(min=torch.finfo(torch.float32).tiny)).max())


def _exponents(bits: Tensor) -> Tensor:
    """The exponent fields of bf16 numbers, which are given as int16."""
    return (bits >> 7) & 0xFF


def _swapped(halves: Tensor) -> Tensor:
    """16-bit numbers with their bytes exchanged."""
    return (halves >> 8 | halves << 8) & 0xFFFF
