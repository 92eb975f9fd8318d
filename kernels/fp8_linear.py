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
from pagecast.kernels.fp8_group import GROUP as GROUP
from pagecast.kernels.launch import Launch, after_predecessor, next_power_of_2, require
from pagecast.kernels.split_sum import store_sum, workspace
from pagecast.kernels.tensor_map import matrix_map
from torch import Tensor

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
    OUTPUTS: tl.constexpr,
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
    if SCALE_ROWS % TILE:
        # Outputs past the last are not stored: they may have any scale that is there.
        scale_row = tl.minimum(output + tl.arange(0, TILE), OUTPUTS - 1) // SCALE_ROWS
    for group in tl.range(first, last, num_stages=STAGES):
        a = tl.load(at + group * GROUP, mask=live[:, None], other=0.0)
        product = tl.dot(weight.load([output, group * GROUP]), a.T)
        a_scale = tl.load(x_scales + row * GROUPS + group, mask=live, other=0.0)
        w_scale = tl.load(scales + scale_row * GROUPS + group)
        if SCALE_ROWS % TILE:
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
    # Neighbouring programs share a weight tile, so it is read from memory once.
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
        OUTPUTS,
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

    `scales`: dense fp32 [outputs / n, inputs / 128], each of n rows and 128 columns of the weight. n is 128
    where that makes as many rows, of which the last may stand for fewer outputs; else it is any number that
    divides the outputs. `cut`: in place of `cut_of`'s choice.
    Safe inside CUDA graphs, on one stream. Errors: BadInput where shapes, dtypes and strides don't fit.
    """
    if cut is None and x.shape[0] > _FEW_TOKENS and _library_takes(x, weight, scales):
        _check(x, weight, scales)
        numbers, x_scales = quantise_activations(x, by_group=True)
        out = torch._scaled_mm(numbers, weight.t(), x_scales, scales.t(), out_dtype=x.dtype)
        return out[: x.shape[0]]
    return _own_product(x, weight, scales, cut)


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


def _own_product(x: Tensor, weight: Tensor, scales: Tensor, cut: Fp8Cut | None) -> Tensor:
    """`fp8_linear` by the own kernel."""
    tokens, inputs = x.shape
    shape = weight.shape
    outputs = shape[0]
    cut = cut or cut_of(tokens, outputs, inputs)
    # The key holds all that `_check` looks at, so that only what was checked finds a launch.
    dense = weight.is_contiguous(), scales.is_contiguous()
    key = ("product", x.device, x.dtype, inputs, shape, weight.dtype, scales.shape, scales.dtype, dense, cut)
    launch = _launches.get(key)
    if launch is None:
        _check(x, weight, scales)
        launch = _launches[key] = product_launch(shape, scales.shape, cut, x.device)
    numbers, x_scales = quantise_activations(x)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    tiles = -(-outputs // cut.outputs) * -(-tokens // cut.tokens)
    sums, arrivals = workspace(x.device, tiles, cut.splits, cut.outputs * cut.tokens)
    launch(
        tiles * cut.splits,
        (numbers, x_scales, matrix_map(weight, cut.outputs, GROUP), scales, out, sums, arrivals),
        tokens,
    )
    return out


def scale_rows(outputs: int, rows: int) -> int:
    """Outputs of a weight that share a scale, where there are so many rows of scales; 0 for rows that don't
    fit."""
    if rows == -(-outputs // GROUP):
        return GROUP
    return outputs // rows if rows and outputs % rows == 0 else 0


def _check(x: Tensor, weight: Tensor, scales: Tensor) -> None:
    """Leaves the strides of x to `quantise_activations`."""
    inputs = x.shape[1]
    require(
        weight.ndim == scales.ndim == 2
        and weight.shape[1] == inputs
        and inputs % GROUP == 0
        and weight.dtype == torch.float8_e4m3fn
        and weight.is_contiguous()
        and scales.shape[1] == inputs // GROUP
        and scale_rows(weight.shape[0], scales.shape[0]) > 0
        and scales.dtype == torch.float32
        and scales.is_contiguous(),
        f"fp8_linear: x {tuple(x.shape)}, weight {tuple(weight.shape)} {weight.dtype} and scales "
        f"{tuple(scales.shape)} {scales.dtype} don't fit; give a multiple of {GROUP} inputs, a dense fp8 "
        f"weight, and dense fp32 scales with a column for each {GROUP} inputs and a row for each n outputs",
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
