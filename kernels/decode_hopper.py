"""A decode kernel for Hopper GPUs: one warp fetches K and V, four multiply.

The warp that fetches runs through its whole stretch of the work (see paged_decode.py) as buffers fall free,
so that the memory is not left waiting where one head ends and another begins. A schedule made with
`decode_schedule.hopper_cut` runs it. Written in Gluon, Triton's lower level; `usable` says where it applies.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

from pagecast.kernels.decode_schedule import DecodeSchedule
from pagecast.kernels.hopper import barrier, fetch_tile, zero_tail
from pagecast.kernels.launch import Launch, next_power_of_2
from pagecast.kernels.tensor_map import TensorMaps, box_rows, row_strides
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2_E = gl.constexpr(1.4426950408889634)
AT_ONCE = gl.constexpr(4)


@gluon.jit
def _after_predecessor(OVERLAP: gl.constexpr):
    """`launch.after_predecessor` in Gluon."""
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _stretch(line, LANES: gl.constexpr, LANE_HEADS: gl.constexpr):
    """This program's stretch of the work: where it starts, where the head that the next stretch goes on with
    starts, and where it ends; the rows of the first two."""
    ends, first_row, _seq_lens, batch = line
    stretch = gl.program_id(0) // LANES
    share = gl.load(ends)
    total = gl.load(ends + batch) * LANE_HEADS
    start = stretch * share
    end = gl.minimum(start + share, total)
    row, last_row = gl.load(first_row + stretch), gl.load(first_row + stretch + 1)
    split = end
    if end < total:
        before = gl.load(ends + last_row, mask=last_row > 0, other=0)
        work = gl.load(ends + 1 + last_row) - before
        split = before * LANE_HEADS + (end - before * LANE_HEADS) // work * work
        split = gl.maximum(split, start)
    return start, split, end, row, last_row


@gluon.jit
def _piece(line, begin, stop, row, LANE_HEADS: gl.constexpr, START_COST: gl.constexpr):
    """The work of a row from `begin` on: which of the lane's heads, where its units begin on the line, their
    number, the first and last + 1 of them to compute, and where the row ends."""
    ends, _first_row, _seq_lens, _batch = line
    row_begin = gl.load(ends + row, mask=row > 0, other=0)
    row_end = gl.load(ends + 1 + row)
    work = row_end - row_begin
    units = work - START_COST
    nth = (begin - row_begin * LANE_HEADS) // gl.maximum(work, 1)
    origin = row_begin * LANE_HEADS + nth * work + START_COST
    first = gl.maximum(begin - origin, 0)
    last = gl.minimum(units, stop - origin)
    return nth, origin, units, first, last, row_end * LANE_HEADS


@gluon.jit
def _produce(
    pipe,
    pages,
    line,
    BLOCK_SIZE: gl.constexpr,
    K_ROWS: gl.constexpr,
    V_ROWS: gl.constexpr,
    BOX: gl.constexpr,
    UNIT: gl.constexpr,
    LANES: gl.constexpr,
    LANE_HEADS: gl.constexpr,
    START_COST: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """The warp that fetches: the KV tiles of the stretch, as buffers fall free."""
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = pipe
    k_cache, v_cache, table, table_stride = pages
    _ends, _first_row, seq_lens, _batch = line
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    start, split, end, first_row, last_row = _stretch(line, LANES, LANE_HEADS)
    step = 0
    for turn in range(2):
        begin = gl.where(turn == 0, split, start)
        stop = gl.where(turn == 0, end, split)
        row = gl.where(turn == 0, last_row, first_row)
        while begin < stop:
            nth, origin, units, first, last, row_end = _piece(line, begin, stop, row, LANE_HEADS, START_COST)
            head = nth * LANES + gl.program_id(0) % LANES
            length = gl.load(seq_lens + row)
            skipped = (length + UNIT - 1) // UNIT - units
            table_row = table + row.to(gl.int64) * table_stride
            last_page = (length - 1) // BLOCK_SIZE
            end_token = gl.minimum((skipped + last) * UNIT, length)
            for at in range((skipped + first) * UNIT, end_token, TILE):
                if at + TILE >= length:  # the newest token is the predecessor's
                    _after_predecessor(OVERLAP)
                boxes = gl.minimum((end_token - at + BOX - 1) // BOX, TILE // BOX)
                stage = step % STAGES
                free = (step // STAGES + 1) & 1
                mbarrier.wait(k_empty.index(stage), free)
                full, buffer = k_full.index(stage), k_buffers.index(stage)
                fetch_tile(
                    k_cache, table_row, at, last_page, head, full, buffer, boxes, BLOCK_SIZE, K_ROWS, BOX
                )
                mbarrier.wait(v_empty.index(stage), free)
                full, buffer = v_full.index(stage), v_buffers.index(stage)
                fetch_tile(
                    v_cache, table_row, at, last_page, head, full, buffer, boxes, BLOCK_SIZE, V_ROWS, BOX
                )
                step += 1
            begin = gl.minimum(origin + units, stop)
            row = gl.where(begin == row_end, row + 1, row)
    _after_predecessor(OVERLAP)  # also where the stretch is empty: who follows relies on it


@gluon.jit
def _fetch_q(q, buffer, row, head, Q: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr):
    """Copies the queries of a KV head's group into the first rows of `buffer`."""
    ROWS: gl.constexpr = buffer.shape[0]
    WIDTH: gl.constexpr = buffer.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    at = q + row.to(gl.int64) * Q[0] + (head * GROUP + lane)[:, None] * Q[1] + dims[None, :] * Q[2]
    queries = gl.load(at, mask=(lane < GROUP)[:, None] & (dims < DIM)[None, :], other=0.0)
    barrier()  # all warps have multiplied with the last ones
    buffer.store(queries)
    fence_async_shared()
    barrier()


