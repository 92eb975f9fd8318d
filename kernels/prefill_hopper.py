"""The prefill kernel for Hopper GPUs: warps that fetch, warps that multiply, softmax beside the products.

One warp fetches K and V, a page at a time, by the tensor memory accelerator into shared memory; two
warpgroups of 64 rows each multiply. A warpgroup computes the softmax of one KV tile while its previous
product with V still runs (the schedule of FlashAttention-3, Shah et al. 2024). Written in Gluon, Triton's
lower level; `usable` says where it applies, and `paged_prefill` has the plain kernel for everywhere else.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Names that changed between Triton 3.6 and 3.9.
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_fetch_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _item(tiles, item, KV_HEADS: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """A piece of work: sequence, first row of q, rows, position of the first, first KV tile, last key + 1."""
    entry = tiles + 8 * (item // KV_HEADS)
    sequence, row = gl.load(entry), gl.load(entry + 1)
    count, position = gl.load(entry + 2), gl.load(entry + 3)
    first = gl.load(entry + 4) // TILE
    if WINDOW > 0:
        first = gl.maximum(position - WINDOW + 1, 0) // TILE
    return sequence, row, count, position, first, gl.load(entry + 5)


@gluon.jit
def _fetch_tile(
    cache,
    table_row,
    start,
    last_page,
    head,
    full,
    buffer,
    BLOCK_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    BOX: gl.constexpr,
):
    """Queues the copy of the tokens [start, start + TILE) into `buffer`, `full` announcing its arrival.

    ROWS are the cache's `row_strides`. Tokens past the last page get that page's: their weight will be 0.
    """
    TILE: gl.constexpr = buffer.shape[0]
    mbarrier.expect(full, TILE * buffer.shape[1] * 2)
    for part in gl.static_range(TILE // BOX):
        token = start + part * BOX
        page = gl.load(table_row + gl.minimum(token // BLOCK_SIZE, last_page))
        row = page * ROWS[0] + head * ROWS[1] + token % BLOCK_SIZE
        _fetch(cache, [row, head * ROWS[2]], full, buffer.slice(part * BOX, BOX))


@gluon.jit
def _produce(
    pipe,
    k_cache,
    v_cache,
    table,
    table_stride,
    tiles,
    items,
    KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    K_ROWS: gl.constexpr,
    V_ROWS: gl.constexpr,
    BOX: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """The warp that fetches: the KV tiles of each item, last to first, as buffers fall free."""
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty, _turns = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sequence, _row, _count, _position, first, length = _item(tiles, item, KV_HEADS, TILE, WINDOW)
        last = (length + TILE - 1) // TILE
        head = item % KV_HEADS
        row = table + sequence.to(gl.int64) * table_stride
        last_page = (length - 1) // BLOCK_SIZE
        for i in range(last - first):
            start = (last - 1 - i) * TILE
            stage = step % STAGES
            free = (step // STAGES + 1) & 1
            mbarrier.wait(k_empty.index(stage), free)
            full, buffer = k_full.index(stage), k_buffers.index(stage)
            _fetch_tile(k_cache, row, start, last_page, head, full, buffer, BLOCK_SIZE, K_ROWS, BOX)
            mbarrier.wait(v_empty.index(stage), free)
            full, buffer = v_full.index(stage), v_buffers.index(stage)
            _fetch_tile(v_cache, row, start, last_page, head, full, buffer, BLOCK_SIZE, V_ROWS, BOX)
            step += 1


@gluon.jit
def _queue_scores(q, pipe, step, PART: gl.constexpr):
    """Starts q k^T of a step's tile when it is there and the other warpgroup has queued its products."""
    k_buffers, _v_buffers, k_full, _k_empty, _v_full, _v_empty, turns = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    ROWS: gl.constexpr = q.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    stage = step % STAGES
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    mbarrier.wait(turns.index(PART), step & 1)
    zeros = gl.zeros([ROWS, TILE], gl.float32, S)
    return warpgroup_mma(q, k_buffers.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _queue_output(q, pipe, step, weights, fade, acc):
    """Starts the product of a step's weights with V, on top of the rescaled output so far."""
    _k_buffers, v_buffers, _k_full, _k_empty, v_full, _v_empty, _turns = pipe
    STAGES: gl.constexpr = v_buffers.shape[0]
    A: gl.constexpr = acc.type.layout
    p = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, A, 2))
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, A))[:, None]
    stage = step % STAGES
    mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
    return warpgroup_mma(p, v_buffers.index(stage), acc, is_async=True)


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
def _softmax(s, scale, m, total, EDGE: gl.constexpr):
    """A step of the online softmax: weights, what the output so far must be scaled by, max and sum."""
    new_m = gl.maximum(m, gl.max(s, 1))
    base = new_m * scale
    if EDGE:  # a row may have seen nothing yet
        base = gl.where(new_m == -float("inf"), 0.0, base)
    weights = gl.exp2(s * scale - base[:, None])
    fade = gl.exp2(m * scale - base)
    return weights, fade, new_m, total * fade + gl.sum(weights, 1)


