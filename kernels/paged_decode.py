"""Attention of one new token per sequence over the paged cache: flash decoding with equal shares of work.

A step's work is a line of KV tiles: sequence after sequence. It is cut into equal stretches, so lengths may
differ as they like, and the grid does not depend on them (CUDA graphs). A stretch is computed by neighbouring
programs, one for each lane: a KV head, or several one after the other. The lanes of a stretch read the same
blocks at the same time, and the heads of a token lie side by side in memory. Where a stretch ends inside a
head, partial sums go to a workspace, and the program that finishes a head last merges them, always in the
same order: results don't vary. A program begins with the head that it leaves to the next stretch, so that
merging doesn't come last.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.kernels.decode_schedule import DecodeSchedule, DecodeShape
from pagecast.kernels.launch import (
    Launch,
    after_predecessor,
    next_power_of_2,
    require,
    require_attention,
    require_sinks,
)
from pagecast.kernels.tile import (
    alternate_pairs,
    compute_dtype,
    halves,
    load_tile,
    page_ids,
    with_sink,
)
from torch import Tensor

AT_ONCE = 8


@triton.jit
def _queries(
    at,
    rows,
    Q: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    DTYPE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """A KV head's queries, transposed, as a tuple: all columns [dim, rows]; with PAIRS those of each half
    that `alternate_pairs` makes of a key, [dim / 2, rows]."""
    if PAIRS:
        nth = tl.arange(0, DIM_POW2 // 2)[:, None]
        first = nth // 2 * 4 + nth % 2
        heads = at + rows[None, :] * Q[1]
        there = (rows < GROUP)[None, :] & (first < DIM)
        after = (rows < GROUP)[None, :] & (first + 2 < DIM)
        second_half = tl.load(heads + (first + 2) * Q[2], mask=after, other=0.0).to(DTYPE)
        return tl.load(heads + first * Q[2], mask=there, other=0.0).to(DTYPE), second_half
    else:
        dims = tl.arange(0, DIM_POW2)[:, None]
        there = (rows < GROUP)[None, :] & (dims < DIM)
        return (tl.load(at + rows[None, :] * Q[1] + dims * Q[2], mask=there, other=0.0).to(DTYPE),)


@triton.jit
def _scores(q, keys, PAIRS: tl.constexpr, ON_GPU: tl.constexpr):
    """Scores in fp32, [tile, rows]; with PAIRS `keys` holds two fp8 numbers in each int16."""
    if PAIRS:
        first, second = alternate_pairs(keys, ON_GPU)
        return tl.dot(second, q[1], tl.dot(first, q[0]))
    else:
        return tl.dot(keys.to(q[0].dtype), q[0], input_precision="ieee")


@triton.jit
def _add_values(acc, fade, weights, values, PAIRS: tl.constexpr, ON_GPU: tl.constexpr):
    """The output so far, faded, and the tile's values [dim, tile] with its weights [tile, rows]: a tuple of
    all columns [dim, rows]; with PAIRS of even and of odd ones [dim / 2, rows]."""
    fade = fade[None, :]
    if PAIRS:
        even, odd = halves(values, ON_GPU)
        return tl.dot(even, weights, acc[0] * fade), tl.dot(odd, weights, acc[1] * fade)
    else:
        return (tl.dot(values.to(weights.dtype), weights, acc[0] * fade, input_precision="ieee"),)


@triton.jit
def _attend(
    q,
    k,
    v,
    table_row,
    length,
    first,
    last,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Online softmax over the tiles [first, last): running max [rows], sum [rows], output [rows, dim].

    Products are transposed: a tensor core takes at least 16 rows of one factor, which are tokens or columns
    of V, and 8 of the other, so that few queries waste less. With PAIRS the cache is fp8 with dense rows,
    read two numbers at a time.
    """
    EACH: tl.constexpr = 2 if PAIRS else 1
    WIDTH: tl.constexpr = DIM_POW2 // EACH
    KEYS: tl.constexpr = (K[0] // EACH, K[1] // EACH, K[2] // EACH, K[3])
    VALUES: tl.constexpr = (V[0] // EACH, V[1] // EACH, V[2] // EACH, V[3])
    m = tl.full([ROWS], -float("inf"), tl.float32)
    # Sums stay spread over a tile's tokens until the end.
    totals = tl.zeros([TILE, ROWS], tl.float32)
    nothing = tl.zeros([WIDTH, ROWS], tl.float32)
    if PAIRS:
        k = k.to(tl.pointer_type(tl.int16), bitcast=True)
        v = v.to(tl.pointer_type(tl.int16), bitcast=True)
        acc = (nothing, nothing)
    else:
        acc = (nothing,)  # type: ignore[assignment]
    # One loop for whole and cut tiles alike: masks cost less than a second, unpipelined loop would.
    for tile in tl.range(first, last, num_stages=STAGES):
        start = tile * TILE
        ids = page_ids(table_row, start, length, BLOCK_SIZE, TILE, True)
        keys = load_tile(k, ids, start, length, KEYS, BLOCK_SIZE, TILE, DIM // EACH, WIDTH, False)
        values = load_tile(v, ids, start, length, VALUES, BLOCK_SIZE, TILE, DIM // EACH, WIDTH, True, True)
        token = start + tl.arange(0, TILE)
        seen = token < length
        if WINDOW > 0:
            seen = seen & (token >= length - WINDOW)
        s = tl.where(seen[:, None], _scores(q, keys, PAIRS, ON_GPU) * scale, -float("inf"))
        new_m = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2(s - new_m[None, :])
        fade = tl.exp2(m - new_m)
        m, totals = new_m, totals * fade[None, :] + p
        acc = _add_values(acc, fade, p.to(q[0].dtype), values, PAIRS, ON_GPU)
    total = tl.sum(totals, 0)
    if PAIRS:
        return m, total, tl.join(tl.trans(acc[0]), tl.trans(acc[1])).reshape(ROWS, DIM_POW2)
    else:
        return m, total, tl.trans(acc[0])


@triton.jit
def _merge(
    sums,
    outputs,
    first_program,
    count,
    GROUP_POW2: tl.constexpr,
    DIM_POW2: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Maximum, sum and output [rows, dim] of the `count` programs from `first_program` on, in order."""
    rows = tl.arange(0, GROUP_POW2)
    dims = tl.arange(0, DIM_POW2)
    m = tl.full([GROUP_POW2], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_POW2], tl.float32)
    acc = tl.zeros([GROUP_POW2, DIM_POW2], tl.float32)
    # Every part has seen a token, so `new_m` is finite.
    for start in range(0, count, AT_ONCE):
        for i in tl.static_range(AT_ONCE):  # past the last, that one again with no weight: loads don't wait
            nth = tl.minimum(start + i, count - 1)
            slot = (2 * (first_program + nth) + (nth == 0)).to(tl.int64)
            at = slot * GROUP_POW2 + rows
            part = tl.load(outputs + at[:, None] * DIM_POW2 + dims[None, :])
            part_total = tl.load(sums + 2 * at + 1)
            part_m = tl.where(start + i < count, tl.load(sums + 2 * at), -float("inf"))
            new_m = tl.maximum(m, part_m)
            fade = tl.exp2(m - new_m)
            weight = tl.exp2(part_m - new_m)
            m, total = new_m, total * fade + part_total * weight
            acc = acc * fade[:, None] + part * weight[:, None]
    return m, total, acc


@triton.jit
def _store(out, total, acc, v_scale, OUT: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Writes the output of one KV head's group of query heads."""
    rows = tl.arange(0, acc.shape[0])
    dims = tl.arange(0, acc.shape[1])
    mask = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    result = acc * (v_scale / total)[:, None]
    tl.store(
        out + rows[:, None] * OUT[1] + dims[None, :] * OUT[2], result.to(out.dtype.element_ty), mask=mask
    )


@triton.jit
def _store_part(
    sums, outputs, arrival, part, count, m, total, acc, GROUP_POW2: tl.constexpr, DIM_POW2: tl.constexpr
):
    """Writes a program's partial sums to slot `part`; true where it is the last of `count` to do so."""
    rows = tl.arange(0, acc.shape[0])
    at = part.to(tl.int64) * GROUP_POW2 + rows
    mask = rows < GROUP_POW2
    tl.store(sums + 2 * at, m, mask=mask)
    tl.store(sums + 2 * at + 1, total, mask=mask)
    tl.store(outputs + at[:, None] * DIM_POW2 + tl.arange(0, DIM_POW2)[None, :], acc, mask=mask[:, None])
    tl.debug_barrier()  # all threads' stores come before the one thread's release
    return tl.atomic_add(arrival, 1, sem="acq_rel") == count - 1


@triton.jit(do_not_specialize=["table_stride", "batch", "scale"])
def _paged_decode(
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
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    OUT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    START_COST: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    ON_GPU: tl.constexpr,
    SETTLED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_predecessor(OVERLAP and not SETTLED)
    LANE_HEADS: tl.constexpr = KV_HEADS // LANES
    stretch = tl.program_id(0) // LANES
    lane = tl.program_id(0) % LANES
    lane_slots = lane * (tl.num_programs(0) // LANES)
    share = tl.load(ends)
    total_work = tl.load(ends + batch) * LANE_HEADS
    rows = tl.arange(0, ROWS)
    start = stretch * share
    end = tl.minimum(start + share, total_work)
    # The head that the next stretch goes on with comes first: its parts are merged while others still run.
    last_row = tl.load(first_row + stretch + 1)
    split = end
    if end < total_work:
        before = tl.load(ends + last_row, mask=last_row > 0, other=0)
        work = tl.load(ends + 1 + last_row) - before
        split = before * LANE_HEADS + (end - before * LANE_HEADS) // work * work
        split = tl.maximum(split, start)
    after_predecessor(OVERLAP and SETTLED)
    for turn in range(2):
        begin = tl.where(turn == 0, split, start)
        stop = tl.where(turn == 0, end, split)
        row = tl.where(turn == 0, last_row, tl.load(first_row + stretch))
        row_begin = tl.load(ends + row, mask=row > 0, other=0)
        row_end = tl.load(ends + 1 + row, mask=row < batch, other=0)
        length = tl.load(seq_lens + row, mask=row < batch, other=0)
        while begin < stop:
            # What the next row begins with is read while this one is computed.
            next_end = tl.load(ends + 2 + row, mask=row + 1 < batch, other=0)
            next_length = tl.load(seq_lens + 1 + row, mask=row + 1 < batch, other=0)
            # A head's work is START_COST, then its tiles; `unit` is where these begin on the line of work.
            work = row_end - row_begin
            tiles = work - START_COST
            nth = (begin - row_begin * LANE_HEADS) // tl.maximum(work, 1)
            unit = row_begin * LANE_HEADS + nth * work + START_COST
            first = tl.maximum(begin - unit, 0)
            last = tl.minimum(tiles, stop - unit)
            if last > first:
                head = nth * LANES + lane
                skipped = tl.cdiv(length, TILE) - tiles
                at = q + row.to(tl.int64) * Q[0] + head * GROUP * Q[1]
                k_factor = 1.0
                v_factor = 1.0
                if k_scale is not None:
                    k_factor = tl.load(k_scale + head * SCALE_STRIDE)
                    v_factor = tl.load(v_scale + head * SCALE_STRIDE)
                keys = k_cache + head.to(tl.int64) * K[2]
                values = v_cache + head.to(tl.int64) * V[2]
                table_row = table + row.to(tl.int64) * table_stride
                m, total, acc = _attend(
                    _queries(at, rows, Q, GROUP, DIM, DIM_POW2, DTYPE, PAIRS),
                    keys,
                    values,
                    table_row,
                    length,
                    skipped + first,
                    skipped + last,
                    scale * k_factor,
                    K,
                    V,
                    BLOCK_SIZE,
                    TILE,
                    ROWS,
                    DIM,
                    DIM_POW2,
                    WINDOW,
                    STAGES,
                    PAIRS,
                    ON_GPU,
                )
                target = out + row.to(tl.int64) * OUT[0] + head * GROUP * OUT[1]
                if last - first == tiles:
                    if sinks is not None:
                        lanes = tl.arange(0, ROWS)
                        total = with_sink(total, m, sinks, head * GROUP + lanes, lanes < GROUP)
                    _store(target, total, acc, v_factor, OUT, GROUP, DIM)
                else:
                    # The stretch that begins a head uses its second slot, those that continue it their first.
                    first_holder = unit // share
                    count = (unit + tiles - 1) // share - first_holder + 1
                    part = 2 * (lane_slots + stretch) + (first == 0)
                    arrival = arrivals + row * KV_HEADS + head
                    if _store_part(sums, outputs, arrival, part, count, m, total, acc, GROUP_POW2, DIM_POW2):
                        tl.store(arrival, 0)
                        all_m, all_total, all_acc = _merge(
                            sums,
                            outputs,
                            lane_slots + first_holder,
                            count,
                            GROUP_POW2,
                            DIM_POW2,
                            AT_ONCE,
                        )
                        if sinks is not None:
                            lanes = tl.arange(0, GROUP_POW2)
                            all_total = with_sink(
                                all_total, all_m, sinks, head * GROUP + lanes, lanes < GROUP
                            )
                        _store(target, all_total, all_acc, v_factor, OUT, GROUP, DIM)
            begin = tl.minimum(unit + tiles, stop)
            if begin == row_end * LANE_HEADS:
                row += 1
                row_begin = row_end
                row_end = next_end
                length = next_length


_launches: dict[Any, Any] = {}


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    schedule: DecodeSchedule | None = None,
    out: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    settled: bool = False,
) -> Tensor:
    """Attention of one new token per sequence over its cached tokens, itself included.

    q and out are [batch, heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim], in q's dtype
    or fp8 with scales (fp32, [1] or [kv_heads]); block_table int32 [batch, blocks]; seq_lens int32 [batch].
    Lengths are read on the device; a row of length 0 is left as it was in `out`. `window`: how many
    positions the token sees, itself included. `sinks` [heads]: for each query head a logit that takes its
    share of the softmax and has no value (gpt-oss). `schedule` must have been updated with these lengths;
    without one, one is made for this call. `settled`: lengths, block table and schedule were written before
    the kernel that was queued last began, so that they may be read while it runs. Raises BadInput where
    shapes don't fit together.
    """
    out = torch.empty_like(q) if out is None else out
    if schedule is None:
        shape = DecodeShape(q.shape[1], k_cache.shape[2], q.shape[2], k_cache.dtype, window)
        schedule = DecodeSchedule(shape, q.shape[0], q.device)
        schedule.update(seq_lens)
    key = (
        schedule.shape,
        schedule.lanes,
        schedule.cut,
        q.dtype,
        q.stride(),
        out.stride(),
        k_cache.stride(),
        v_cache.stride(),
        k_cache.shape[1],
        block_table.dtype,
        k_scale is None or k_scale.shape[0],
        sinks is None or (sinks.dtype, sinks.shape),
        settled,
        q.device,
    )
    launch = _launches.get(key)
    if launch is None:
        _check(q, k_cache, v_cache, block_table, seq_lens, window, schedule.shape)
        require_sinks("paged_decode", q, sinks)
        launch = _launches[key] = _configure(q, k_cache, v_cache, out, k_scale, schedule, settled)
    scale = (q.shape[2] ** -0.5 if scale is None else scale) * math.log2(math.e)
    numbers = block_table.stride(0), q.shape[0], scale
    tensors = (q, k_cache, v_cache, out, block_table, seq_lens, *schedule.workspace, k_scale, v_scale, sinks)
    launch(schedule.programs, tensors, *numbers)
    return out


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    window: int | None,
    shape: DecodeShape,
) -> None:
    require_attention("paged_decode", q, k_cache, v_cache, table)
    require(
        table.shape[0] == q.shape[0] == seq_lens.shape[0],
        f"paged_decode: block_table {tuple(table.shape)} and seq_lens {tuple(seq_lens.shape)} need a row "
        f"for each of the {q.shape[0]} rows of q",
    )
    require(
        shape == DecodeShape(q.shape[1], k_cache.shape[2], q.shape[2], k_cache.dtype, window or shape.window),
        f"paged_decode: the schedule was made for {shape}, not for this q, cache and window",
    )


def _configure(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    k_scale: Tensor | None,
    schedule: DecodeSchedule,
    settled: bool = False,
) -> Launch:
    shape, cut = schedule.shape, schedule.cut
    group = shape.heads // shape.kv_heads
    dim = next_power_of_2(shape.head_dim)
    pairs = shape.is_fp8 and q.dtype != torch.float32 and _has_pairs(k_cache) and _has_pairs(v_cache)
    constants = {
        "Q": q.stride(),
        "K": k_cache.stride(),
        "V": v_cache.stride(),
        "OUT": out.stride(),
        "KV_HEADS": shape.kv_heads,
        "LANES": schedule.lanes,
        "GROUP": group,
        "GROUP_POW2": next_power_of_2(group),
        "ROWS": max(8, next_power_of_2(group)),
        "DIM": shape.head_dim,
        "DIM_POW2": dim,
        "BLOCK_SIZE": k_cache.shape[1],
        "TILE": schedule.tile,
        "WINDOW": shape.window or 0,
        "START_COST": cut.start_cost,
        "SCALE_STRIDE": int(k_scale is not None and k_scale.shape[0] > 1),
        "DTYPE": compute_dtype(q.dtype, shape.kv_dtype),
        "AT_ONCE": AT_ONCE,
        "STAGES": cut.stages,
        "PAIRS": pairs,
        "ON_GPU": q.is_cuda,
        "SETTLED": settled,
    }
    options = {"maxnreg": cut.registers} if cut.registers else {}
    return Launch(_paged_decode, constants, q.device, num_warps=cut.warps, **options)


def _has_pairs(cache: Tensor) -> bool:
    """True where two neighbours of a row of fp8 can be read as one int16."""
    *strides, dense = cache.stride()
    return dense == 1 and cache.data_ptr() % 2 == cache.shape[3] % 2 == 0 and not any(s % 2 for s in strides)
