"""Matrix products of few tokens on Hopper GPUs: weights are fetched while the kernel before still runs.

A decode step's products are short, so that a kernel's start and the way of its first weights from memory are
most of their time. Here a program fetches as many weights as its buffers hold, which no kernel writes, before
it waits for the predecessor that writes the tokens. Weights are the rows of the tensor cores' tiles, and
tokens their columns, of which there may be few. Where tiles are few, the inputs are split among programs, and
the kernel that follows adds up their sums. `linear_cuts.py` says how a product is cut. Written in Gluon,
Triton's lower level.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
from pagecast.kernels.hopper import barrier, fetch_box, let_next_start, wait_for_predecessor
from pagecast.kernels.launch import Launch, require
from pagecast.kernels.linear_cuts import LinearCut
from pagecast.kernels.tensor_map import swizzled_map
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _fetch_weights(weight, buffer, full, output, at, pred, GATED: gl.constexpr, OUTPUTS: gl.constexpr):
    """Queues the copy of a tile's weights for the inputs from `at` on; gated: half of each projection."""
    if GATED:
        HALF: gl.constexpr = buffer.shape[0] // 2
        fetch_box(weight, [output, at], full, buffer.slice(0, HALF), pred=pred)
        fetch_box(weight, [OUTPUTS // 2 + output, at], full, buffer.slice(HALF, HALF), pred=pred)
    else:
        fetch_box(weight, [output, at], full, buffer, pred=pred)


@gluon.jit
def _fetch_tokens(x, x_rest, buffers, rest_buffers, full, stage, token, at, pred, REST: gl.constexpr):
    """Queues the copy of the tile's tokens, and of the rest of them where there is one."""
    fetch_box(x, [token, at], full, buffers.index(stage), pred=pred)
    if REST:
        fetch_box(x_rest, [token + buffers.shape[1], at], full, rest_buffers.index(stage), pred=pred)


@gluon.jit
def _multiply(weights, tokens, acc):
    """Starts the product of a tile's weights with its tokens, on top of `acc`."""
    return warpgroup_mma(weights, tokens.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _store(out, acc, output, token, tokens, GATED: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Writes a tile `acc` [outputs, tokens] to out [tokens, WIDTH].

    Gated: silu(gate) * up, where the tile's first rows are the gate's and the others the up projection's.
    """
    if GATED:
        HALF: gl.constexpr = acc.shape[0] // 2
        P: gl.constexpr = gl.BlockedLayout([1, 4, 2], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
        pairs = acc.reshape([2, HALF, acc.shape[1]]).permute((2, 1, 0))
        gate, up = gl.split(gl.convert_layout(pairs, P))
        result = (gate / (1.0 + gl.exp(-gate)) * up).to(out.dtype.element_ty)
    else:
        result = acc.to(out.dtype.element_ty).permute((1, 0))
    EACH: gl.constexpr = 4 if GATED else 128 // out.dtype.element_ty.primitive_bitwidth
    L: gl.constexpr = gl.BlockedLayout([1, EACH], [4, 8], [WARPS, 1], [1, 0])
    result = gl.convert_layout(result, L)
    row = token + gl.arange(0, result.shape[0], gl.SliceLayout(1, L))
    lane = output + gl.arange(0, result.shape[1], gl.SliceLayout(0, L))
    at = out + row.to(gl.int64)[:, None] * WIDTH + lane[None, :]
    gl.store(at, result, mask=(row < tokens)[:, None] & (lane < WIDTH)[None, :])


@gluon.jit(do_not_specialize=["tokens"])
def _linear_hopper(
    x,
    x_rest,
    weight,
    out,
    tokens,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    TILE: gl.constexpr,
    TOKENS: gl.constexpr,
    REST: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPTH: gl.constexpr,
    WARPS: gl.constexpr,
    GATED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    let_next_start(OVERLAP)
    DTYPE: gl.constexpr = x.dtype
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    STEPS: gl.constexpr = INPUTS // DEPTH // SPLITS
    FIRST: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    BYTES: gl.constexpr = (TILE + TOKENS + REST) * DEPTH * 2
    WIDTH: gl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    w_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, DEPTH], SHARED)
    x_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, DEPTH], SHARED)
    rest_buffers = x_buffers  # unused without a rest
    if REST:
        rest_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, REST, DEPTH], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    # Neighbours share weights.
    rounds = (tokens + TOKENS + REST - 1) // (TOKENS + REST)
    token = gl.program_id(0) % rounds * (TOKENS + REST)
    tile = gl.program_id(0) // rounds
    split = tile // (OUTPUTS // TILE)
    output = tile % (OUTPUTS // TILE) * (TILE * WIDTH // OUTPUTS)
    first = split * (STEPS * DEPTH)
    for i in gl.static_range(FIRST):
        mbarrier.expect(full.index(i), BYTES)
        at = first + i * DEPTH
        _fetch_weights(weight, w_buffers.index(i), full.index(i), output, at, True, GATED, OUTPUTS)
    wait_for_predecessor(OVERLAP)
    for i in gl.static_range(FIRST):
        at = first + i * DEPTH
        _fetch_tokens(x, x_rest, x_buffers, rest_buffers, full.index(i), i, token, at, True, REST)
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    acc = gl.zeros([TILE, TOKENS], gl.float32, A)
    rest = acc  # unused without a rest
    if REST:
        R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, REST, 16])
        rest = gl.zeros([TILE, REST], gl.float32, R)
    for step in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        weights = w_buffers.index(stage)
        if REST:
            product = _multiply(weights, x_buffers.index(stage), acc)
            rest_product = _multiply(weights, rest_buffers.index(stage), rest)
            acc, rest = warpgroup_mma_wait(2, deps=[product, rest_product])
        else:
            product = _multiply(weights, x_buffers.index(stage), acc)
            acc = warpgroup_mma_wait(1, deps=[product])
        if STEPS > STAGES:
            # The step before has ended in all warps: its buffers take the next weights and tokens.
            barrier()
            free = (step + STAGES - 1) % STAGES
            next_step = step + STAGES - 1
            more = (step > 0) & (next_step < STEPS)
            at = first + next_step * DEPTH
            mbarrier.expect(full.index(free), BYTES, pred=more)
            _fetch_weights(weight, w_buffers.index(free), full.index(free), output, at, more, GATED, OUTPUTS)
            _fetch_tokens(x, x_rest, x_buffers, rest_buffers, full.index(free), free, token, at, more, REST)
    if REST:
        acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()  # the results pass through the buffers, from which no warp must be multiplying any more
    target = out + split.to(gl.int64) * tokens * WIDTH
    if REST:
        _store(target, rest, output, token + TOKENS, tokens, GATED, WIDTH, WARPS)
    _store(target, acc, output, token, tokens, GATED, WIDTH, WARPS)


_launches: dict[Any, Launch] = {}


def linear_hopper(x: Tensor, weight: Tensor, cut: LinearCut, *, gated: bool = False) -> Tensor:
    """Dense x [tokens, inputs] times the transposed dense `weight` [outputs, inputs], both bf16 or fp16.

    Returns [tokens, outputs] in x's dtype. `gated`: silu of the first half of the outputs times the second,
    [tokens, outputs / 2]. With `cut.splits` > 1: addends, fp32 [splits, tokens, outputs].
    Safe inside CUDA graphs. Raises BadInput where shapes, dtypes, strides and the cut don't fit each other.
    """
    tokens, inputs = x.shape
    shape = weight.shape
    # The key holds all that `_check` looks at, so that only what was checked finds a launch.
    dense = x.is_contiguous(), weight.is_contiguous()
    key = (x.device, x.dtype, inputs, shape, weight.dtype, dense, cut, gated)
    launch = _launches.get(key)
    if launch is None:
        _check(x, weight, cut, gated)
        launch = _launches[key] = linear_launch(shape, cut, gated, x.device)
    outputs = shape[0]
    width = outputs // 2 if gated else outputs
    if cut.splits > 1:
        out = torch.empty(cut.splits, tokens, width, dtype=torch.float32, device=x.device)
    else:
        out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    programs = -(-tokens // (cut.tokens + cut.rest)) * (outputs // cut.outputs) * cut.splits
    rows = cut.outputs // 2 if gated else cut.outputs
    maps = (
        swizzled_map(x, cut.tokens, cut.depth),
        swizzled_map(x, cut.rest, cut.depth) if cut.rest else None,
        swizzled_map(weight, rows, cut.depth),
    )
    launch(programs, (*maps, out), tokens)
    return out


def _check(x: Tensor, weight: Tensor, cut: LinearCut, gated: bool) -> None:
    require(
        weight.ndim == 2
        and weight.shape[1] == x.shape[1]
        and cut.divides(weight.shape[0], weight.shape[1])
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == weight.dtype
        and x.is_contiguous()
        and weight.is_contiguous()
        and not (gated and cut.splits > 1),
        f"linear_hopper: x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} "
        f"don't fit each other or {cut}; both must be dense, of one 16-bit dtype and as many inputs, and a "
        "gated product can't be split",
    )


def linear_launch(shape: tuple[int, ...], cut: LinearCut, gated: bool, device: torch.device) -> Launch:
    """The launch of a product with a weight of this shape."""
    outputs, inputs = shape
    constants = {
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "TILE": cut.outputs,
        "TOKENS": cut.tokens,
        "REST": cut.rest,
        "SPLITS": cut.splits,
        "STAGES": cut.stages,
        "DEPTH": cut.depth,
        "WARPS": cut.warps,
        "GATED": gated,
    }
    return Launch(_linear_hopper, constants, device, num_warps=cut.warps)