@gluon.jit
def _zero_tail(buffer, start, length):
    """Zeros the rows of V from `length` on: their weight is 0, but what lies there may be NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for part in gl.static_range(buffer.shape[0] // 16):
        begin = start + part * 16
        if begin + 16 > length:
            piece = buffer.slice(part * 16, 16)
            token = begin + gl.arange(0, 16, gl.SliceLayout(1, L))
            rows = piece.load(L)
            piece.store(gl.where((token < length)[:, None], rows, gl.zeros_like(rows)))
    fence_async_shared()
    _barrier()


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
    WINDOW: gl.constexpr,
    EDGE: gl.constexpr,
):
    """The KV tiles begin - 1 down to end: a tile's softmax runs beside the last tile's product with V."""
    k_buffers, _v_buffers, _k_full, k_empty, _v_full, v_empty, turns = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    weights, fade, m, total, acc = state
    for i in range(begin - end):
        s = _queue_scores(q, pipe, step, PART)
        # Rounding and rescaling, in here, hide behind the product that was just queued.
        product = _queue_output(q, pipe, step - 1, weights, fade, acc)
        mbarrier.arrive(turns.index(1 - PART), count=1)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(step % STAGES), count=1)
        if EDGE:
            s = _hide(s, (begin - 1 - i) * TILE, positions, WINDOW)
        weights, fade, m, total = _softmax(s, scale, m, total, EDGE)
        acc = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(v_empty.index((step - 1) % STAGES), count=1)
        step += 1
    return step, (weights, fade, m, total, acc)


@gluon.jit
def _place(lane, row, count, head, STRIDES: gl.constexpr, GROUP: gl.constexpr):
    """Offsets of the rows of q or of the output; lanes past the last row repeat its token."""
    token = (row + gl.minimum(lane // GROUP, count - 1)).to(gl.int64)
    return token * STRIDES[0] + (head * GROUP + lane % GROUP) * STRIDES[1]


@gluon.jit
def _fetch_q(
    q,
    tiles,
    item,
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
):
    """Starts to copy the queries of an item, if there is one."""
    if item < items:
        _sequence, row, count, _position, _first, _length = _item(tiles, item, KV_HEADS, TILE, WINDOW)
        at = _place(lane, row, count, item % KV_HEADS, Q, GROUP)
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
    WINDOW: gl.constexpr,
):
    """Everything but the last product with V of an item whose queries lie in `q`."""
    k_buffers, v_buffers, _k_full, k_empty, v_full, _v_empty, turns = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    ROWS: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    R: gl.constexpr = positions.type.layout
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    last = (length + TILE - 1) // TILE
    s = _queue_scores(q, pipe, step, PART)
    mbarrier.arrive(turns.index(1 - PART), count=1)
    s = warpgroup_mma_wait(0, deps=[s])
    stage = step % STAGES
    mbarrier.arrive(k_empty.index(stage), count=1)
    # Of the last tile, the diagonal or the sequence's end may hide some.
    s = _hide(s, (last - 1) * TILE, positions, WINDOW)
    nothing = gl.full([ROWS], -float("inf"), gl.float32, R)
    weights, fade, m, total = _softmax(s, scale, nothing, gl.zeros([ROWS], gl.float32, R), True)
    if length % TILE != 0:
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        _zero_tail(v_buffers.index(stage), (last - 1) * TILE, length)
    edge = gl.minimum(gl.maximum((position + 1) // TILE, first), last - 1)
    whole = first
    if WINDOW > 0:
        whole = gl.minimum(edge, (gl.maximum(length - WINDOW, 0) + TILE - 1) // TILE)
    state = (weights, fade, m, total, gl.zeros([ROWS, WIDTH], gl.float32, A))
    step, state = _steps(q, pipe, last - 1, edge, step + 1, positions, scale, state, PART, WINDOW, True)
    step, state = _steps(q, pipe, edge, whole, step, positions, scale, state, PART, WINDOW, False)
    if WINDOW > 0:
        step, state = _steps(q, pipe, whole, first, step, positions, scale, state, PART, WINDOW, True)
    return step, state


@gluon.jit
def _leave(parts, sums, slot, acc, m, total, rows):
    """Writes a warpgroup's `rows` first rows of a piece to its half of a slot in the workspace."""
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    A: gl.constexpr = acc.type.layout
    R: gl.constexpr = total.type.layout
    some = total > 0  # a row may have seen nothing of the piece
    inverse = gl.where(some, 1.0 / total, 0.0)
    lane = gl.arange(0, ROWS, R)
    gl.store(sums + slot * ROWS + lane, gl.where(some, m + gl.log2(total), -float("inf")), mask=lane < rows)
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, A))[:, None]
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, A))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, A))
    at = (slot * ROWS + lane)[:, None] * WIDTH + dims[None, :]
    gl.store(parts + at, acc, mask=(lane < rows)[:, None] & (dims >= 0)[None, :])