@gluon.jit
def _attend(q, pipe, step, length, begin, end, scale, WINDOW: gl.constexpr):
    """Online softmax over the tokens [begin, end) as their tiles arrive: running max, sum and output."""
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = pipe
    STAGES: gl.constexpr = k_buffers.shape[0]
    TILE: gl.constexpr = k_buffers.shape[1]
    WIDTH: gl.constexpr = q.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S))
    acc = gl.zeros([64, WIDTH], gl.float32, A)
    for start in range(begin, end, TILE):
        stage, parity = step % STAGES, (step // STAGES) & 1
        mbarrier.wait(k_full.index(stage), parity)
        s = gl.zeros([64, TILE], gl.float32, S)
        k = k_buffers.index(stage)
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        token = start + gl.arange(0, TILE, gl.SliceLayout(0, S))
        seen = token < end
        if WINDOW > 0:
            seen = seen & (token >= length - WINDOW)
        s = gl.where(seen[None, :], s * scale, -float("inf"))
        new_m = gl.maximum(m, gl.max(s, 1))
        weights = gl.exp2(s - new_m[:, None])
        fade = gl.exp2(m - new_m)
        m, total = new_m, total * fade + gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, A, 2))
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, A))[:, None]
        mbarrier.wait(v_full.index(stage), parity)
        v = v_buffers.index(stage)
        if start + TILE > end:
            zero_tail(v, start, end)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(stage), count=1)
        step += 1
    return step, m, total, acc


@gluon.jit
def _with_sink(total, m, sinks, head, GROUP: gl.constexpr):
    """`tile.with_sink` in Gluon."""
    if sinks is None:
        return total
    else:
        lane = gl.arange(0, total.shape[0], total.type.layout)
        sink = gl.load(sinks + head * GROUP + lane, mask=lane < GROUP, other=-float("inf"))
        return total + gl.exp2(sink.to(gl.float32) * LOG2_E - m)


