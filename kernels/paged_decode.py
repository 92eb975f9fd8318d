"""Attention of one new token per sequence over the paged cache: flash decoding with equal shares of work.

A step's work is one line of KV tiles: sequence after sequence, KV head after KV head. A fixed number of
programs each take an equal stretch of that line, so lengths may differ as they like, and the grid does
not depend on them (CUDA graphs). Where a stretch ends inside a head, partial sums go to a workspace, and
the program that finishes a head last merges them, always in the same order: results don't vary. A program
begins with the head that it leaves to the next one, so that merging doesn't come last.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.kernels.launch import (
    Launch,
    after_predecessor,
    next_power_of_2,
    require,
    require_attention,
    require_sinks,
)
from pagecast.kernels.tile import compute_dtype, halves, load_tile, page_ids, scores, weigh, with_sink
from torch import Tensor

MERGE = 32
AT_ONCE = 4
# What starting on another head costs a program, in tiles: its pipeline drains and fills again.
START_COST = 2
SHARE = 32


@triton.jit
def _work_of(seq_lens, row, batch, TILE: tl.constexpr, WINDOW: tl.constexpr, START_COST: tl.constexpr):
    """A head's work in tiles: those it reads, and what starting on it costs; 0 for an empty row."""
    length = tl.load(seq_lens + row, mask=row < batch, other=0)
    first = tl.maximum(length - WINDOW, 0) // TILE if WINDOW > 0 else length * 0
    return tl.where(length > 0, tl.cdiv(length, TILE) - first + START_COST, 0)


