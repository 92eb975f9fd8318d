"""The prefill kernel for Hopper GPUs: warps that fetch, warps that multiply, softmax beside the products.

One warp fetches K and V, a page at a time, by the tensor memory accelerator into shared memory; two or three
warpgroups of 64 rows each multiply. They take turns: one computes its softmax while the others' products
run (the schedule of FlashAttention-3, Shah et al. 2024). Written in Gluon, Triton's lower level; `usable`
says where it applies, and `paged_prefill` has the plain kernel for everywhere else.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from dataclasses import dataclass
from typing import Any

import torch
from pagecast.kernels.hopper import barrier, fetch_tile, zero_tail
from pagecast.kernels.launch import Launch, next_power_of_2
from pagecast.kernels.prefill_plan import SHORT_KEYS
from pagecast.kernels.tensor_map import TensorMaps, box_rows, row_strides
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Turns are taken at the hardware's barriers from this one on, one for each warpgroup; Triton counts its own
# from 0. Unlike an arrival at a barrier in memory, giving a turn doesn't first gather the warpgroup. 256
# threads meet at each: the warpgroup that gives the turn and the one that takes it. The last turn that is
# given is never taken.
TURNS = gl.constexpr(12)

# A name that changed between Triton 3.6 and 3.9.
_fetch_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _share(items):
    """How many pieces of work this program has."""
    return (items - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _where(turn, items, KV_HEADS: gl.constexpr, SIDE: gl.constexpr):
    """This program's piece of work number `turn`: its place in the plan, and its KV head.

    Pieces go round the programs, to and fro: they grow shorter, so that the first program would always have
    the longest. Where there is much work, only SIDE heads are under way at once: their K and V stay in the
    L2 cache.
    """
    programs = gl.num_programs(0)
    item = turn * programs + gl.program_id(0)
    if SIDE == KV_HEADS:
        back = gl.minimum((turn + 1) * programs, items) - 1 - gl.program_id(0)
        item = gl.where(turn % 2 == 1, back, item)
        return item // KV_HEADS, item % KV_HEADS
    else:
        number = items // KV_HEADS
        much = number * SIDE >= 2 * programs
        together = gl.where(much, number * SIDE, items)
        part = item // together
        nth = item - part * together
        through = nth // programs
        back = gl.minimum((through + 1) * programs, together) - 1 - (nth - through * programs)
        nth = gl.where((through + part) % 2 == 1, back, nth)
        head = gl.where(much, part * SIDE + nth % SIDE, nth % KV_HEADS)
        return gl.where(much, nth // SIDE, nth // KV_HEADS), head


@gluon.jit
def _item(tiles, nth, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """A piece of the plan: sequence, first row of q, rows, position of the first, first KV tile, end."""
    entry = tiles + 8 * nth
    sequence, row = gl.load(entry), gl.load(entry + 1)
    count, position = gl.load(entry + 2), gl.load(entry + 3)
    first = gl.load(entry + 4) // TILE
    if WINDOW > 0:
        first = gl.maximum(position - WINDOW + 1, 0) // TILE
    return sequence, row, count, position, first, gl.load(entry + 5)


@gluon.jit
def _produce(
    pipe,
    pages,
    KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    K_ROWS: gl.constexpr,
    V_ROWS: gl.constexpr,
    BOX: gl.constexpr,
    WINDOW: gl.constexpr,
    SIDE: gl.constexpr,
):
    """The warp that fetches: the KV tiles of each item, last to first, as buffers fall free."""
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = pipe
    k_cache, v_cache, table, table_stride, tiles, items = pages
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    step = 0
    for turn in range(_share(items)):
        nth, head = _where(turn, items, KV_HEADS, SIDE)
        sequence, _row, _count, _position, first, length = _item(tiles, nth, TILE, WINDOW)
        last = (length + TILE - 1) // TILE
        row = table + sequence.to(gl.int64) * table_stride
        last_page = (length - 1) // BLOCK_SIZE
        for i in range(last - first):
            start = (last - 1 - i) * TILE
            stage = step % STAGES
            free = (step // STAGES + 1) & 1
            mbarrier.wait(k_empty.index(stage), free)
            full, buffer = k_full.index(stage), k_buffers.index(stage)
            fetch_tile(k_cache, row, start, last_page, head, full, buffer, BLOCK_SIZE, K_ROWS, BOX)
            mbarrier.wait(v_empty.index(stage), free)
            full, buffer = v_full.index(stage), v_buffers.index(stage)
            fetch_tile(v_cache, row, start, last_page, head, full, buffer, BLOCK_SIZE, V_ROWS, BOX)
            step += 1


@gluon.jit
def _take_turn(PART: gl.constexpr):
    """Waits until the warpgroup before number PART has queued its products."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.b32 $0, 0;", "=r,r", [TURNS + PART], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _give_turn(PART: gl.constexpr):
    """Lets warpgroup number PART queue its products. Doesn't wait."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.b32 $0, 0;", "=r,r", [TURNS + PART], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _queue_scores(q, pipe, step, PART: gl.constexpr, TAIL: gl.constexpr):
    """Starts q k^T of a step's tile when it is there and it is this warpgroup's turn."""
    k_buffers, _v_buffers, k_full, _k_empty, _v_full, _v_empty = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    ROWS: gl.constexpr = q.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    stage = step % STAGES
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    _take_turn(PART)
    k = k_buffers.index(stage)
    s = gl.zeros([ROWS, TILE], gl.float32, S)
    if TAIL:  # without the columns beyond, which are zero in q
        q_head, k_head = q.slice(0, 64, 1), k.slice(0, 64, 1)
        q_tail, k_tail = q.slice(64, TAIL, 1), k.slice(64, TAIL, 1)
        s = warpgroup_mma(q_head, k_head.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_tail, k_tail.permute((1, 0)), s, is_async=True)
    else:
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    return s


@gluon.jit
def _pack(weights, DTYPE: gl.constexpr):
    """Weights rounded, in pairs: int32 [ROWS, TILE / 2].

    Carried round the loop as numbers of 16 bits, each would take a register of its own.
    """
    ROWS: gl.constexpr = weights.shape[0]
    TILE: gl.constexpr = weights.shape[1]
    ROUND: gl.constexpr = "cvt.rn.bf16x2.f32" if DTYPE.is_bf16() else "cvt.rn.f16x2.f32"
    low, high = gl.split(weights.reshape([ROWS, TILE // 2, 2]))
    return gl.inline_asm_elementwise(
        ROUND + " $0, $1, $2;", "=r,f,f", [high, low], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpack(pairs, DTYPE: gl.constexpr):
    """What `_pack` was given, rounded."""
    low = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.join(low, high).reshape([pairs.shape[0], 2 * pairs.shape[1]])


@gluon.jit
def _accumulate(weights, v, acc):
    """Starts the product of weights with V on top of the output so far."""
    p = gl.convert_layout(weights, gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _rescale(acc, fade):
    return acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def _queue_output(q, pipe, step, pairs, acc, rest, TAIL: gl.constexpr):
    """Starts the products of a step's weights with V: with all columns, or with 64 and with the TAIL beyond,
    into `acc` and `rest`."""
    _k_buffers, v_buffers, _k_full, _k_empty, v_full, _v_empty = pipe
    STAGES: gl.constexpr = v_buffers.shape[0]
    weights = _unpack(pairs, q.dtype)
    stage = step % STAGES
    mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
    v = v_buffers.index(stage)
    if TAIL:
        acc = _accumulate(weights, v.slice(0, 64, 1), acc)
        rest = _accumulate(weights, v.slice(64, TAIL, 1), rest)
    else:
        acc = _accumulate(weights, v, acc)
    return acc, rest


@gluon.jit
def _hide(s, start, positions, WINDOW: gl.constexpr):
    """Scores of tokens that a row must not see become -inf."""
    S: gl.constexpr = s.type.layout
    token = gl.arange(0, s.shape[1], gl.SliceLayout(0, S))[None, :]
    newest = (positions - start)[:, None]
    seen = token <= newest
    if WINDOW > 0:
        seen = seen & (token > newest - WINDOW)
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def _thread_sums(weights):
    """A row's sums in each of the four threads that share it."""
    ROWS: gl.constexpr = weights.shape[0]
    TILE: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([ROWS, TILE // 8, 4, 2]), 3), 1)


@gluon.jit
def _softmax(s, scale, m, total, EDGE: gl.constexpr):
    """A step of the online softmax: weights, what the output must be scaled by, max and sum.

    Sums stay in the form of `_thread_sums`; whoever needs them adds up the four.
    """
    new_m = gl.maximum(m, gl.max(s, 1))
    base = new_m * scale
    if EDGE:  # a row may have seen nothing yet
        base = gl.where(new_m == -float("inf"), 0.0, base)
    weights = gl.exp2(s * scale - base[:, None])
    fade = gl.exp2(m * scale - base)
    sums = _thread_sums(weights)
    T: gl.constexpr = sums.type.layout
    total = gl.convert_layout(total, T, assert_trivial=True)
    total *= gl.convert_layout(fade, gl.SliceLayout(1, T), assert_trivial=True)[:, None]
    return weights, fade, new_m, total + sums


@gluon.jit
def _steps(
    q,
    pipe,
    begin,
    end,
    step,
    positions,
    scale,
    state,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    TAIL: gl.constexpr,
    WINDOW: gl.constexpr,
    EDGE: gl.constexpr,
):
    """The KV tiles begin - 1 down to end: scores, the previous tile's product with V, then the softmax.

    ptxas moves the wait for the product to where the softmax has its first maxima. Rounding and rescaling
    come after the wait and fill the gaps between exponentials; nothing stands between the products.
    """
    k_buffers, _v_buffers, _k_full, k_empty, _v_full, v_empty = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    pairs, m, total, acc, rest = state
    for i in range(begin - end):
        s = _queue_scores(q, pipe, step, PART, TAIL)
        product, rest_product = _queue_output(q, pipe, step - 1, pairs, acc, rest, TAIL)
        _give_turn((PART + 1) % PARTS)
        s = warpgroup_mma_wait(2 if TAIL else 1, deps=[s])
        mbarrier.arrive(k_empty.index(step % STAGES), count=1)
        if EDGE:
            s = _hide(s, (begin - 1 - i) * TILE, positions, WINDOW)
        weights, fade, m, total = _softmax(s, scale, m, total, EDGE)
        if TAIL:
            acc, rest = warpgroup_mma_wait(0, deps=[product, rest_product])
            rest = _rescale(rest, fade)
        else:
            acc = warpgroup_mma_wait(0, deps=[product])
        acc = _rescale(acc, fade)
        pairs = _pack(weights, q.dtype)
        mbarrier.arrive(v_empty.index((step - 1) % STAGES), count=1)
        step += 1
    return step, (pairs, m, total, acc, rest)


@gluon.jit
def _place(lane, row, count, head, STRIDES: gl.constexpr, GROUP: gl.constexpr):
    """Offsets of the rows of q or of the output; lanes past the last row repeat its token."""
    token = (row + gl.minimum(lane // GROUP, count - 1)).to(gl.int64)
    return token * STRIDES[0] + (head * GROUP + lane % GROUP) * STRIDES[1]


@gluon.jit
def _fetch_q(
    q,
    tiles,
    turn,
    items,
    buffer,
    lane,
    dims,
    Q: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
    WINDOW: gl.constexpr,
    SIDE: gl.constexpr,
):
    """Starts to copy the queries of a turn's item, if there is one."""
    if turn < _share(items):
        nth, head = _where(turn, items, KV_HEADS, SIDE)
        _sequence, row, count, _position, _first, _length = _item(tiles, nth, TILE, WINDOW)
        at = _place(lane, row, count, head, Q, GROUP)
        pointers = q + at[:, None] + dims[None, :]
        if buffer.shape[1] == DIM:
            _fetch_rows(buffer, pointers)
        else:
            _fetch_rows(buffer, pointers, mask=(lane >= 0)[:, None] & (dims < DIM)[None, :])
    async_copy.commit_group()


@gluon.jit
def _attend(
    q,
    pipe,
    position,
    length,
    positions,
    first,
    step,
    scale,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    TAIL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Everything but the last product with V of an item whose queries lie in `q`."""
    k_buffers, v_buffers, _k_full, k_empty, v_full, _v_empty = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    ROWS: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    R: gl.constexpr = positions.type.layout
    COLUMNS: gl.constexpr = 64 if TAIL else WIDTH
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    last = (length + TILE - 1) // TILE
    s = _queue_scores(q, pipe, step, PART, TAIL)
    _give_turn((PART + 1) % PARTS)
    s = warpgroup_mma_wait(0, deps=[s])
    stage = step % STAGES
    mbarrier.arrive(k_empty.index(stage), count=1)
    # Of the last tile, the diagonal or the sequence's end may hide some.
    s = _hide(s, (last - 1) * TILE, positions, WINDOW)
    nothing = gl.full([ROWS], -float("inf"), gl.float32, R)
    no_sums = _thread_sums(gl.zeros_like(s))
    weights, _fade, m, total = _softmax(s, scale, nothing, no_sums, True)
    if length % TILE != 0:
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        zero_tail(v_buffers.index(stage), (last - 1) * TILE, length)
    edge = gl.minimum(gl.maximum((position + 1) // TILE, first), last - 1)
    whole = first
    if WINDOW > 0:
        whole = gl.minimum(edge, (gl.maximum(length - WINDOW, 0) + TILE - 1) // TILE)
    rest = m  # unused without a tail
    if TAIL:
        T: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
        rest = gl.zeros([ROWS, TAIL], gl.float32, T)
    state = (_pack(weights, q.dtype), m, total, gl.zeros([ROWS, COLUMNS], gl.float32, A), rest)
    step, state = _steps(
        q, pipe, last - 1, edge, step + 1, positions, scale, state, PART, PARTS, TAIL, WINDOW, True
    )
    step, state = _steps(
        q, pipe, edge, whole, step, positions, scale, state, PART, PARTS, TAIL, WINDOW, False
    )
    if WINDOW > 0:
        step, state = _steps(
            q, pipe, whole, first, step, positions, scale, state, PART, PARTS, TAIL, WINDOW, True
        )
    return step, state


@gluon.jit
def _leave(parts, slot, acc, total, rows, WIDTH: gl.constexpr, FIRST: gl.constexpr):
    """Writes columns from FIRST on of a warpgroup's `rows` first rows of a piece to its part of a slot."""
    ROWS: gl.constexpr = acc.shape[0]
    A: gl.constexpr = acc.type.layout
    inverse = gl.where(total > 0, 1.0 / total, 0.0)  # a row may have seen nothing of the piece
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, A))[:, None]
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, A))
    dims = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, A))
    at = (slot * ROWS + lane)[:, None] * WIDTH + dims[None, :]
    gl.store(parts + at, acc, mask=(lane < rows)[:, None] & (dims >= 0)[None, :])