@gluon.jit
def _store(out, total, acc, v_factor, row, head, OUT: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr):
    """Writes the output of one KV head's group of query heads."""
    A: gl.constexpr = acc.type.layout
    lane = gl.arange(0, acc.shape[0], gl.SliceLayout(1, A))
    dims = gl.arange(0, acc.shape[1], gl.SliceLayout(0, A))
    result = acc * gl.convert_layout(v_factor / total, gl.SliceLayout(1, A))[:, None]
    at = out + row.to(gl.int64) * OUT[0] + (head * GROUP + lane)[:, None] * OUT[1] + dims[None, :] * OUT[2]
    mask = (lane < GROUP)[:, None] & (dims < DIM)[None, :]
    gl.store(at, result.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _leave(space, arrival, slot, count, m, total, acc, GROUP: gl.constexpr, GROUP_POW2: gl.constexpr):
    """Writes partial sums to a slot of the workspace; true where they are the last of `count`."""
    sums, outputs = space
    A: gl.constexpr = acc.type.layout
    lane = gl.arange(0, acc.shape[0], total.type.layout)
    at = 2 * (slot.to(gl.int64) * GROUP_POW2 + lane)
    gl.store(sums + at, m, mask=lane < GROUP)
    gl.store(sums + at + 1, total, mask=lane < GROUP)
    lane = gl.arange(0, acc.shape[0], gl.SliceLayout(1, A))
    dims = gl.arange(0, acc.shape[1], gl.SliceLayout(0, A))
    at = (slot.to(gl.int64) * GROUP_POW2 + lane)[:, None] * acc.shape[1] + dims[None, :]
    gl.store(outputs + at, acc, mask=(lane < GROUP)[:, None] & (dims >= 0)[None, :])
    barrier()  # all threads' stores come before the one thread's release
    return gl.atomic_add(arrival, 1, sem="acq_rel") == count - 1


@gluon.jit
def _merge(space, first_holder, count, GROUP_POW2: gl.constexpr, WIDTH: gl.constexpr):
    """Maximum, sum and output of the `count` parts from stretch slot `first_holder` on, in order."""
    sums, outputs = space
    ACROSS: gl.constexpr = WIDTH // 4
    M: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    R: gl.constexpr = gl.SliceLayout(1, M)
    rows = gl.arange(0, GROUP_POW2, R)
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, M))
    m = gl.full([GROUP_POW2], -float("inf"), gl.float32, R)
    total = gl.zeros([GROUP_POW2], gl.float32, R)
    acc = gl.zeros([GROUP_POW2, WIDTH], gl.float32, M)
    for start in range(0, count, AT_ONCE):
        for i in gl.static_range(AT_ONCE):  # past the last, that one again with no weight: loads don't wait
            nth = gl.minimum(start + i, count - 1)
            slot = (2 * (first_holder + nth) + (nth == 0).to(gl.int32)).to(gl.int64)
            at = slot * GROUP_POW2 + rows
            part_m = gl.where(start + i < count, gl.load(sums + 2 * at), -float("inf"))
            new_m = gl.maximum(m, part_m)
            fade, weight = gl.exp2(m - new_m), gl.exp2(part_m - new_m)
            total = total * fade + gl.load(sums + 2 * at + 1) * weight
            part = gl.load(outputs + at[:, None] * WIDTH + dims[None, :])
            acc = acc * fade[:, None] + part * weight[:, None]
            m = new_m
    return m, total, acc


@gluon.jit
def _consume(
    pipe,
    buffer,
    work,
    line,
    scale,
    Q: gl.constexpr,
    OUT: gl.constexpr,
    KV_HEADS: gl.constexpr,
    LANES: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_POW2: gl.constexpr,
    DIM: gl.constexpr,
    WINDOW: gl.constexpr,
    UNIT: gl.constexpr,
    START_COST: gl.constexpr,
    SCALE_STRIDE: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """The warps that multiply, head after head of the stretch."""
    q, out, sums, outputs, arrivals, k_scale, v_scale, sinks = work
    _ends, _first_row, seq_lens, _batch = line
    WIDTH: gl.constexpr = buffer.shape[1]
    LANE_HEADS: gl.constexpr = KV_HEADS // LANES
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    buffer.store(gl.zeros([64, WIDTH], buffer.dtype, L))
    ROWS: gl.constexpr = 16 if GROUP <= 16 else 64
    queries = buffer.slice(0, ROWS)
    lane = gl.program_id(0) % LANES
    stretch = gl.program_id(0) // LANES
    lane_slots = lane * (gl.num_programs(0) // LANES)
    share = gl.load(line[0])
    start, split, end, first_row, last_row = _stretch(line, LANES, LANE_HEADS)
    step = 0
    for turn in range(2):
        begin = gl.where(turn == 0, split, start)
        stop = gl.where(turn == 0, end, split)
        row = gl.where(turn == 0, last_row, first_row)
        while begin < stop:
            nth, origin, units, first, last, row_end = _piece(line, begin, stop, row, LANE_HEADS, START_COST)
            if last > first:
                head = nth * LANES + lane
                length = gl.load(seq_lens + row)
                skipped = (length + UNIT - 1) // UNIT - units
                if step == 0:
                    _after_predecessor(OVERLAP)
                factor, v_factor = scale, 1.0
                if k_scale is not None:
                    factor = scale * gl.load(k_scale + head * SCALE_STRIDE)
                    v_factor = gl.load(v_scale + head * SCALE_STRIDE)
                _fetch_q(q, queries, row, head, Q, GROUP, DIM)
                begin_token = (skipped + first) * UNIT
                end_token = gl.minimum((skipped + last) * UNIT, length)
                step, m, total, acc = _attend(
                    buffer, pipe, step, length, begin_token, end_token, factor, WINDOW
                )
                if last - first == units:
                    total = _with_sink(total, m, sinks, head, GROUP)
                    _store(out, total, acc, v_factor, row, head, OUT, GROUP, DIM)
                else:
                    # The stretch that begins a head uses its second slot, those that continue it their first.
                    first_holder = origin // share
                    count = (origin + units - 1) // share - first_holder + 1
                    slot = 2 * (lane_slots + stretch) + (first == 0).to(gl.int32)
                    arrival = arrivals + row * KV_HEADS + head
                    if _leave((sums, outputs), arrival, slot, count, m, total, acc, GROUP, GROUP_POW2):
                        gl.store(arrival, 0)
                        all_m, all_total, all_acc = _merge(
                            (sums, outputs), lane_slots + first_holder, count, GROUP_POW2, WIDTH
                        )
                        all_total = _with_sink(all_total, all_m, sinks, head, GROUP)
                        _store(out, all_total, all_acc, v_factor, row, head, OUT, GROUP, DIM)
            begin = gl.minimum(origin + units, stop)
            row = gl.where(begin == row_end, row + 1, row)


@gluon.jit(do_not_specialize=["table_stride", "batch", "scale"])
def _decode_hopper(
    q,
    k_cache,
    v_cache,
    out,
    table,
    seq_lens,
    ends,
    first_row,
    sums,
    outputs,
    arrivals,
    k_scale,
    v_scale,
    sinks,
    table_stride,
    batch,
    scale,
    Q: gl.constexpr,
    OUT: gl.constexpr,
    K_ROWS: gl.constexpr,
    V_ROWS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    LANES: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_POW2: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    WINDOW: gl.constexpr,
    UNIT: gl.constexpr,
    START_COST: gl.constexpr,
    SCALE_STRIDE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    SETTLED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    DTYPE: gl.constexpr = k_cache.dtype
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    LANE_HEADS: gl.constexpr = KV_HEADS // LANES
    queries = gl.allocate_shared_memory(DTYPE, [64, DIM], SHARED)
    k_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, DIM], SHARED)
    v_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, DIM], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    _after_predecessor(OVERLAP and not SETTLED)
    INSIDE: gl.constexpr = OVERLAP and SETTLED
    pipe = (k_buffers, v_buffers, k_full, k_empty, v_full, v_empty)
    line = (ends, first_row, seq_lens, batch)
    work = (q, out, sums, outputs, arrivals, k_scale, v_scale, sinks)
    pages = (k_cache, v_cache, table, table_stride)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    pipe,
                    queries,
                    work,
                    line,
                    scale,
                    Q,
                    OUT,
                    KV_HEADS,
                    LANES,
                    GROUP,
                    GROUP_POW2,
                    DIM,
                    WINDOW,
                    UNIT,
                    START_COST,
                    SCALE_STRIDE,
                    INSIDE,
                ),
            ),
            (
                _produce,
                (
                    pipe,
                    pages,
                    line,
                    BLOCK_SIZE,
                    K_ROWS,
                    V_ROWS,
                    BOX,
                    UNIT,
                    LANES,
                    LANE_HEADS,
                    START_COST,
                    INSIDE,
                ),
            ),
        ],
        [1],
        [40],
    )