@triton.jit(do_not_specialize=["batch"])
def _share_work(
    seq_lens,
    ends,
    first_row,
    batch,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    START_COST: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """ends[1 + row]: work up to the end of a row; ends[0]: work a program; first_row[p]: where p starts, the
    one after the last included."""
    after_predecessor(OVERLAP)
    total = 0
    for start in range(0, batch, CHUNK):
        total += tl.sum(_work_of(seq_lens, start + tl.arange(0, CHUNK), batch, TILE, WINDOW, START_COST))
    per_program = tl.maximum(tl.cdiv(total * KV_HEADS, PROGRAMS), 1 + START_COST)
    program = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    rows_before = tl.zeros([SHARE], tl.int32)
    done = 0
    for start in range(0, batch, CHUNK):
        row = start + tl.arange(0, CHUNK)
        work = _work_of(seq_lens, row, batch, TILE, WINDOW, START_COST)
        end = done + tl.cumsum(work, 0)
        done += tl.sum(work)
        before = (end[None, :] * KV_HEADS <= (program * per_program)[:, None]) & (row < batch)[None, :]
        rows_before += tl.sum(before.to(tl.int32), 1)
        if tl.program_id(0) == 0:
            tl.store(ends + 1 + row, end, mask=row < batch)
    tl.store(first_row + program, rows_before, mask=program <= PROGRAMS)
    if tl.program_id(0) == 0:
        tl.store(ends, per_program)


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
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over the tiles [first, last): running max [rows], sum [rows], output [rows, dim]."""
    m = tl.full([q.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], DIM_POW2], tl.float32)
    # One loop for whole and cut tiles alike: masks cost less than a second, unpipelined loop would.
    for tile in tl.range(first, last, num_stages=STAGES):
        start = tile * TILE
        ids = page_ids(table_row, start, length, BLOCK_SIZE, TILE, True)
        keys = load_tile(k, ids, start, length, K, BLOCK_SIZE, TILE, DIM, DIM_POW2, False)
        values = load_tile(v, ids, start, length, V, BLOCK_SIZE, TILE, DIM, DIM_POW2, True)
        token = start + tl.arange(0, TILE)
        seen = token < length
        if WINDOW > 0:
            seen = seen & (token >= length - WINDOW)
        s = tl.where(seen[None, :], scores(q, keys) * scale, -float("inf"))
        m, total, acc = weigh(s, values, m, total, acc, q.dtype)
    return m, total, acc


@triton.jit
def _attend_fp8(
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
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """`_attend` over an fp8 cache whose rows are dense: `q` are its even and its odd columns, in fp16."""
    even, odd = q
    HALF: tl.constexpr = DIM_POW2 // 2
    k = k.to(tl.pointer_type(tl.int16), bitcast=True)
    v = v.to(tl.pointer_type(tl.int16), bitcast=True)
    KEYS: tl.constexpr = (K[0] // 2, K[1] // 2, K[2] // 2, 1)
    VALUES: tl.constexpr = (V[0] // 2, V[1] // 2, V[2] // 2, 1)
    m = tl.full([even.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([even.shape[0]], tl.float32)
    acc_even = tl.zeros([even.shape[0], HALF], tl.float32)
    acc_odd = tl.zeros([even.shape[0], HALF], tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        start = tile * TILE
        ids = page_ids(table_row, start, length, BLOCK_SIZE, TILE, True)
        keys = load_tile(k, ids, start, length, KEYS, BLOCK_SIZE, TILE, DIM // 2, HALF, False)
        values = load_tile(v, ids, start, length, VALUES, BLOCK_SIZE, TILE, DIM // 2, HALF, True)
        token = start + tl.arange(0, TILE)
        seen = token < length
        if WINDOW > 0:
            seen = seen & (token >= length - WINDOW)
        even_keys, odd_keys = halves(keys, ON_GPU)
        s = tl.dot(odd, tl.trans(odd_keys), tl.dot(even, tl.trans(even_keys)))
        s = tl.where(seen[None, :], s * scale, -float("inf"))
        new_m = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new_m[:, None])
        fade = tl.exp2(m - new_m)
        m, total = new_m, total * fade + tl.sum(p, 1)
        weights = p.to(tl.float16)
        even_values, odd_values = halves(values, ON_GPU)
        acc_even = tl.dot(weights, even_values, acc_even * fade[:, None])
        acc_odd = tl.dot(weights, odd_values, acc_odd * fade[:, None])
    return m, total, tl.join(acc_even, acc_odd).reshape(even.shape[0], DIM_POW2)


@triton.jit
def _merge(
    sums,
    outputs,
    first_program,
    count,
    GROUP_POW2: tl.constexpr,
    DIM_POW2: tl.constexpr,
    MERGE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Maximum, sum and output [rows, dim] of the `count` programs from `first_program` on, in order."""
    rows = tl.arange(0, GROUP_POW2)
    dims = tl.arange(0, DIM_POW2)
    m = tl.full([GROUP_POW2], -float("inf"), tl.float32)
    for start in range(0, count, MERGE):
        nth = start + tl.arange(0, MERGE)
        slot = 2 * (first_program + nth) + (nth == 0)
        at = sums + 2 * (slot[:, None] * GROUP_POW2 + rows[None, :])
        there = (nth < count)[:, None] & (rows < GROUP_POW2)[None, :]
        m = tl.maximum(m, tl.max(tl.load(at, mask=there, other=-float("inf")), 0))
    total = tl.zeros([GROUP_POW2], tl.float32)
    acc = tl.zeros([GROUP_POW2, DIM_POW2], tl.float32)
    for start in range(0, count, AT_ONCE):
        for i in tl.static_range(AT_ONCE):  # past the last, that one again with no weight: loads don't wait
            nth = tl.minimum(start + i, count - 1)
            slot = (2 * (first_program + nth) + (nth == 0)).to(tl.int64)
            at = slot * GROUP_POW2 + rows
            part = tl.load(outputs + at[:, None] * DIM_POW2 + dims[None, :])
            weight = tl.where(start + i < count, tl.exp2(tl.load(sums + 2 * at) - m), 0.0)
            total += tl.load(sums + 2 * at + 1) * weight
            acc += part * weight[:, None]
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
    MERGE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    ON_GPU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_predecessor(OVERLAP)
    program = tl.program_id(0)
    share = tl.load(ends)
    total_work = tl.load(ends + batch) * KV_HEADS
    rows = tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, DIM_POW2)[None, :]
    start = program * share
    end = tl.minimum(start + share, total_work)
    # The head that the next program goes on with comes first: its parts are merged while others still run.
    last_row = tl.load(first_row + program + 1)
    split = end
    if end < total_work:
        before = tl.load(ends + last_row, mask=last_row > 0, other=0)
        work = tl.load(ends + 1 + last_row) - before
        split = before * KV_HEADS + (end - before * KV_HEADS) // work * work
        split = tl.maximum(split, start)
    for turn in range(2):
        begin = tl.where(turn == 0, split, start)
        stop = tl.where(turn == 0, end, split)
        row = tl.where(turn == 0, last_row, tl.load(first_row + program))
        while begin < stop:
            row_end = tl.load(ends + 1 + row)
            row_begin = tl.load(ends + row, mask=row > 0, other=0)
            # A head's work is START_COST, then its tiles; `unit` is where these begin on the line of work.
            work = row_end - row_begin
            tiles = work - START_COST
            head = (begin - row_begin * KV_HEADS) // tl.maximum(work, 1)
            unit = row_begin * KV_HEADS + head * work + START_COST
            first = tl.maximum(begin - unit, 0)
            last = tl.minimum(tiles, stop - unit)
            if last > first:
                length = tl.load(seq_lens + row)
                skipped = tl.cdiv(length, TILE) - tiles
                at = q + row.to(tl.int64) * Q[0] + (head * GROUP + rows) * Q[1]
                k_factor = 1.0
                v_factor = 1.0
                if k_scale is not None:
                    k_factor = tl.load(k_scale + head * SCALE_STRIDE)
                    v_factor = tl.load(v_scale + head * SCALE_STRIDE)
                keys = k_cache + head.to(tl.int64) * K[2]
                values = v_cache + head.to(tl.int64) * V[2]
                table_row = table + row.to(tl.int64) * table_stride
                if PAIRS:
                    half = 2 * tl.arange(0, DIM_POW2 // 2)[None, :]
                    there = (rows < GROUP) & (half < DIM)
                    even = tl.load(at + half * Q[2], mask=there, other=0.0).to(tl.float16)
                    odd = tl.load(at + (half + 1) * Q[2], mask=there, other=0.0).to(tl.float16)
                    m, total, acc = _attend_fp8(
                        (even, odd),
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
                        DIM,
                        DIM_POW2,
                        WINDOW,
                        STAGES,
                        ON_GPU,
                    )
                else:
                    there = (rows < GROUP) & (dims < DIM)
                    m, total, acc = _attend(
                        tl.load(at + dims * Q[2], mask=there, other=0.0).to(DTYPE),
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
                        DIM,
                        DIM_POW2,
                        WINDOW,
                        STAGES,
                    )
                target = out + row.to(tl.int64) * OUT[0] + head * GROUP * OUT[1]
                if last - first == tiles:
                    if sinks is not None:
                        lanes = tl.arange(0, ROWS)
                        total = with_sink(total, m, sinks, head * GROUP + lanes, lanes < GROUP)
                    _store(target, total, acc, v_factor, OUT, GROUP, DIM)
                else:
                    # The program that begins a head uses its second slot, those that continue it their first.
                    first_holder = unit // share
                    count = (unit + tiles - 1) // share - first_holder + 1
                    part = 2 * program + (first == 0)
                    arrival = arrivals + row * KV_HEADS + head
                    if _store_part(sums, outputs, arrival, part, count, m, total, acc, GROUP_POW2, DIM_POW2):
                        tl.store(arrival, 0)
                        all_m, all_total, all_acc = _merge(
                            sums, outputs, first_holder, count, GROUP_POW2, DIM_POW2, MERGE, AT_ONCE
                        )
                        if sinks is not None:
                            lanes = tl.arange(0, GROUP_POW2)
                            all_total = with_sink(
                                all_total, all_m, sinks, head * GROUP + lanes, lanes < GROUP
                            )
                        _store(target, all_total, all_acc, v_factor, OUT, GROUP, DIM)
            begin = tl.minimum(unit + tiles, stop)
            if begin == row_end * KV_HEADS:
                row += 1


@dataclass(frozen=True, slots=True)
class DecodeCut:
    """How decode attention uses a multiprocessor: `programs_per_sm` programs of `warps` warps, each with
    pipelines of `stages` steps, which take `tile_bytes` of K. `registers` of a thread at most; 0: any.

    Programs are brought up while the kernel before them ends. Therefore no more of them must fit on a
    multiprocessor than are meant to, or they fill the GPU unevenly: registers see to that.
    """

    tile_bytes: int
    programs_per_sm: int
    stages: int
    warps: int = 4
    registers: int = 0


WIDE_CUT = DecodeCut(8192, 4, 5, registers=128)
FP8_CUT = DecodeCut(8192, 4, 5, warps=2)


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Facts that a schedule depends on: the model's attention heads, the cache's dtype and the window."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    window: int | None = None

    @property
    def cut(self) -> DecodeCut:
        """How the work is cut up: measured on an H200."""
        return FP8_CUT if self.is_fp8 else WIDE_CUT

    @property
    def tile(self) -> int:
        """Tokens of K that a step of the loop takes."""
        row_bytes = next_power_of_2(self.head_dim) * self.kv_dtype.itemsize
        return min(128, max(16, self.cut.tile_bytes // row_bytes))

    @property
    def is_fp8(self) -> bool:
        """True where the cache holds fp8."""
        return self.kv_dtype == torch.float8_e4m3fn


class DecodeSchedule:
    """Shares of a step's work and the workspace of `paged_decode`; one serves every layer of a step.

    `update` computes the shares on the device from the lengths of the step; it and the attention that
    follows must run on one stream, and both may be captured in a CUDA graph.
    """

    def __init__(
        self, shape: DecodeShape, max_batch: int, device: torch.device | str, programs: int | None = None
    ) -> None:
        device = torch.device(device)
        self.shape = shape
        self.programs = _programs(shape, device) if programs is None else programs
        group_rows = next_power_of_2(shape.heads // shape.kv_heads)
        slots = 2 * self.programs * group_rows
        dim = next_power_of_2(shape.head_dim)
        self.ends = torch.zeros(max_batch + 1, dtype=torch.int32, device=device)
        self.first_row = torch.zeros(self.programs + 1, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(max_batch * shape.kv_heads, dtype=torch.int32, device=device)
        self.sums = torch.empty(slots * 2, dtype=torch.float32, device=device)
        self.outputs = torch.empty(slots * dim, dtype=torch.float32, device=device)
        constants = {
            "KV_HEADS": shape.kv_heads,
            "TILE": shape.tile,
            "WINDOW": shape.window or 0,
            "PROGRAMS": self.programs,
            "START_COST": START_COST,
            "CHUNK": 256,
            "SHARE": SHARE,
        }
        self._share_work = Launch(_share_work, constants, device, num_warps=4)

    def update(self, seq_lens: Tensor) -> None:
        """Shares out the work of a step with these lengths (int32 [batch], on the device; 0 for padding)."""
        self._share_work(self.programs // SHARE + 1, (seq_lens, self.ends, self.first_row), seq_lens.shape[0])


def _programs(shape: DecodeShape, device: torch.device) -> int:
    if device.type != "cuda":
        return 8
    return shape.cut.programs_per_sm * torch.cuda.get_device_properties(device).multi_processor_count


_launches: dict[Any, Launch] = {}


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
) -> Tensor:
    """Attention of one new token per sequence over its cached tokens, itself included.

    q and out are [batch, heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim], in q's dtype
    or fp8 with scales (fp32, [1] or [kv_heads]); block_table int32 [batch, blocks]; seq_lens int32 [batch].
    Lengths are read on the device; a row of length 0 is left as it was in `out`. `window`: how many
    positions the token sees, itself included. `sinks` [heads]: for each query head a logit that takes its
    share of the softmax and has no value (gpt-oss). `schedule` must have been updated with these lengths;
    without one, one is made for this call. Raises BadInput where shapes don't fit together.
    """
    out = torch.empty_like(q) if out is None else out
    if schedule is None:
        shape = DecodeShape(q.shape[1], k_cache.shape[2], q.shape[2], k_cache.dtype, window)
        schedule = DecodeSchedule(shape, q.shape[0], q.device)
        schedule.update(seq_lens)
    key = (
        schedule.shape,
        q.dtype,
        q.stride(),
        out.stride(),
        k_cache.stride(),
        v_cache.stride(),
        k_cache.shape[1],
        block_table.dtype,
        k_scale is None or k_scale.shape[0],
        sinks is None or (sinks.dtype, sinks.shape),
        q.device,
    )
    launch = _launches.get(key)
    if launch is None:
        _check(q, k_cache, v_cache, block_table, seq_lens, window, schedule.shape)
        require_sinks("paged_decode", q, sinks)
        launch = _launches[key] = _configure(q, k_cache, v_cache, out, k_scale, schedule.shape)
    tensors = (
        q,
        k_cache,
        v_cache,
        out,
        block_table,
        seq_lens,
        schedule.ends,
        schedule.first_row,
        schedule.sums,
        schedule.outputs,
        schedule.arrivals,
        k_scale,
        v_scale,
        sinks,
    )
    scale = q.shape[2] ** -0.5 if scale is None else scale
    launch(schedule.programs, tensors, block_table.stride(0), q.shape[0], scale * math.log2(math.e))
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
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, k_scale: Tensor | None, shape: DecodeShape
) -> Launch:
    group = shape.heads // shape.kv_heads
    dim = next_power_of_2(shape.head_dim)
    constants = {
        "Q": q.stride(),
        "K": k_cache.stride(),
        "V": v_cache.stride(),
        "OUT": out.stride(),
        "KV_HEADS": shape.kv_heads,
        "GROUP": group,
        "GROUP_POW2": next_power_of_2(group),
        "ROWS": max(16, next_power_of_2(group)),
        "DIM": shape.head_dim,
        "DIM_POW2": dim,
        "BLOCK_SIZE": k_cache.shape[1],
        "TILE": shape.tile,
        "WINDOW": shape.window or 0,
        "START_COST": START_COST,
        "SCALE_STRIDE": int(k_scale is not None and k_scale.shape[0] > 1),
        "DTYPE": compute_dtype(q.dtype, shape.kv_dtype),
        "MERGE": MERGE,
        "AT_ONCE": AT_ONCE,
        "STAGES": shape.cut.stages,
        "PAIRS": shape.is_fp8 and q.dtype != torch.float32 and _has_pairs(k_cache) and _has_pairs(v_cache),
        "ON_GPU": q.is_cuda,
    }
    options = {"maxnreg": shape.cut.registers} if shape.cut.registers else {}
    return Launch(_paged_decode, constants, q.device, num_warps=shape.cut.warps, **options)


def _has_pairs(cache: Tensor) -> bool:
    """True where two neighbours of a row of fp8 can be read as one int16."""
    *strides, dense = cache.stride()
    return dense == 1 and cache.data_ptr() % 2 == cache.shape[3] % 2 == 0 and not any(s % 2 for s in strides)