@gluon.jit
def _consume(
    pipe,
    buffer,
    q,
    out,
    tiles,
    items,
    parts,
    sums,
    scale,
    PART: gl.constexpr,
    Q: gl.constexpr,
    OUT: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """A warpgroup that multiplies: half the rows of each item, its next queries fetched ahead."""
    k_buffers, _v_buffers, _k_full, _k_empty, _v_full, v_empty, turns = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    ROWS: gl.constexpr = buffer.shape[0]
    WIDTH: gl.constexpr = buffer.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    lane = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    if DIM != WIDTH:  # what lies past a head in K then counts for nothing
        buffer.store(gl.zeros([ROWS, WIDTH], buffer.dtype, L))
    nth = (PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP
    _fetch_q(q, tiles, gl.program_id(0), items, buffer, lane, dims, Q, KV_HEADS, GROUP, DIM, TILE, WINDOW)
    if PART == 1:
        mbarrier.arrive(turns.index(0), count=1)
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _sequence, row, count, position, first, length = _item(tiles, item, KV_HEADS, TILE, WINDOW)
        async_copy.wait_group(0)
        fence_async_shared()
        _barrier()
        positions = position + gl.minimum(nth, count - 1)
        step, state = _attend(buffer, pipe, position, length, positions, first, step, scale, PART, WINDOW)
        weights, fade, m, total, acc = state
        following = item + gl.num_programs(0)
        _fetch_q(q, tiles, following, items, buffer, lane, dims, Q, KV_HEADS, GROUP, DIM, TILE, WINDOW)
        product = _queue_output(buffer, pipe, step - 1, weights, fade, acc)
        acc = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(v_empty.index((step - 1) % STAGES), count=1)
        slot = -1
        if parts is not None:
            slot = gl.load(tiles + 8 * (item // KV_HEADS) + 6)
        if slot < 0:
            result = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, A))[:, None]
            result = gl.convert_layout(result.to(out.dtype.element_ty), L)
            at = _place(lane, row, count, item % KV_HEADS, OUT, GROUP)
            mask = (lane < count * GROUP)[:, None] & (dims < DIM)[None, :]
            gl.store(out + at[:, None] + dims[None, :] * OUT[2], result, mask=mask)
        elif parts is not None:
            slot = (slot * KV_HEADS + item % KV_HEADS) * 2 + PART
            _leave(parts, sums, slot, acc, m * scale, total, count * GROUP - PART * ROWS)


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
):
    DTYPE: gl.constexpr = q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    items = gl.load(tiles) * KV_HEADS
    tiles += 8
    UPPER: gl.constexpr = 0
    LOWER: gl.constexpr = 1
    q_upper = gl.allocate_shared_memory(DTYPE, [64, WIDTH], SHARED)
    q_lower = gl.allocate_shared_memory(DTYPE, [64, WIDTH], SHARED)
    k_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, WIDTH], SHARED)
    v_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, WIDTH], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    pipe = (k_buffers, v_buffers, k_full, k_empty, v_full, v_empty, turns)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    pipe,
                    q_upper,
                    q,
                    out,
                    tiles,
                    items,
                    parts,
                    sums,
                    scale,
                    UPPER,
                    Q,
                    OUT,
                    KV_HEADS,
                    GROUP,
                    DIM,
                    WINDOW,
                ),
            ),
            (
                _consume,
                (
                    pipe,
                    q_lower,
                    q,
                    out,
                    tiles,
                    items,
                    parts,
                    sums,
                    scale,
                    LOWER,
                    Q,
                    OUT,
                    KV_HEADS,
                    GROUP,
                    DIM,
                    WINDOW,
                ),
            ),
            (
                _produce,
                (
                    pipe,
                    k_cache,
                    v_cache,
                    table,
                    table_stride,
                    tiles,
                    items,
                    KV_HEADS,
                    BLOCK_SIZE,
                    K_ROWS,
                    V_ROWS,
                    BOX,
                    WINDOW,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def tile_of(head_dim: int, longest: int | None) -> tuple[int, int]:
    """Tokens of a KV tile, and tiles of K and of V that are under way; `longest` as for `paged_prefill`.

    Measured on an H200. At head dimension 256 no more than this fits beside the queries.
    """
    if head_dim > 128:
        return 64, 2
    if head_dim <= 64:
        return 128, 3
    return (64, 3) if longest is not None and longest <= SHORT_KEYS else (128, 2)


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
) -> dict[str, Any]:
    """The compile-time constants for tensors of these strides."""
    tile, stages = tile_of(q.shape[2], longest)
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
        "BOX": box_rows(k_cache.shape[1], tile),
        "WINDOW": window or 0,
        "TILE": tile,
        "STAGES": stages,
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
    ) -> None:
        self._programs = torch.cuda.get_device_properties(q.device).multi_processor_count
        constants = constants_of(q, k_cache, v_cache, out, window, longest)
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
