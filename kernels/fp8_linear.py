"""Matrix products with fp8 weights: activations quantised in groups of 128, products in fp8, sums in float32.

A weight (e4m3) has a scale for each 128 of its inputs and some of its outputs, as checkpoints with blocks of
128 x 128 have (DeepSeek-V3, Qwen3-FP8); a scale per tensor or channel is written to all of them. Each token's
activations get a scale for each 128 of them. After 128 products the sum, scaled, joins one in float32, since
the tensor cores add fp8 products with fewer bits.

Weights are the rows of the tensor cores' tiles, and tokens their columns, of which there may be few. Where
tiles are few, the inputs are split among programs; the one that ends last adds up, always in the same order.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.kernels.launch import Launch, after_predecessor, next_power_of_2, require
from pagecast.kernels.split_sum import store_sum, workspace
from pagecast.kernels.tensor_map import matrix_map
from torch import Tensor

GROUP = 128
"""Inputs that share a scale."""

_GROUPS = 8
_FEW_TOKENS = 64  # up to which the own kernel is faster than torch's, on an H200
_LEAST_SCALE = 1e-12


@dataclass(frozen=True, slots=True)
class Fp8Cut:
    """How a product is cut: tiles of `outputs` x `tokens`, the inputs split in `splits`, pipelines of
    `stages` steps of 128 inputs, and `warps` per program."""

    outputs: int
    tokens: int
    splits: int
    stages: int
    warps: int


@triton.jit(do_not_specialize=["rows"])
def _quantise(
    x,
    out,
    scales,
    rows,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LEAST: tl.constexpr,
    BY_GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some groups of a row: fp8 numbers, and the scale that undoes it."""
    after_predecessor(OVERLAP)
    PARTS: tl.constexpr = (WIDTH // GROUP + GROUPS - 1) // GROUPS
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    group = tl.program_id(0) % PARTS * GROUPS + tl.arange(0, GROUPS)
    at = row * WIDTH + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = group < WIDTH // GROUP
    value = tl.load(x + at, mask=there[:, None], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1), LEAST) / 448.0
    small = tl.minimum(tl.maximum(value / scale[:, None], -448.0), 448.0)
    tl.store(out + at, small.to(out.dtype.element_ty), mask=there[:, None])
    place = group.to(tl.int64) * rows + row if BY_GROUP else row * (WIDTH // GROUP) + group
    tl.store(scales + place, scale, mask=there)


@triton.jit
def _sum_of_groups(
    x,
    x_scales,
    weight,
    scales,
    output,
    token,
    tokens,
    first,
    last,
    INPUTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The scaled products of the groups [first, last): fp32 [TILE, len(token)]."""
    GROUPS: tl.constexpr = INPUTS // GROUP
    acc = tl.zeros([TILE, token.shape[0]], tl.float32)
    live = token < tokens
    row = token.to(tl.int64)
    at = x + row[:, None] * INPUTS + tl.arange(0, GROUP)[None, :]
    scale_row = output // SCALE_ROWS
    if TILE > SCALE_ROWS:
        scale_row = (output + tl.arange(0, TILE)) // SCALE_ROWS
    for group in tl.range(first, last, num_stages=STAGES):
        a = tl.load(at + group * GROUP, mask=live[:, None], other=0.0)
        product = tl.dot(weight.load([output, group * GROUP]), a.T)
        a_scale = tl.load(x_scales + row * GROUPS + group, mask=live, other=0.0)
        w_scale = tl.load(scales + scale_row * GROUPS + group)
        if TILE > SCALE_ROWS:
            acc += product * a_scale[None, :] * w_scale[:, None]
        else:
            acc += product * (a_scale * w_scale)[None, :]
    return acc


@triton.jit(do_not_specialize=["tokens"])
def _product(
    x,
    x_scales,
    weight,
    scales,
    out,
    sums,
    arrivals,
    tokens,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_predecessor(OVERLAP)
    GROUPS: tl.constexpr = INPUTS // GROUP
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    # Neighbours share tokens where these are few tiles, so that a weight is read once from memory.
    rounds = tl.cdiv(tokens, TOKENS)
    output = tile // rounds * TILE
    token = tile % rounds * TOKENS + tl.arange(0, TOKENS)
    first = split * GROUPS // SPLITS
    last = (split + 1) * GROUPS // SPLITS
    acc = _sum_of_groups(
        x,
        x_scales,
        weight,
        scales,
        output,
        token,
        tokens,
        first,
        last,
        INPUTS,
        SCALE_ROWS,
        TILE,
        GROUP,
        STAGES,
    )
    store_sum(out, acc, sums, arrivals, tile, split, output, token, tokens, OUTPUTS, SPLITS)


_launches: dict[Any, Launch] = {}


def quantise_activations(x: Tensor, *, by_group: bool = False) -> tuple[Tensor, Tensor]:
    """x [tokens, width] in fp8, and its scales, fp32 [tokens, width / 128].

    `by_group`: scales lie group after group, and rows without a meaning follow, up to a multiple of 4, as
    torch's product needs. Errors: BadInput for a width that is no multiple of 128, and x that is not dense.
    """
    tokens, width = x.shape
    require(
        width % GROUP == 0 and x.is_contiguous(), f"fp8 needs dense rows of a multiple of {GROUP}: {width}"
    )
    rows = -(-tokens // 4) * 4 if by_group else tokens
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    shape = (width // GROUP, rows) if by_group else (rows, width // GROUP)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    key = ("quantise", x.dtype, width, x.device, by_group)
    launch = _launches.get(key)
    if launch is None:
        constants = {"WIDTH": width, "GROUP": GROUP, "GROUPS": _GROUPS, "LEAST": _LEAST_SCALE}
        constants["BY_GROUP"] = by_group
        launch = _launches[key] = Launch(_quantise, constants, x.device, num_warps=4)
    if tokens:
        launch(tokens * -(-width // (GROUP * _GROUPS)), (x, out, scales), rows)
    return out, scales.t() if by_group else scales


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, *, cut: Fp8Cut | None = None) -> Tensor:
    """Dense x [tokens, inputs] times the transposed dense fp8 weight [outputs, inputs]: [tokens, outputs].

    `scales`: fp32 [outputs / n, inputs / 128], each of n rows and 128 columns of the weight, for any n that
    divides the outputs, and for n = 128. `cut`: in place of `cut_of`'s choice.
    Safe inside CUDA graphs, on one stream. Errors: BadInput where shapes don't fit together.
    """
    if cut is None and x.shape[0] > _FEW_TOKENS and _library_takes(x, weight, scales):
        numbers, x_scales = quantise_activations(x, by_group=True)
        out = torch._scaled_mm(numbers, weight.t(), x_scales, scales.t(), out_dtype=x.dtype)
        return out[: x.shape[0]]
    numbers, x_scales = quantise_activations(x)
    return fp8_product(numbers, x_scales, weight, scales, x.dtype, cut=cut)


@cache
def _has_library(device: torch.device) -> bool:
    """Whether torch multiplies fp8 with scales of 1 x 128 and 128 x 128: from CUDA 12.9 on, on Hopper."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    numbers = torch.zeros(GROUP, 4 * GROUP, dtype=torch.float8_e4m3fn, device=device)
    x_scales, scales = torch.ones(4, GROUP, device=device).t(), torch.ones(1, 4, device=device).t()
    try:
        torch._scaled_mm(numbers, numbers.t(), x_scales, scales, out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


def _library_takes(x: Tensor, weight: Tensor, scales: Tensor) -> bool:
    """Whether torch's product can stand in for the own kernel, which is slower for many tokens."""
    blocks = scales.shape[0] * GROUP == weight.shape[0] and scales.shape[1] % 4 == 0
    return blocks and x.dtype == torch.bfloat16 and _has_library(x.device)


def fp8_product(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    *,
    cut: Fp8Cut | None = None,
) -> Tensor:
    """`fp8_linear` of activations that are quantised already; the result is in `dtype`."""
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    cut = cut or cut_of(tokens, outputs, inputs)
    out = torch.empty(tokens, outputs, dtype=dtype, device=x.device)
    if not tokens:
        return out
    key = ("product", x.device, dtype, weight.shape, scales.shape, cut)
    launch = _launches.get(key)
    if launch is None:
        _check(x, x_scales, weight, scales)
        launch = _launches[key] = product_launch(weight.shape, scales.shape, cut, x.device)
    tiles = -(-outputs // cut.outputs) * -(-tokens // cut.tokens)
    sums, arrivals = workspace(x.device, tiles, cut.splits, cut.outputs * cut.tokens)
    launch(
        tiles * cut.splits,
        (x, x_scales, matrix_map(weight, cut.outputs, GROUP), scales, out, sums, arrivals),
        tokens,
    )
    return out


def scale_rows(outputs: int, rows: int) -> int:
    """Outputs of a weight that share a scale, where the weight has so many rows of scales."""
    return GROUP if -(-outputs // GROUP) == rows else outputs // rows


def _check(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor) -> None:
    (tokens, inputs), (outputs, width) = x.shape, weight.shape
    groups = inputs // GROUP
    require(
        width == inputs
        and inputs % GROUP == 0
        and weight.is_contiguous()
        and weight.dtype == x.dtype == torch.float8_e4m3fn
        and x_scales.shape == (tokens, groups)
        and scales.shape[1] == groups
        and scales.is_contiguous()
        and -(-outputs // scale_rows(outputs, scales.shape[0])) == scales.shape[0],
        f"fp8_linear: x {tuple(x.shape)}, weight {tuple(weight.shape)} {weight.dtype} and scales "
        f"{tuple(scales.shape)} don't fit; inputs must be a multiple of {GROUP}, with a scale each",
    )


def cut_of(tokens: int, outputs: int, inputs: int) -> Fp8Cut:
    """How a product of this size is cut: as was fastest on an H200 for the layers of Qwen3-8B."""
    if tokens > _FEW_TOKENS:
        return Fp8Cut(128, 64, 1, 4, 4)
    tiles, groups = -(-outputs // 128), inputs // GROUP
    splits = 1
    while splits < 4 and tiles * splits < 96 and groups >= 8 * splits:
        splits *= 2
    return Fp8Cut(128, max(16, next_power_of_2(tokens)), splits, 5, 4)


def product_launch(
    shape: tuple[int, ...], scales: tuple[int, ...], cut: Fp8Cut, device: torch.device
) -> Launch:
    """The launch of the product for a weight and scales of these shapes."""
    outputs, inputs = shape
    constants = {
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "SCALE_ROWS": scale_rows(outputs, scales[0]),
        "TILE": cut.outputs,
        "TOKENS": cut.tokens,
        "SPLITS": cut.splits,
        "GROUP": GROUP,
        "STAGES": cut.stages,
    }
    return Launch(_product, constants, device, num_warps=cut.warps)
