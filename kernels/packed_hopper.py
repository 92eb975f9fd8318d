"""Matrix products of few tokens with packed weights on Hopper GPUs, 12 bits per weight.

A step of few tokens takes as long as its weights take to be read. bf16 spends eight bits on an exponent
although nearly all weights of a row lie within 15 binades of the largest, so `packed_weight.py` stores four.
Here one warp fetches packed tiles of 64 outputs, two or three warpgroups make bf16 of one each in registers,
with three and a half instructions per pair, and multiply them with the same tokens, which are the tensor
cores' columns. `packed_cuts.py` says how a product is cut. Written in Gluon, Triton's lower level.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
from pagecast.kernels.capabilities import processors_of
from pagecast.kernels.hopper import fetch_box, let_next_start, wait_for_predecessor
from pagecast.kernels.launch import Launch, empty_product, require
from pagecast.kernels.packed_cuts import PackedCut
from pagecast.kernels.packed_weight import PackedWeight
from pagecast.kernels.tensor_map import packed_map, swizzled_map
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_ROWS = gl.constexpr(16)  # of a buffer, which a block's exponents take; its signs take twice as many
_FETCHER_REGISTERS = gl.constexpr(40)
# Of a thread, on average and of those that multiply, with two and with three warpgroups.
_REGISTERS = {2: 160, 3: 128}
_TWO_PARTS_REGISTERS = gl.constexpr(200)
_THREE_PARTS_REGISTERS = gl.constexpr(152)


@gluon.jit
def _widen(low, high, exponents):
    """Four bf16 tensors from signs and mantissas of two each, and the exponents of all."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 e, f;
        shl.b32 e, $6, 7;
        lop3.b32 e, e, 0x07800780, 0x38003800, 0xEA;
        lop3.b32 $0, $4, 0x807F807F, e, 0xEA;
        shl.b32 e, $6, 3;
        lop3.b32 e, e, 0x07800780, 0x38003800, 0xEA;
        prmt.b32 f, $4, 0, 0x2301;
        lop3.b32 $1, f, 0x807F807F, e, 0xEA;
        shr.u32 e, $6, 1;
        lop3.b32 e, e, 0x07800780, 0x38003800, 0xEA;
        lop3.b32 $2, $5, 0x807F807F, e, 0xEA;
        shr.u32 e, $6, 5;
        lop3.b32 e, e, 0x07800780, 0x38003800, 0xEA;
        prmt.b32 f, $5, 0, 0x2301;
        lop3.b32 $3, f, 0x807F807F, e, 0xEA;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [low, high, exponents],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _load(signs, exponents, block: gl.constexpr):
    """Block number `block` of 64 inputs of a tile, packed: two tensors of signs and one of exponents."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    low = signs.slice(2 * block * _ROWS, _ROWS).load(L)
    high = signs.slice((2 * block + 1) * _ROWS, _ROWS).load(L)
    codes = exponents.slice(block * _ROWS, _ROWS).load(L)
    return low, high, codes


@gluon.jit
def _weights(low, high, codes, A: gl.constexpr):
    """What `_load` has read as bf16 [64, 64], as the tensor cores take it from registers."""
    first, second, third, fourth = _widen(low, high, codes)
    all_four = gl.join(gl.join(first, third), gl.join(second, fourth))
    # warp, group, lane, half of inputs, half of outputs, number of the pair, quarter
    parts = all_four.reshape([4, 8, 4, 2, 2, 2, 4]).permute((0, 4, 1, 6, 3, 2, 5))
    return gl.convert_layout(parts.reshape([64, 64]), gl.DotOperandLayout(0, A, 2), assert_trivial=True)


@gluon.jit
def _find_item(item, tokens, TILES: gl.constexpr, WIDTH: gl.constexpr):
    """Item number `item`: its split of the inputs, its tile of outputs, and its first of WIDTH tokens.

    Neighbours share weights.
    """
    rounds = (tokens + WIDTH - 1) // WIDTH
    place = item // rounds
    return place // TILES, place % TILES, item % rounds * WIDTH


@gluon.jit
def _count_items(tokens, TILES: gl.constexpr, WIDTH: gl.constexpr, SPLITS: gl.constexpr):
    """Items of this program: of n programs, each n-th from its own number on."""
    items = (tokens + WIDTH - 1) // WIDTH * TILES * SPLITS
    return (items - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _fetch_weights(maps, pipe, stage, tile, at, PARTS: gl.constexpr):
    """Queues the copy of a tile's weights for the inputs from `at` on."""
    _x, _x_rest, signs, exponents = maps
    sign_buffers, exponent_buffers, _tokens, _rest, full, _empty = pipe
    for part in gl.static_range(PARTS):
        subtile = tile * PARTS + part
        buffer = stage * PARTS + part
        fetch_box(signs, [subtile, at // 2, 0], full.index(stage), sign_buffers.index(buffer))
        fetch_box(exponents, [subtile, at // 4, 0], full.index(stage), exponent_buffers.index(buffer))


@gluon.jit
def _fetch_tokens(maps, pipe, stage, token, at, REST: gl.constexpr):
    """Queues the copy of an item's tokens, and of the rest of them where there is one."""
    x, x_rest, _signs, _exponents = maps
    _sign_buffers, _exponent_buffers, buffers, rest_buffers, full, _empty = pipe
    fetch_box(x, [token, at], full.index(stage), buffers.index(stage))
    if REST:
        fetch_box(x_rest, [token + buffers.shape[1], at], full.index(stage), rest_buffers.index(stage))


@gluon.jit
def _fetch(maps, pipe, tokens, SIZES: gl.constexpr, OVERLAP: gl.constexpr):
    """The warp that fetches: weights for all buffers before the predecessor ends, then what becomes free."""
    TILES: gl.constexpr = SIZES[0]
    PARTS: gl.constexpr = SIZES[1]
    SPLITS: gl.constexpr = SIZES[2]
    STEPS: gl.constexpr = SIZES[3]
    REST: gl.constexpr = SIZES[4]
    _sign_buffers, _exponent_buffers, buffers, _rest_buffers, full, empty = pipe
    STAGES: gl.constexpr = buffers.shape[0]
    DEPTH: gl.constexpr = buffers.shape[2]
    BYTES: gl.constexpr = (PARTS * 64 * 3 // 2 + (buffers.shape[1] + REST) * 2) * DEPTH
    WIDTH: gl.constexpr = buffers.shape[1] + REST
    steps = _count_items(tokens, TILES, WIDTH, SPLITS) * STEPS
    split, tile, token = _find_item(gl.program_id(0), tokens, TILES, WIDTH)
    first = split * (STEPS * DEPTH)
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), BYTES)
        _fetch_weights(maps, pipe, i, tile, first + i * DEPTH, PARTS)
    wait_for_predecessor(OVERLAP)
    for i in gl.static_range(STAGES):
        _fetch_tokens(maps, pipe, i, token, first + i * DEPTH, REST)
    for step in range(STAGES, steps):
        stage = step % STAGES
        item = gl.program_id(0) + step // STEPS * gl.num_programs(0)
        split, tile, token = _find_item(item, tokens, TILES, WIDTH)
        at = (split * STEPS + step % STEPS) * DEPTH
        mbarrier.wait(empty.index(stage), (step // STAGES - 1) & 1)
        mbarrier.expect(full.index(stage), BYTES)
        _fetch_weights(maps, pipe, stage, tile, at, PARTS)
        _fetch_tokens(maps, pipe, stage, token, at, REST)


@gluon.jit
def _store(out, acc, scales, row, token, tokens, OUTPUTS: gl.constexpr, GATED: gl.constexpr):
    """Writes a tile `acc` [64, tokens], whose first row is number `row`, to out [tokens, outputs].

    Gated: silu(gate) * up, where the tile's rows are eight of the gate's and eight of the up projection's in
    turn.
    """
    COLUMNS: gl.constexpr = acc.shape[1]
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    acc = acc * gl.load(scales + rows, mask=rows < OUTPUTS, other=0.0)[:, None]
    if GATED:
        gate, up = gl.split(acc.reshape([4, 2, 8, COLUMNS]).permute((0, 2, 3, 1)))
        acc = (gate / (1.0 + gl.exp(-gate)) * up).reshape([32, COLUMNS])
    result = acc.to(out.dtype.element_ty).permute((1, 0))
    WIDTH: gl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    EACH: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    ACROSS: gl.constexpr = result.shape[1] // EACH
    L: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    result = gl.convert_layout(result, L)
    place = token + gl.arange(0, COLUMNS, gl.SliceLayout(1, L))
    lane = (row // 2 if GATED else row) + gl.arange(0, result.shape[1], gl.SliceLayout(0, L))
    at = out + place.to(gl.int64)[:, None] * WIDTH + lane[None, :]
    gl.store(at, result, mask=(place < tokens)[:, None] & (lane < WIDTH)[None, :])


@gluon.jit
def _multiply(
    results,
    pipe,
    tokens,
    PART: gl.constexpr,
    SIZES: gl.constexpr,
    OUTPUTS: gl.constexpr,
    GATED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A warpgroup: its 64 rows of each item."""
    out, scales = results
    TILES: gl.constexpr = SIZES[0]
    PARTS: gl.constexpr = SIZES[1]
    SPLITS: gl.constexpr = SIZES[2]
    STEPS: gl.constexpr = SIZES[3]
    REST: gl.constexpr = SIZES[4]
    sign_buffers, exponent_buffers, buffers, rest_buffers, full, empty = pipe
    STAGES: gl.constexpr = buffers.shape[0]
    TOKENS: gl.constexpr = buffers.shape[1]
    BLOCKS: gl.constexpr = buffers.shape[2] // 64
    WIDTH: gl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16]) if REST else A
    wait_for_predecessor(OVERLAP)
    step = 0
    for turn in range(_count_items(tokens, TILES, TOKENS + REST, SPLITS)):
        acc = gl.zeros([64, TOKENS], gl.float32, A)
        rest = acc  # unused without a rest
        if REST:
            rest = gl.zeros([64, REST], gl.float32, R)
        for _ in range(STEPS):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            for block in gl.static_range(BLOCKS):
                signs = sign_buffers.index(stage * PARTS + PART).reshape([2 * BLOCKS * _ROWS, 64])
                exponents = exponent_buffers.index(stage * PARTS + PART).reshape([BLOCKS * _ROWS, 64])
                low, high, codes = _load(signs, exponents, block)
                weights = _weights(low, high, codes, A)
                columns = buffers.index(stage).slice(block * 64, 64, 1).permute((1, 0))
                product = warpgroup_mma(weights, columns, acc, is_async=True)
                if REST:
                    others = rest_buffers.index(stage).slice(block * 64, 64, 1).permute((1, 0))
                    same = gl.convert_layout(weights, gl.DotOperandLayout(0, R, 2), assert_trivial=True)
                    rest_product = warpgroup_mma(same, others, rest, is_async=True)
                    acc, rest = warpgroup_mma_wait(0, deps=[product, rest_product])
                else:
                    acc = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(stage), count=1)
            step += 1
        item = gl.program_id(0) + turn * gl.num_programs(0)
        split, tile, token = _find_item(item, tokens, TILES, TOKENS + REST)
        target = out + split.to(gl.int64) * tokens * WIDTH
        row = (tile * PARTS + PART) * 64
        if REST:
            _store(target, rest, scales, row, token + TOKENS, tokens, OUTPUTS, GATED)
        _store(target, acc, scales, row, token, tokens, OUTPUTS, GATED)


@gluon.jit(do_not_specialize=["tokens"])
def _packed_hopper(
    x,
    x_rest,
    signs,
    exponents,
    scales,
    out,
    tokens,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    PARTS: gl.constexpr,
    TOKENS: gl.constexpr,
    REST: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPTH: gl.constexpr,
    GATED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    let_next_start(OVERLAP)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PACKED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    STEPS: gl.constexpr = INPUTS // DEPTH // SPLITS
    TILES: gl.constexpr = (OUTPUTS // 64 + PARTS - 1) // PARTS
    PART_0: gl.constexpr = 0
    PART_1: gl.constexpr = 1
    PART_2: gl.constexpr = 2
    sign_buffers = gl.allocate_shared_memory(gl.int16, [STAGES * PARTS, 1, DEPTH // 2, 64], PACKED)
    exponent_buffers = gl.allocate_shared_memory(gl.int16, [STAGES * PARTS, 1, DEPTH // 4, 64], PACKED)
    buffers = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, DEPTH], SHARED)
    rest_buffers = buffers  # unused without a rest
    if REST:
        rest_buffers = gl.allocate_shared_memory(x.dtype, [STAGES, REST, DEPTH], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    maps = (x, x_rest, signs, exponents)
    pipe = (sign_buffers, exponent_buffers, buffers, rest_buffers, full, empty)
    results = (out, scales)
    SIZES: gl.constexpr = (TILES, PARTS, SPLITS, STEPS, REST)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_multiply, (results, pipe, tokens, PART_0, SIZES, OUTPUTS, GATED, OVERLAP)),
                (_multiply, (results, pipe, tokens, PART_1, SIZES, OUTPUTS, GATED, OVERLAP)),
                (_fetch, (maps, pipe, tokens, SIZES, OVERLAP)),
            ],
            [4, 1],
            [_TWO_PARTS_REGISTERS, _FETCHER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (results, pipe, tokens, PART_0, SIZES, OUTPUTS, GATED, OVERLAP)),
                (_multiply, (results, pipe, tokens, PART_1, SIZES, OUTPUTS, GATED, OVERLAP)),
                (_multiply, (results, pipe, tokens, PART_2, SIZES, OUTPUTS, GATED, OVERLAP)),
                (_fetch, (maps, pipe, tokens, SIZES, OVERLAP)),
            ],
            [4, 4, 1],
            [_THREE_PARTS_REGISTERS, _THREE_PARTS_REGISTERS, _FETCHER_REGISTERS],
        )


_launches: dict[Any, Launch] = {}


def packed_hopper(x: Tensor, weight: PackedWeight, cut: PackedCut) -> Tensor:
    """Dense bf16 x [tokens, inputs] times the transposed packed `weight` [outputs, inputs].

    Returns [tokens, outputs] in bf16. Where the weight was packed `gated`: silu of the first half of the
    outputs times the second, [tokens, outputs / 2]. With `cut.splits` > 1: addends, fp32 [splits, tokens,
    outputs]. Safe inside CUDA graphs. Raises BadInput where shapes, dtypes, strides and the cut don't fit.
    """
    tokens, inputs = x.shape
    # The key holds all that `_check` looks at, so that only what was checked finds a launch.
    key = (x.device, x.dtype, inputs, weight.shape, x.is_contiguous(), cut, weight.gated)
    launch = _launches.get(key)
    if launch is None:
        _check(x, weight, cut)
        launch = _launches[key] = packed_launch(weight.shape, cut, weight.gated, x.device)
    outputs = weight.shape[0]
    width = outputs // 2 if weight.gated else outputs
    out = empty_product(x, width, cut.splits)
    if not tokens:
        return out
    maps = (
        swizzled_map(x, cut.tokens, cut.depth),
        swizzled_map(x, cut.rest, cut.depth) if cut.rest else None,
        packed_map(weight.signs, cut.depth // 2),
        packed_map(weight.exponents, cut.depth // 4),
    )
    programs = min(cut.items(outputs, tokens), processors_of(x.device))
    launch(programs, (*maps, weight.scales, out), tokens)
    return out


def _check(x: Tensor, weight: PackedWeight, cut: PackedCut) -> None:
    require(
        weight.shape[1] == x.shape[1]
        and cut.divides(weight.shape[1])
        and x.dtype == torch.bfloat16
        and x.is_contiguous()
        and not (weight.gated and cut.splits > 1),
        f"packed_hopper: x {tuple(x.shape)} {x.dtype} and a packed weight {weight.shape} don't fit each "
        f"other or {cut}; x must be dense bf16 with as many inputs, and a gated product can't be split",
    )


def packed_launch(shape: tuple[int, int], cut: PackedCut, gated: bool, device: torch.device) -> Launch:
    """The launch of a product with a packed weight of this shape."""
    outputs, inputs = shape
    constants = {
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "PARTS": cut.parts,
        "TOKENS": cut.tokens,
        "REST": cut.rest,
        "SPLITS": cut.splits,
        "STAGES": cut.stages,
        "DEPTH": cut.depth,
        "GATED": gated,
    }
    return Launch(_packed_hopper, constants, device, num_warps=4, maxnreg=_REGISTERS[cut.parts])
