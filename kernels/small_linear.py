"""Matrix products for few tokens, whose time is that of reading the weights and of starting to.

A program is brought up while the kernel before it still runs, and asks for its share of the weights at once:
they are on their way to the L2 cache before there is anything to multiply. Weights are the rows of the tensor
cores' tiles and tokens their columns; inputs are split among programs where tiles are few.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.kernels.launch import Launch, after_predecessor, next_power_of_2, require
from pagecast.kernels.split_sum import store_sum, workspace
from pagecast.kernels.tensor_map import matrix_map
from torch import Tensor

MOST_TOKENS = 64
_LINE = 64  # numbers of 16 bits in what the L2 cache fetches at once


@dataclass(frozen=True, slots=True)
class SmallCut:
    """How a product is cut: tiles of `outputs` x `tokens`, the inputs split in `splits`, pipelines of
    `stages` steps of `depth` inputs, and `warps` per program."""

    outputs: int
    tokens: int
    splits: int
    depth: int
    stages: int
    warps: int


@triton.jit
def _prefetch(weight, row, first, last, TILE: tl.constexpr, INPUTS: tl.constexpr, LINE: tl.constexpr):
    """Asks the L2 cache for the columns [first, last) of the rows from `row` on."""
    rows = (row + tl.arange(0, TILE)).to(tl.int64)[:, None] * INPUTS
    for start in range(first, last, 4 * LINE):
        at = weight + rows + tl.minimum(start + tl.arange(0, 4) * LINE, last - LINE)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["tokens"])
def _product(
    x,
    weight,
    numbers,
    out,
    sums,
    arrivals,
    tokens,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    LINE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`weight` describes the matrix, and `numbers` points to it."""
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    first = split * (INPUTS // DEPTH) // SPLITS
    last = (split + 1) * (INPUTS // DEPTH) // SPLITS
    if OVERLAP and OUTPUTS % TILE == 0:
        _prefetch(numbers, tile * TILE, first * DEPTH, last * DEPTH, TILE, INPUTS, LINE)
    after_predecessor(OVERLAP)
    token = tl.arange(0, TOKENS)
    at = x + token.to(tl.int64)[:, None] * INPUTS + tl.arange(0, DEPTH)[None, :]
    live = (token < tokens)[:, None]
    acc = tl.zeros([TILE, TOKENS], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        a = tl.load(at + step * DEPTH, mask=live, other=0.0)
        acc = tl.dot(weight.load([tile * TILE, step * DEPTH]), a.T, acc)
    store_sum(out, acc, sums, arrivals, tile, split, tile * TILE, token, tokens, OUTPUTS, SPLITS)


_launches: dict[Any, Launch] = {}


def takes(x: Tensor, weight: Tensor) -> bool:
    """True where `small_linear` can compute the product."""
    return (
        x.shape[0] <= MOST_TOKENS
        and x.dtype == weight.dtype
        and x.element_size() == 2
        and weight.shape[1] % 256 == 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
    )


def small_linear(x: Tensor, weight: Tensor, *, cut: SmallCut | None = None) -> Tensor:
    """x [tokens, inputs] times the transposed weight [outputs, inputs]: [tokens, outputs].

    Both dense and of one 16-bit dtype, at most 64 tokens, inputs a multiple of 256. `cut`: in place of
    `cut_of`'s choice. Safe inside CUDA graphs, on one stream. Errors: BadInput for others.
    """
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    cut = cut or cut_of(tokens, outputs, inputs)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    key = (x.device, x.dtype, weight.shape, cut)
    launch = _launches.get(key)
    if launch is None:
        require(
            takes(x, weight) and weight.shape[1] == inputs and tokens <= cut.tokens,
            f"small_linear: x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} "
            f"must be dense, of one 16-bit dtype, of a multiple of 256 inputs, at most {MOST_TOKENS} tokens",
        )
        launch = _launches[key] = product_launch(weight.shape, cut, x.device)
    tiles = -(-outputs // cut.outputs)
    sums, arrivals = workspace(x.device, tiles, cut.splits, cut.outputs * cut.tokens)
    launch(
        tiles * cut.splits,
        (x, matrix_map(weight, cut.outputs, cut.depth), weight, out, sums, arrivals),
        tokens,
    )
    return out


def cut_of(tokens: int, outputs: int, inputs: int) -> SmallCut:
    """How a product of this size is cut."""
    splits = 1
    while splits < 8 and -(-outputs // 64) * splits < 128 and inputs >= 256 * 2 * splits:
        splits *= 2
    return SmallCut(64, max(16, next_power_of_2(tokens)), splits, 256 if tokens <= 16 else 128, 4, 4)


def product_launch(shape: tuple[int, ...], cut: SmallCut, device: torch.device) -> Launch:
    """The launch of the product for a weight of this shape."""
    outputs, inputs = shape
    constants = {
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "TILE": cut.outputs,
        "TOKENS": cut.tokens,
        "SPLITS": cut.splits,
        "DEPTH": cut.depth,
        "STAGES": cut.stages,
        "LINE": _LINE,
    }
    return Launch(_product, constants, device, num_warps=cut.warps)