@gluon.jit
def _leave_sums(sums, slot, m, total, rows):
    """Writes the logarithms of what `_leave` divides by."""
    ROWS: gl.constexpr = total.shape[0]
    lane = gl.arange(0, ROWS, total.type.layout)
    value = gl.where(total > 0, m + gl.log2(total), -float("inf"))
    gl.store(sums + slot * ROWS + lane, value, mask=lane < rows)


@gluon.jit
def _store(
    out,
    acc,
    total,
    row,
    count,
    head,
    PART: gl.constexpr,
    FIRST: gl.constexpr,
    OUT: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
):
    """Writes columns from FIRST on of a warpgroup's rows of the output."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    A: gl.constexpr = acc.type.layout
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    result = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, A))[:, None]
    result = gl.convert_layout(result.to(out.dtype.element_ty), L)
    lane = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    dims = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    at = _place(lane, row, count, head, OUT, GROUP)
    mask = (lane < count * GROUP)[:, None] & (dims < DIM)[None, :]
    gl.store(out + at[:, None] + dims[None, :] * OUT[2], result, mask=mask)


@gluon.jit
def _consume(
    pipe,
    buffer,
    work,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    Q: gl.constexpr,
    OUT: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    TAIL: gl.constexpr,
    WINDOW: gl.constexpr,
    SIDE: gl.constexpr,
):
    """A warpgroup that multiplies: its part of each item's rows, the next item's queries fetched ahead."""
    q, out, tiles, items, parts, sums, scale = work
    k_buffers, _v_buffers, _k_full, _k_empty, _v_full, v_empty = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    ROWS: gl.constexpr = buffer.shape[0]
    WIDTH: gl.constexpr = buffer.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    lane = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    if DIM != WIDTH:  # what lies past a head in K then counts for nothing
        buffer.store(gl.zeros([ROWS, WIDTH], buffer.dtype, L))
    nth = (PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP
    _fetch_q(q, tiles, 0, items, buffer, lane, dims, Q, KV_HEADS, GROUP, DIM, TILE, WINDOW, SIDE)
    if PARTS == PART + 1:
        _give_turn(0)
    step = 0
    for turn in range(_share(items)):
        entry, head = _where(turn, items, KV_HEADS, SIDE)
        _sequence, row, count, position, first, length = _item(tiles, entry, TILE, WINDOW)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        positions = position + gl.minimum(nth, count - 1)
        step, state = _attend(
            buffer, pipe, position, length, positions, first, step, scale, PART, PARTS, TAIL, WINDOW
        )
        pairs, m, total, acc, rest = state
        total = gl.convert_layout(gl.sum(total, 1), m.type.layout)
        _fetch_q(q, tiles, turn + 1, items, buffer, lane, dims, Q, KV_HEADS, GROUP, DIM, TILE, WINDOW, SIDE)
        acc, rest = _queue_output(buffer, pipe, step - 1, pairs, acc, rest, TAIL)
        if TAIL:
            acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index((step - 1) % STAGES), count=1)
        slot = -1
        if parts is not None:
            slot = gl.load(tiles + 8 * entry + 6)
        if slot < 0:
            _store(out, acc, total, row, count, head, PART, 0, OUT, GROUP, DIM)
            if TAIL:
                _store(out, rest, total, row, count, head, PART, 64, OUT, GROUP, DIM)
        elif parts is not None:
            slot = (slot * KV_HEADS + head) * PARTS + PART
            rows = count * GROUP - PART * ROWS
            _leave_sums(sums, slot, m * scale, total, rows)
            _leave(parts, slot, acc, total, rows, WIDTH, 0)
            if TAIL:
                _leave(parts, slot, rest, total, rows, WIDTH, 64)


@gluon.jit(do_not_specialize=["table_stride", "scale"])
def _prefill_hopper(
    q,
    out,
    table,
    tiles,
    k_cache,
    v_cache,
    parts,
    sums,
    table_stride,
    scale,
    Q: gl.constexpr,
    OUT: gl.constexpr,
    K_ROWS: gl.constexpr,
    V_ROWS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    WINDOW: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    TAIL: gl.constexpr,
    SIDE: gl.constexpr,
):
    DTYPE: gl.constexpr = q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    items = gl.load(tiles) * KV_HEADS
    tiles += 8
    PART_0: gl.constexpr = 0
    PART_1: gl.constexpr = 1
    PART_2: gl.constexpr = 2
    q_0 = gl.allocate_shared_memory(DTYPE, [64, WIDTH], SHARED)
    q_1 = gl.allocate_shared_memory(DTYPE, [64, WIDTH], SHARED)
    k_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, WIDTH], SHARED)
    v_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, WIDTH], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=PARTS)
        mbarrier.init(v_empty.index(i), count=PARTS)
    pipe = (k_buffers, v_buffers, k_full, k_empty, v_full, v_empty)
    work = (q, out, tiles, items, parts, sums, scale)
    pages = (k_cache, v_cache, table, table_stride, tiles, items)
    if PARTS == 3:
        q_2 = gl.allocate_shared_memory(DTYPE, [64, WIDTH], SHARED)
        gl.warp_specialize(
            [
                (
                    _consume,
                    (pipe, q_0, work, PART_0, PARTS, Q, OUT, KV_HEADS, GROUP, DIM, TAIL, WINDOW, SIDE),
                ),
                (
                    _consume,
                    (pipe, q_1, work, PART_1, PARTS, Q, OUT, KV_HEADS, GROUP, DIM, TAIL, WINDOW, SIDE),
                ),
                (
                    _consume,
                    (pipe, q_2, work, PART_2, PARTS, Q, OUT, KV_HEADS, GROUP, DIM, TAIL, WINDOW, SIDE),
                ),
                (_produce, (pipe, pages, KV_HEADS, BLOCK_SIZE, K_ROWS, V_ROWS, BOX, WINDOW, SIDE)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (pipe, q_0, work, PART_0, PARTS, Q, OUT, KV_HEADS, GROUP, DIM, TAIL, WINDOW, SIDE),
                ),
                (
                    _consume,
                    (pipe, q_1, work, PART_1, PARTS, Q, OUT, KV_HEADS, GROUP, DIM, TAIL, WINDOW, SIDE),
                ),
                (_produce, (pipe, pages, KV_HEADS, BLOCK_SIZE, K_ROWS, V_ROWS, BOX, WINDOW, SIDE)),
            ],
            [4, 1],
            [240, 24],
        )


@dataclass(frozen=True, slots=True)
class HopperCut:
    """How an item is computed: `warpgroups` of 64 rows multiply, KV tiles have `tile` tokens, and `stages` of
    K and of V are under way.

    `tail`: columns of a head beyond its 64th, multiplied apart; 0: all together, up to a power of two.
    `side`: KV heads that are under way at once where there is much work; 0: all.
    """

    warpgroups: int
    tile: int
    stages: int
    tail: int = 0
    side: int = 0


def rows_of(head_dim: int) -> int:
    """Rows of a tile of the plan: 64 for each warpgroup that multiplies."""
    return 64 * cut_of(head_dim, None).warpgroups


def cut_of(head_dim: int, longest: int | None) -> HopperCut:
    """The fastest on an H200; `longest` as for `paged_prefill`, on which the warpgroups don't depend.

    At head dimension 256 no more stages fit beside the queries. Three warpgroups leave 160 registers to a
    thread of each.
    """
    short = longest is not None and longest <= SHORT_KEYS
    if head_dim > 128:
        return HopperCut(2, 64, 2)
    if head_dim <= 64:
        return HopperCut(3, 64, 6) if short else HopperCut(3, 128, 3)
    if head_dim < 128:
        return HopperCut(3, 64, 3, tail=head_dim - 64)
    return HopperCut(2, 64, 3) if short else HopperCut(2, 128, 2, side=2)


def usable(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """True where this kernel can stand in for the plain one."""
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k_cache.dtype
        and q.shape[2] in (64, 80, 96, 128, 192, 256)
        and q.shape[1] // k_cache.shape[2] <= 128
        and q.stride(2) == 1
        and q.stride(0) % 8 == q.stride(1) % 8 == q.data_ptr() % 16 == 0
        and k_cache.shape[1] % 16 == 0
        and row_strides(k_cache) is not None
        and row_strides(v_cache) is not None
    )


def constants_of(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    window: int | None,
    longest: int | None = None,
    rows: int = 128,
) -> dict[str, Any]:
    """The compile-time constants for tensors of these strides."""
    cut = cut_of(q.shape[2], longest)
    return {
        "Q": q.stride(),
        "OUT": out.stride(),
        "K_ROWS": row_strides(k_cache),
        "V_ROWS": row_strides(v_cache),
        "KV_HEADS": k_cache.shape[2],
        "GROUP": q.shape[1] // k_cache.shape[2],
        "DIM": q.shape[2],
        "WIDTH": next_power_of_2(q.shape[2]),
        "BLOCK_SIZE": k_cache.shape[1],
        "BOX": box_rows(k_cache.shape[1], cut.tile),
        "WINDOW": window or 0,
        "TILE": cut.tile,
        "STAGES": cut.stages,
        "PARTS": rows // 64,
        "TAIL": cut.tail,
        "SIDE": math.gcd(cut.side, k_cache.shape[2]),
    }


class HopperPrefill:
    """The kernel for tensors of some strides; it must have been found `usable` for them."""

    def __init__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        window: int | None,
        longest: int | None,
        rows: int,
    ) -> None:
        self._programs = torch.cuda.get_device_properties(q.device).multi_processor_count
        constants = constants_of(q, k_cache, v_cache, out, window, longest, rows)
        self._map = TensorMaps(constants["TILE"])
        self._launch = Launch(_prefill_hopper, constants, num_warps=4)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        tiles: Tensor,
        out: Tensor,
        parts: Tensor | None,
        sums: Tensor | None,
        scale: float,
    ) -> None:
        """Queues the kernel: one program a multiprocessor, each taking every n-th piece of the plan."""
        most = (tiles.shape[0] - 1) * k_cache.shape[2]
        tensors = (q, out, table, tiles, self._map(k_cache), self._map(v_cache), parts, sums)
        self._launch(min(most, self._programs), tensors, table.stride(0), scale)