def usable(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """True where this kernel can stand in for the plain one, beside what `DecodeShape.fits_hopper` asks."""
    return (
        q.dtype == k_cache.dtype
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
    k_scale: Tensor | None,
    schedule: DecodeSchedule,
    settled: bool,
) -> dict[str, Any]:
    """The compile-time constants for tensors of these strides."""
    shape, group = schedule.shape, q.shape[1] // k_cache.shape[2]
    return {
        "Q": q.stride(),
        "OUT": out.stride(),
        "K_ROWS": row_strides(k_cache),
        "V_ROWS": row_strides(v_cache),
        "KV_HEADS": shape.kv_heads,
        "LANES": schedule.lanes,
        "GROUP": group,
        "GROUP_POW2": next_power_of_2(group),
        "DIM": shape.head_dim,
        "BLOCK_SIZE": k_cache.shape[1],
        "BOX": box_rows(k_cache.shape[1], schedule.tile, schedule.unit),
        "WINDOW": shape.window or 0,
        "UNIT": schedule.unit,
        "START_COST": schedule.cut.start_cost,
        "SCALE_STRIDE": int(k_scale is not None and k_scale.shape[0] > 1),
        "TILE": schedule.tile,
        "STAGES": schedule.cut.stages,
        "SETTLED": settled,
    }


class HopperDecode:
    """The kernel for tensors of some strides; it must have been found `usable` for them."""

    def __init__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        k_scale: Tensor | None,
        schedule: DecodeSchedule,
        settled: bool,
    ) -> None:
        constants = constants_of(q, k_cache, v_cache, out, k_scale, schedule, settled)
        self._map = TensorMaps(schedule.tile, schedule.unit)
        options = {"num_warps": schedule.cut.warps, "maxnreg": schedule.cut.registers}
        self._launch = Launch(_decode_hopper, constants, q.device, **options)

    def __call__(self, programs: int, tensors: tuple[Any, ...], *numbers: float) -> None:
        """Queues the kernel; arguments are those of the plain kernel's `Launch`."""
        q, k_cache, v_cache, *rest = tensors
        self._launch(programs, (q, self._map(k_cache), self._map(v_cache), *rest), *numbers)
