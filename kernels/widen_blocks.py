"""Copy of a layer's fp8 blocks in a wider dtype, for prompts whose attention is arithmetic.

The tensor cores multiply 16-bit queries by 16-bit keys. Where a step has many queries, widening the cached
tokens once costs a few percent of the step, and widening them in every tile of queries more than half of it.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import triton
import triton.language as tl
from pagecast.kernels.launch import Launch, after_predecessor, require
from torch import Tensor

_PIECE = 4096
"""Numbers that a program moves: two 16-byte loads per thread."""


@triton.jit
def _widen(
    cache,
    blocks,
    out,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_predecessor(OVERLAP)
    PIECES: tl.constexpr = (SIZE + PIECE - 1) // PIECE
    nth = (tl.program_id(0) // PIECES).to(tl.int64)
    lanes = tl.program_id(0) % PIECES * PIECE + tl.arange(0, PIECE)
    mask = lanes < SIZE
    block = tl.load(blocks + nth).to(tl.int64)
    numbers = tl.load(cache + block * STRIDE + lanes, mask=mask, other=0.0)
    tl.store(out + nth * SIZE + lanes, numbers.to(tl.float16).to(out.dtype.element_ty), mask=mask)


_launches: dict[Any, Launch] = {}


def widen_blocks(cache: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Copies block blocks[i] of `cache` to block i of `out`, in out's dtype.

    `cache` is [blocks, ...] with dense blocks, in fp8; `out` dense, of the same block shape, with room for
    all of `blocks`, int32 or int64 on the device. Safe inside CUDA graphs. Errors: BadInput for others.
    """
    count = blocks.shape[0]
    key = (cache.dtype, cache.shape[1:], cache.stride(), out.dtype, blocks.dtype, cache.device)
    launch = _launches.get(key)
    if launch is None:
        require(
            cache.shape[1:] == out.shape[1:] and cache[0].is_contiguous() and out.is_contiguous(),
            f"widen_blocks: blocks {tuple(cache.shape[1:])} and {tuple(out.shape[1:])} must be dense, alike",
        )
        constants = {"STRIDE": cache.stride(0), "SIZE": cache[0].numel(), "PIECE": _PIECE}
        launch = _launches[key] = Launch(_widen, constants, cache.device, num_warps=4)
    require(count <= out.shape[0], f"widen_blocks: {count} blocks, but room for {out.shape[0]}")
    if count:
        launch(count * -(-launch.constants["SIZE"] // _PIECE), (cache, blocks, out))
