"""The prefill kernel for Hopper GPUs: a warp that fetches, and warpgroups that multiply.

One warp fetches K and V, a page at a time, by the tensor memory accelerator into shared memory; two or three
warpgroups of 64 rows each multiply. How they take turns is a schedule: `prefill_overlapped.py` in most steps,
`prefill_halved.py` for heads of 128 where there are many long pieces. Written in Gluon, Triton's lower level;
`usable` says where it applies, and `paged_prefill` has the plain kernel for everywhere else.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from dataclasses import dataclass
from typing import Any

import torch
from pagecast.kernels.capabilities import processors_of
from pagecast.kernels.hopper import barrier
from pagecast.kernels.launch import Launch, next_power_of_2
from pagecast.kernels.prefill_halved import attend_in_halves
from pagecast.kernels.prefill_overlapped import attend_overlapped, queue_output
from pagecast.kernels.prefill_pipe import fetch_pages, give_turn
from pagecast.kernels.prefill_plan import SHORT_KEYS
from pagecast.kernels.prefill_work import count_items, fetch_queries, find_item, load_item, row_offsets
from pagecast.kernels.tensor_map import TensorMaps, box_rows, row_strides
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)


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
    staging,
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
    HALVED: gl.constexpr,
):
    """Writes columns from FIRST on of a warpgroup's rows of the output.

    HALVED: they pass through `staging`, which has the shape of the queries.
    """
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    A: gl.constexpr = acc.type.layout
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    result = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, A))[:, None]
    result = result.to(out.dtype.element_ty)
    if HALVED:
        columns = staging.slice(FIRST, COLUMNS, 1)
        columns.store(result)
        barrier()
        result = columns.load(L)
    else:
        result = gl.convert_layout(result, L)
    lane = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    dims = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    at = row_offsets(lane, row, count, head, OUT, GROUP)
    mask = (lane < count * GROUP)[:, None] & (dims < DIM)[None, :]
    gl.store(out + at[:, None] + dims[None, :] * OUT[2], result, mask=mask)


@gluon.jit
def _consume(
    pipe,
    buffers,
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
    """A warpgroup that multiplies: its part of each item's rows.

    The next item's queries are fetched ahead: into the other of two buffers, or into the only one as soon as
    the scores are there. The output passes through the buffer of the queries that are done.
    """
    q, out, tiles, items, parts, sums, scale = work
    k_buffers, _v_buffers, _k_full, _k_empty, _v_full, v_empty = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    ROWS: gl.constexpr = buffers.shape[1]
    WIDTH: gl.constexpr = buffers.shape[2]
    QUERIES: gl.constexpr = buffers.shape[0]
    HALVED: gl.constexpr = QUERIES == 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    lane = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    if DIM != WIDTH:  # what lies past a head in K then counts for nothing
        for i in gl.static_range(QUERIES):
            buffers.index(i).store(gl.zeros([ROWS, WIDTH], buffers.dtype, L))
    nth = (PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP
    buffer = buffers.index(0)
    fetch_queries(q, tiles, 0, items, buffer, lane, dims, Q, KV_HEADS, GROUP, DIM, TILE, WINDOW, SIDE)
    if PARTS == PART + 1:
        give_turn(0)
    step = 0
    for turn in range(count_items(items)):
        entry, head = find_item(turn, items, KV_HEADS, SIDE)
        _sequence, row, count, position, first, length = load_item(tiles, entry, TILE, WINDOW)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        positions = position + gl.minimum(nth, count - 1)
        if HALVED:
            buffer = buffers.index(turn % 2)
            other = buffers.index((turn + 1) % 2)
            fetch_queries(
                q, tiles, turn + 1, items, other, lane, dims, Q, KV_HEADS, GROUP, DIM, TILE, WINDOW, SIDE
            )
            step, state = attend_in_halves(
                buffer, pipe, position, length, positions, first, step, scale, PART, PARTS, WINDOW
            )
            m, total, acc = state
            rest = m  # unused without a tail
        else:
            buffer = buffers.index(0)
            step, state = attend_overlapped(
                buffer, pipe, position, length, positions, first, step, scale, PART, PARTS, TAIL, WINDOW
            )
            pairs, m, total, acc, rest = state
            fetch_queries(
                q, tiles, turn + 1, items, buffer, lane, dims, Q, KV_HEADS, GROUP, DIM, TILE, WINDOW, SIDE
            )
            acc, rest = queue_output(buffer, pipe, step - 1, pairs, acc, rest, TAIL)
            if TAIL:
                acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index((step - 1) % STAGES), count=1)
        total = gl.convert_layout(gl.sum(total, 1), m.type.layout)
        slot = -1
        if parts is not None:
            slot = gl.load(tiles + 8 * entry + 6)
        if slot < 0:
            _store(out, buffer, acc, total, row, count, head, PART, 0, OUT, GROUP, DIM, HALVED)
            if TAIL:
                _store(out, buffer, rest, total, row, count, head, PART, 64, OUT, GROUP, DIM, HALVED)
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
    HALVED: gl.constexpr,
):
    DTYPE: gl.constexpr = q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    items = gl.load(tiles) * KV_HEADS
    tiles += 8
    PART_0: gl.constexpr = 0
    PART_1: gl.constexpr = 1
    PART_2: gl.constexpr = 2
    QUERIES: gl.constexpr = 2 if HALVED else 1
    q_0 = gl.allocate_shared_memory(DTYPE, [QUERIES, 64, WIDTH], SHARED)
    q_1 = gl.allocate_shared_memory(DTYPE, [QUERIES, 64, WIDTH], SHARED)
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
        q_2 = gl.allocate_shared_memory(DTYPE, [QUERIES, 64, WIDTH], SHARED)
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
                (fetch_pages, (pipe, pages, KV_HEADS, BLOCK_SIZE, K_ROWS, V_ROWS, BOX, WINDOW, SIDE)),
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
                (fetch_pages, (pipe, pages, KV_HEADS, BLOCK_SIZE, K_ROWS, V_ROWS, BOX, WINDOW, SIDE)),
            ],
            [4, 1],
            [240, 24],
        )


WIDE_ROWS = 192


@dataclass(frozen=True, slots=True)
class HopperCut:
    """How an item is computed: `warpgroups` of 64 rows multiply, KV tiles have `tile` tokens, and `stages` of
    K and of V are under way.

    `tail`: columns of a head beyond its 64th, multiplied apart; 0: all together, up to a power of two.
    `side`: fewest KV heads that are under way at once where there is much work; 0: all. `halved`: by the
    schedule of `prefill_halved.py`, not by that of `prefill_overlapped.py`.
    """

    warpgroups: int
    tile: int
    stages: int
    tail: int = 0
    side: int = 0
    halved: bool = False


def rows_of(head_dim: int) -> int:
    """Rows of a tile of the plan: 64 for each warpgroup that multiplies."""
    return 64 * cut_of(head_dim, None, None).warpgroups


def wide_rows_of(head_dim: int) -> int | None:
    """Rows of the tiles that are faster where there are many long ones; None where there are none."""
    return WIDE_ROWS if head_dim == 128 else None


def cut_of(head_dim: int, longest: int | None, rows: int | None) -> HopperCut:
    """The fastest on an H200; `longest` as for `paged_prefill`, `rows` those of a tile (None: `rows_of`).

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
    if rows == WIDE_ROWS:
        return HopperCut(3, 128, 2, side=4, halved=True)
    return HopperCut(2, 64, 3) if short else HopperCut(2, 128, 2, side=2)


def usable(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: int) -> bool:
    """True where this kernel can stand in for the plain one, with tiles of so many rows."""
    return (
        q.is_cuda
        and rows in (128, WIDE_ROWS)
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
    cut = cut_of(q.shape[2], longest, rows)
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
        "HALVED": cut.halved,
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
        self._programs = processors_of(q.device)
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
        """Queues the kernel: one program per multiprocessor, each taking every n-th piece of the plan."""
        most = (tiles.shape[0] - 1) * k_cache.shape[2]
        tensors = (q, out, table, tiles, self._map(k_cache), self._map(v_cache), parts, sums)
        self._launch(min(most, self._programs), tensors, table.stride(0), scale)
