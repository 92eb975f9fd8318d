"""Gated products of many tokens on Hopper GPUs: gate, up and `silu(gate) * up` in one kernel.

Apart, a large step's product of gate and up is written to memory and read again by the kernel for SiLU, which
takes a twentieth of the product's time. Here three warpgroups share a tile of 96 outputs: each multiplies 64
weights, 32 of gate and 32 of up, with all of the tile's tokens, which are the tensor cores' columns. The two
weights of an output lie 8 rows apart, so that one thread holds both results. A tile of 192 x 256 results is
the largest that a multiprocessor's registers hold; the larger it is, the less is read from the L2 cache.
Written in Gluon, Triton's lower level.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
from pagecast.kernels.capabilities import processors_of
from pagecast.kernels.gated_plan import (
    DEPTH,
    LEAST_INPUTS,
    OUTPUTS,
    GatedTile,
    fits,
    tile_of,
    tiles_of,
)
from pagecast.kernels.hopper import barrier, fetch_box, let_next_start, store_box, wait_for_predecessor
from pagecast.kernels.launch import Launch, require
from pagecast.kernels.rms_scale import rms_scales
from pagecast.kernels.tensor_map import paired_map, swizzled_map
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Tiles of so many tokens are under way at once, so that their tokens stay in the L2 cache.
_GROUP = 8
_PARTS = gl.constexpr(3)


@gluon.jit
def _find_tile(item, tiles, rounds, GROUP: gl.constexpr):
    """Item number `item`: its tile of outputs, and its tile of tokens. Neighbours share weights."""
    group = item // (GROUP * tiles)
    first = group * GROUP
    width = gl.minimum(rounds - first, GROUP)
    within = item - first * tiles
    return within // width, first + within % width


@gluon.jit
def _fetch_weights(weight, pipe, stage, tile, at, OUTPUTS: gl.constexpr):
    """Queues the copy of a tile's weights for the inputs from `at` on."""
    weights, _tokens, full, _empty = pipe
    for part in gl.static_range(_PARTS):
        eight = (tile * OUTPUTS + part * (OUTPUTS // _PARTS)) // 8
        fetch_box(weight, [eight, 0, 0, at], full.index(stage), weights.index(stage * _PARTS + part))


@gluon.jit
def _refill(maps, pipe, step, k, here, there, more, OUTPUTS: gl.constexpr, STEPS: gl.constexpr):
    """Fetches what comes STAGES steps after the last one, into its stage, once all warpgroups have left it.

    `here` and `there` are this item's tile of outputs and of tokens and the next one's, if there are `more`.
    """
    x, weight, _out = maps
    _weights, tokens, full, empty = pipe
    STAGES: gl.constexpr = tokens.shape[0]
    TOKENS: gl.constexpr = tokens.shape[1]
    DEPTH: gl.constexpr = tokens.shape[2]
    ahead = k - 1 + STAGES
    beyond = ahead >= STEPS
    if (step > 0) & ((ahead < STEPS) | more):
        stage = (step - 1) % STAGES
        tile = gl.where(beyond, there[0], here[0])
        nth = gl.where(beyond, there[1], here[1])
        at = gl.where(beyond, ahead - STEPS, ahead) * DEPTH
        mbarrier.wait(empty.index(stage), ((step - 1) // STAGES) & 1)
        mbarrier.expect(full.index(stage), (2 * OUTPUTS + TOKENS) * DEPTH * 2)
        _fetch_weights(weight, pipe, stage, tile, at, OUTPUTS)
        fetch_box(x, [nth * TOKENS, at], full.index(stage), tokens.index(stage))


@gluon.jit
def _gate(acc, scales, token, staging):
    """silu(gate) * up of acc [2 * outputs, tokens], whose rows are eight of gate and eight of up in turn.

    Written to staging [tokens, outputs]. Some columns at a time: their scales would fill the registers.
    """
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    if COLUMNS > 64:
        HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 2, 16])
        first, second = gl.split(acc.reshape([ROWS, 2, COLUMNS // 2]).permute((0, 2, 1)))
        first = gl.convert_layout(first, HALF, assert_trivial=True)
        second = gl.convert_layout(second, HALF, assert_trivial=True)
        _gate(first, scales, token, staging.slice(0, COLUMNS // 2))
        _gate(second, scales, token + COLUMNS // 2, staging.slice(COLUMNS // 2, COLUMNS // 2))
    else:
        gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, COLUMNS]).permute((0, 2, 3, 1)))
        gate = gate.reshape([ROWS // 2, COLUMNS])
        up = up.reshape([ROWS // 2, COLUMNS])
        if scales is not None:
            scale = gl.load(scales + token + gl.arange(0, COLUMNS, gl.SliceLayout(0, gate.type.layout)))
            gate = gate * scale[None, :]
            up = up * scale[None, :]
        result = gate / (1.0 + gl.exp(-gate)) * up
        staging.permute((1, 0)).store(result.to(staging.dtype))


@gluon.jit
def _multiply(
    maps,
    pipe,
    staging,
    scales,
    tokens,
    PART: gl.constexpr,
    TILES: gl.constexpr,
    OUTPUTS: gl.constexpr,
    STEPS: gl.constexpr,
    GROUP: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A warpgroup: its part of each item. The first one also fetches."""
    x, weight, out = maps
    w_buffers, x_buffers, full, empty = pipe
    STAGES: gl.constexpr = x_buffers.shape[0]
    TOKENS: gl.constexpr = x_buffers.shape[1]
    DEPTH: gl.constexpr = x_buffers.shape[2]
    ROWS: gl.constexpr = 2 * OUTPUTS // _PARTS
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    programs = gl.num_programs(0)
    rounds = (tokens + TOKENS - 1) // TOKENS
    count = (rounds * TILES - gl.program_id(0) + programs - 1) // programs
    tile, nth = _find_tile(gl.program_id(0), TILES, rounds, GROUP)
    if PART == 0:
        for i in gl.static_range(STAGES):
            mbarrier.expect(full.index(i), (2 * OUTPUTS + TOKENS) * DEPTH * 2)
            _fetch_weights(weight, pipe, i, tile, i * DEPTH, OUTPUTS)
    wait_for_predecessor(OVERLAP)
    if PART == 0:
        for i in gl.static_range(STAGES):
            fetch_box(x, [nth * TOKENS, i * DEPTH], full.index(i), x_buffers.index(i))
    step = 0
    for turn in range(count):
        next_tile, next_nth = _find_tile(gl.program_id(0) + (turn + 1) * programs, TILES, rounds, GROUP)
        acc = gl.zeros([ROWS, TOKENS], gl.float32, A)
        for k in range(STEPS):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            rows = w_buffers.index(stage * _PARTS + PART).reshape([ROWS, DEPTH])
            columns = x_buffers.index(stage).permute((1, 0))
            product = warpgroup_mma(rows, columns, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[product])
            # The step before has ended.
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            if PART == 0:
                here = (tile, nth)
                there = (next_tile, next_nth)
                _refill(maps, pipe, step, k, here, there, turn + 1 < count, OUTPUTS, STEPS)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        if turn > 0:  # the results of the item before are still read from there
            tma.store_wait(0)
            barrier()
        _gate(acc, scales, nth * TOKENS, staging)
        fence_async_shared()
        barrier()
        store_box(out, [nth * TOKENS, tile * OUTPUTS + PART * (OUTPUTS // _PARTS)], staging)
        tile = next_tile
        nth = next_nth
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens"])
def _gated_hopper(
    x,
    weight,
    out,
    scales,
    tokens,
    TILES: gl.constexpr,
    OUTPUTS: gl.constexpr,
    STEPS: gl.constexpr,
    TOKENS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    let_next_start(OVERLAP)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    PART_0: gl.constexpr = 0
    PART_1: gl.constexpr = 1
    PART_2: gl.constexpr = 2
    w_buffers = gl.allocate_shared_memory(
        x.dtype, [STAGES * _PARTS, OUTPUTS // _PARTS // 8, 2, 8, DEPTH], gl.NVMMASharedLayout(128, 16, 4)
    )
    x_buffers = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, DEPTH], gl.NVMMASharedLayout(128, 16, 2))
    staging = gl.allocate_shared_memory(
        x.dtype, [_PARTS, TOKENS, OUTPUTS // _PARTS], gl.NVMMASharedLayout(64, 16, 2)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=_PARTS)
    maps = (x, weight, out)
    pipe = (w_buffers, x_buffers, full, empty)
    staged_0 = staging.index(0)
    staged_1 = staging.index(1)
    staged_2 = staging.index(2)
    gl.warp_specialize(
        [
            (
                _multiply,
                (maps, pipe, staged_0, scales, tokens, PART_0, TILES, OUTPUTS, STEPS, GROUP, OVERLAP),
            ),
            (
                _multiply,
                (maps, pipe, staged_1, scales, tokens, PART_1, TILES, OUTPUTS, STEPS, GROUP, OVERLAP),
            ),
            (
                _multiply,
                (maps, pipe, staged_2, scales, tokens, PART_2, TILES, OUTPUTS, STEPS, GROUP, OVERLAP),
            ),
        ],
        [4, 4],
        [168, 168],
    )


_launches: dict[Any, Launch] = {}


def gated_hopper(x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    """silu of x's product with the first half of `weight`, times its product with the second.

    x is dense [tokens, inputs], weight dense [2 * width, inputs] with gate's rows first, both bf16 or fp16;
    returns [tokens, width] in their dtype. With `eps`, both products are divided by the root mean square of
    their token in x. Safe inside CUDA graphs. Raises BadInput where shapes, dtypes and strides don't fit.
    """
    tokens, inputs = x.shape
    shape = weight.shape
    tile = tile_of(tokens)
    # The key holds all that `_check` looks at, so that only what was checked finds a launch.
    dense = x.is_contiguous(), weight.is_contiguous()
    key = (x.device, x.dtype, inputs, shape, weight.dtype, dense, tile, eps is None)
    launch = _launches.get(key)
    if launch is None:
        _check(x, weight)
        launch = _launches[key] = gated_launch(shape, tile, x.device)
    out = torch.empty(tokens, shape[0] // 2, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    rounds = -(-tokens // tile.tokens)
    items = rounds * launch.constants["TILES"]
    maps = (
        swizzled_map(x, tile.tokens, DEPTH),
        paired_map(weight, OUTPUTS // 3, DEPTH),
        swizzled_map(out, tile.tokens, OUTPUTS // 3),
    )
    scales = None if eps is None else rms_scales(x, eps, rounds * tile.tokens)
    launch(min(items, processors_of(x.device)), (*maps, scales), tokens)
    return out


def _check(x: Tensor, weight: Tensor) -> None:
    require(
        fits(x, weight),
        f"gated_hopper: x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} don't "
        "fit each other; both must be dense, of one 16-bit dtype and as many inputs: a multiple of 8, at "
        f"least {LEAST_INPUTS}; the outputs must be a multiple of 16",
    )


def gated_launch(shape: tuple[int, ...], tile: GatedTile, device: torch.device) -> Launch:
    """The launch of a product with a weight of this shape."""
    outputs, inputs = shape
    constants = {
        "TILES": tiles_of(outputs),
        "OUTPUTS": OUTPUTS,
        "STEPS": -(-inputs // DEPTH),
        "TOKENS": tile.tokens,
        "DEPTH": DEPTH,
        "STAGES": tile.stages,
        "GROUP": _GROUP,
    }
    return Launch(_gated_hopper, constants, device, num_warps=4)
