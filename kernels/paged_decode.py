"""Attention of one new token a sequence over the paged cache: flash decoding with equal shares of work.

A step's work is one line of KV tiles: sequence after sequence, KV head after KV head. A fixed number of
programs each take an equal stretch of that line, so lengths may differ as they like, and the grid does
not depend on them (CUDA graphs). Where a stretch ends inside a head, partial sums go to a workspace, and
the program that finishes a head last merges them, always in the same order: results don't vary.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.kernels.launch import Launch, next_power_of_2, require, require_attention
from pagecast.kernels.tile import load_tile, page_ids, scores, weigh
from torch import Tensor

# Fewest tiles a program is given: below it, merging costs more than idle multiprocessors.
MIN_TILES = 2
MERGE_ELEMENTS = 4096
PROGRAMS_PER_SM = 2
STAGES = 5
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
    MIN_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
):
    """ends[1 + row]: work up to the end of a row; ends[0]: work a program; first_row[p]: where p starts."""
    total = 0
    for start in range(0, batch, CHUNK):
        total += tl.sum(_work_of(seq_lens, start + tl.arange(0, CHUNK), batch, TILE, WINDOW, START_COST))
    per_program = tl.maximum(tl.cdiv(total * KV_HEADS, PROGRAMS), MIN_TILES + START_COST)
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
    tl.store(first_row + program, rows_before, mask=program < PROGRAMS)
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
def _merge(
    sums,
    outputs,
    out,
    first_program,
    count,
    v_scale,
    O_DIM: tl.constexpr,
    O_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Adds up the partial sums of `count` programs from `first_program` on, in order, into `out`."""
    rows = tl.arange(0, GROUP_POW2)
    dims = tl.arange(0, DIM_POW2)
    m = tl.full([GROUP_POW2], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_POW2], tl.float32)
    acc = tl.zeros([GROUP_POW2, DIM_POW2], tl.float32)
    for start in range(0, count, MERGE):
        nth = start + tl.arange(0, MERGE)
        slot = (2 * (first_program + nth) + (nth == 0)).to(tl.int64)
        there = (nth < count)[:, None] & (rows < GROUP)[None, :]
        at = slot[:, None] * GROUP_POW2 + rows[None, :]
        part_m = tl.load(sums + 2 * at, mask=there, other=-float("inf"), cache_modifier=".cg")
        part_total = tl.load(sums + 2 * at + 1, mask=there, other=0.0, cache_modifier=".cg")
        part = tl.load(
            outputs + at[:, :, None] * DIM_POW2 + dims[None, None, :],
            mask=there[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_m = tl.maximum(m, tl.max(part_m, 0))
        safe = tl.where(new_m == -float("inf"), 0.0, new_m)
        weight = tl.exp2(part_m - safe[None, :])
        fade = tl.exp2(m - safe)
        acc = acc * fade[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * fade + tl.sum(part_total * weight, 0)
        m = new_m
    mask = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    result = acc * (v_scale / tl.where(rows < GROUP, total, 1.0))[:, None]
    tl.store(out + rows[:, None] * O_HEAD + dims[None, :] * O_DIM, result.to(out.dtype.element_ty), mask=mask)


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
    table_stride,
    batch,
    scale,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
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
    MERGE: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    per_program = tl.load(ends)
    begin = program * per_program
    stop = tl.minimum(begin + per_program, tl.load(ends + batch) * KV_HEADS)
    row = tl.load(first_row + program)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_POW2)
    row_mask = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    while begin < stop:
        row_end = tl.load(ends + 1 + row)
        row_begin = tl.load(ends + row, mask=row > 0, other=0)
        work = row_end - row_begin
        head = (begin - row_begin * KV_HEADS) // tl.maximum(work, 1)
        unit = row_begin * KV_HEADS + head * work + START_COST
        tiles = work - START_COST
        first = tl.maximum(begin - unit, 0)
        last = tl.minimum(tiles, stop - unit)
        if last > first:
            length = tl.load(seq_lens + row)
            skipped = tl.cdiv(length, TILE) - tiles
            at = row.to(tl.int64) * Q[0] + (head * GROUP + rows[:, None]) * Q[1] + dims[None, :] * Q[2]
            queries = tl.load(q + at, mask=row_mask, other=0.0)
            factor = scale
            v_factor = 1.0
            if k_scale is not None:
                factor = scale * tl.load(k_scale + head * SCALE_STRIDE)
                v_factor = tl.load(v_scale + head * SCALE_STRIDE)
            m, total, acc = _attend(
                queries,
                k_cache + head.to(tl.int64) * K[2],
                v_cache + head.to(tl.int64) * V[2],
                table + row.to(tl.int64) * table_stride,
                length,
                skipped + first,
                skipped + last,
                factor,
                K,
                V,
                BLOCK_SIZE,
                TILE,
                DIM,
                DIM_POW2,
                WINDOW,
                STAGES,
            )
            out_row = out + row.to(tl.int64) * O[0] + head * GROUP * O[1]
            if last - first == tiles:
                result = acc * (v_factor / total)[:, None]
                at_out = out_row + rows[:, None] * O[1] + dims[None, :] * O[2]
                tl.store(at_out, result.to(out.dtype.element_ty), mask=row_mask)
            else:
                slot = (2 * program + (first == 0)).to(tl.int64) * GROUP_POW2 + rows
                tl.store(sums + 2 * slot, m, mask=rows < GROUP)
                tl.store(sums + 2 * slot + 1, total, mask=rows < GROUP)
                at_part = outputs + slot[:, None] * DIM_POW2 + dims[None, :]
                tl.store(at_part, acc, mask=(rows < GROUP)[:, None])
                tl.debug_barrier()
                first_program = unit // per_program
                count = (unit + tiles - 1) // per_program - first_program + 1
                arrival = arrivals + row * KV_HEADS + head
                if tl.atomic_add(arrival, 1, sem="acq_rel") == count - 1:
                    tl.store(arrival, 0)
                    _merge(
                        sums, outputs, out_row, first_program, count, v_factor, O[2], O[1],
                        GROUP, GROUP_POW2, DIM, DIM_POW2, MERGE,
                    )  # fmt: skip
        begin = tl.minimum(unit + tiles, stop)
        if begin == row_end * KV_HEADS:
            row += 1


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What a schedule depends on: the model's attention heads, the cache's dtype and the window."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    window: int | None = None

    @property
    def tile(self) -> int:
        """Tokens of K that a step of the loop takes: 16 KiB of them."""
        row_bytes = next_power_of_2(self.head_dim) * self.kv_dtype.itemsize
        return min(128, max(16, 16384 // row_bytes))


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
        self.programs = _programs(device) if programs is None else programs
        group_rows = next_power_of_2(shape.heads // shape.kv_heads)
        slots = 2 * self.programs * group_rows
        dim = next_power_of_2(shape.head_dim)
        self.ends = torch.zeros(max_batch + 1, dtype=torch.int32, device=device)
        self.first_row = torch.zeros(self.programs, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(max_batch * shape.kv_heads, dtype=torch.int32, device=device)
        self.sums = torch.empty(slots * 2, dtype=torch.float32, device=device)
        self.outputs = torch.empty(slots * dim, dtype=torch.float32, device=device)
        constants = {
            "KV_HEADS": shape.kv_heads,
            "TILE": shape.tile,
            "WINDOW": shape.window or 0,
            "PROGRAMS": self.programs,
            "START_COST": START_COST,
            "MIN_TILES": MIN_TILES,
            "CHUNK": 256,
            "SHARE": SHARE,
        }
        self._share_work = Launch(_share_work, constants, num_warps=4)

    def update(self, seq_lens: Tensor) -> None:
        """Shares out the work of a step with these lengths (int32 [batch], on the device; 0 for padding)."""
        self._share_work(-(-self.programs // SHARE), (seq_lens, self.ends, self.first_row), seq_lens.shape[0])


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 8
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


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
) -> Tensor:
    """Attention of one new token a sequence over its cached tokens, itself included.

    q and out are [batch, heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim], in q's dtype
    or fp8 with scales (fp32, [1] or [kv_heads]); block_table int32 [batch, blocks]; seq_lens int32 [batch].
    Lengths are read on the device; a row of length 0 is left as it was in `out`. `window`: how many
    positions the token sees, itself included. `schedule` must have been updated with these lengths;
    without one, one is made for this call. Raises BadInput where shapes don't fit together.
    """
    out = torch.empty_like(q) if out is None else out
    if schedule is None:
        shape = DecodeShape(q.shape[1], k_cache.shape[2], q.shape[2], k_cache.dtype, window)
        schedule = DecodeSchedule(shape, q.shape[0], q.device)
        schedule.update(seq_lens)
    key = (schedule.shape, q.dtype, q.stride(), out.stride(), k_cache.stride(), v_cache.stride(),
           k_cache.shape[1], block_table.dtype, k_scale is None or k_scale.shape[0], q.device)  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        _check(q, k_cache, v_cache, block_table, seq_lens, window, schedule.shape)
        launch = _launches[key] = _configure(q, k_cache, v_cache, out, k_scale, schedule.shape)
    tensors = (q, k_cache, v_cache, out, block_table, seq_lens, schedule.ends, schedule.first_row,
               schedule.sums, schedule.outputs, schedule.arrivals, k_scale, v_scale)  # fmt: skip
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
        "O": out.stride(),
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
        "MERGE": max(1, MERGE_ELEMENTS // (next_power_of_2(group) * dim)),
        "STAGES": STAGES,
    }
    return Launch(_paged_decode, constants, num_warps=4)
