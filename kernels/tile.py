"""Tiles of K and V for the attention kernels: fetched through the block table, and widened where fp8."""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def page_ids(table_row, start, length, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, EDGE: tl.constexpr):
    """Blocks of the tokens [start, start + TILE): one int64 where a tile lies in one block, else [TILE].

    With EDGE, tokens from `length` on get block 0; without it, all must lie below `length`.
    """
    if BLOCK_SIZE % TILE == 0:
        ids = tl.load(table_row + start // BLOCK_SIZE)
    else:
        tokens = start + tl.arange(0, TILE)
        if EDGE:
            ids = tl.load(table_row + tokens // BLOCK_SIZE, mask=tokens < length, other=0)
        else:
            ids = tl.load(table_row + tokens // BLOCK_SIZE)
    return ids.to(tl.int64)


@triton.jit
def load_tile(
    cache,
    ids,
    start,
    length,
    STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    EDGE: tl.constexpr,
    TURNED: tl.constexpr = False,
):
    """Rows [TILE, DIM_POW2] of the tokens [start, start + TILE); zeros from DIM on.

    With EDGE also zeros from `length` on; without it, whatever the block holds there (memory that exists,
    as `page_ids` gives block 0 where a sequence has none). `cache` points at the head; STRIDES are those of
    [block, slot, head, dim]. TURNED: the same with EDGE, transposed.
    """
    lanes = tl.arange(0, TILE)
    dims = tl.arange(0, DIM_POW2)
    if BLOCK_SIZE % TILE == 0:
        rows = ids * STRIDES[0] + (start % BLOCK_SIZE + lanes) * STRIDES[1]
    else:
        rows = ids * STRIDES[0] + ((start + lanes) % BLOCK_SIZE) * STRIDES[1]
    there = start + lanes < length
    if TURNED:
        at = cache + rows[None, :] + dims[:, None] * STRIDES[3]
        return tl.load(at, mask=there[None, :] & (dims < DIM)[:, None], other=0.0)
    else:
        at = cache + rows[:, None] + dims[None, :] * STRIDES[3]
        if EDGE:
            return tl.load(at, mask=there[:, None] & (dims < DIM)[None, :], other=0.0)
        elif DIM != DIM_POW2:
            return tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def halves(x, ON_GPU: tl.constexpr):
    """Two fp8 (e4m3) numbers of each int16, in fp16: those of the low bytes, and those of the high ones.

    Reading fp8 as int16 lets shared memory be read as the tensor cores need it; single bytes can't be.
    """
    if ON_GPU:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            .reg .b16 lows, highs, unused;
            prmt.b32 low, $2, $2, 0x2020;
            prmt.b32 high, $2, $2, 0x3131;
            mov.b32 {lows, unused}, low;
            mov.b32 {highs, unused}, high;
            cvt.rn.f16x2.e4m3x2 $0, lows;
            cvt.rn.f16x2.e4m3x2 $1, highs;
            }""",
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    low = (x & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    high = ((x >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def alternate_pairs(x, ON_GPU: tl.constexpr):
    """Two fp8 (e4m3) numbers of each int16 of rows [n, m], in fp16: the numbers 4i and 4i + 1 of each row,
    and the numbers 4i + 2 and 4i + 3.

    Half the instructions of `halves`: what one of them widens stays side by side. Two neighbours of a row
    must lie in one register, as they do in a factor of a product that sums over the columns.
    """
    if ON_GPU:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""",
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low, high = halves(x, ON_GPU)
        pairs = tl.join(low, high).reshape(x.shape[0], x.shape[1] // 2, 2, 2)
        first, second = tl.split(pairs.permute(0, 1, 3, 2))
        return first.reshape(x.shape[0], x.shape[1]), second.reshape(x.shape[0], x.shape[1])


@triton.jit
def with_sink(total, m, sinks, heads, mask):
    """Sums of the online softmax with each row's sink: a logit beside the scores that has no value.

    `sinks` are natural logits by query head; `m` is the row's maximum in base 2.
    """
    sink = tl.load(sinks + heads, mask=mask, other=-float("inf")).to(tl.float32)
    return total + tl.exp2(sink * 1.4426950408889634 - m)


def compute_dtype(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> Any:
    """The kernel language's dtype of the products: q's, but fp16 for an fp8 cache.

    fp8 (e4m3) converts to fp16 exactly in one instruction, to bf16 in many; weights and normed queries lie
    well within fp16's range.
    """
    if kv_dtype == torch.float8_e4m3fn and q_dtype != torch.float32:
        return tl.float16
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[q_dtype]
