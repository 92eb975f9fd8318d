"""Causal attention of chunks of new tokens over the paged cache: prefill, chunked prefill, mixed batches.

A program takes a few new tokens of one sequence and all query heads of one KV head: the rows of its tile
are (token, head in the group), so short chunks and any group fill the tile alike. Which tiles there are, and
which of them several programs share, is planned on the host once per step (prefill_plan.py).
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.kernels.launch import Launch, next_power_of_2, require, require_attention, require_sinks
from pagecast.kernels.merge_pieces import Pieces, rows_per_tile
from pagecast.kernels.prefill_plan import SHORT_KEYS
from pagecast.kernels.tile import compute_dtype, load_tile, page_ids, with_sink
from torch import Tensor
from triton.compiler.errors import CompilationError


@triton.jit
def _weigh(s, v, m, denominator, acc, DTYPE: tl.constexpr):
    """One step of the online softmax: scores in base 2 [rows, tile], v [tile, dim], sums so far."""
    new_m = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - new_m[:, None])
    fade = tl.exp2(m - new_m)
    acc = tl.dot(p.to(DTYPE), v.to(DTYPE), acc * fade[:, None], input_precision="ieee")
    return new_m, denominator * fade + tl.sum(p, 1), acc


@triton.jit
def _attend(
    q,
    k,
    v,
    table_row,
    length,
    positions,
    first,
    last,
    state,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    WINDOW: tl.constexpr,
    EDGE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over the KV tiles [first, last); EDGE masks what a row must not see."""
    m, total, acc = state
    for tile in tl.range(first, last, num_stages=STAGES):
        start = tile * TILE
        ids = page_ids(table_row, start, length, BLOCK_SIZE, TILE, EDGE)
        keys = load_tile(k, ids, start, length, K, BLOCK_SIZE, TILE, DIM, DIM_POW2, False)
        values = load_tile(v, ids, start, length, V, BLOCK_SIZE, TILE, DIM, DIM_POW2, EDGE)
        s = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee") * scale
        if EDGE:
            ago = positions[:, None] - (start + tl.arange(0, TILE))[None, :]
            seen = ago >= 0
            if WINDOW > 0:
                seen = seen & (ago < WINDOW)
            # Finite, so that a row that sees nothing of a tile stays finite; later tiles outweigh it.
            s = tl.where(seen, s, -1.0e30)
        m, total, acc = _weigh(s, values, m, total, acc, q.dtype)
    return m, total, acc


@triton.jit(do_not_specialize=["table_stride", "scale"])
def _paged_prefill(
    q,
    k_cache,
    v_cache,
    out,
    table,
    tiles,
    k_scale,
    v_scale,
    parts,
    sums,
    sinks,
    table_stride,
    scale,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    OUT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    if tl.program_id(0) >= tl.load(tiles) * KV_HEADS:
        return
    head = tl.program_id(0) % KV_HEADS
    entry = tiles + 8 * (tl.program_id(0) // KV_HEADS + 1)
    sequence, token = tl.load(entry), tl.load(entry + 1)
    count, position = tl.load(entry + 2), tl.load(entry + 3)
    length = tl.load(entry + 5)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_POW2)
    nth = tl.minimum(rows // GROUP, count - 1)
    mask = (rows < count * GROUP)[:, None] & (dims < DIM)[None, :]
    tokens = (token + nth).to(tl.int64)[:, None]
    heads = (head * GROUP + rows % GROUP)[:, None]
    at = q + tokens * Q[0] + heads * Q[1] + dims[None, :] * Q[2]
    queries = tl.load(at, mask=mask, other=0.0).to(DTYPE)
    factor = scale
    v_factor = 1.0
    if k_scale is not None:
        factor = scale * tl.load(k_scale + head * SCALE_STRIDE)
        v_factor = tl.load(v_scale + head * SCALE_STRIDE)
    last = tl.cdiv(length, TILE)
    first = tl.load(entry + 4) // TILE
    whole = first
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // TILE
        whole = tl.minimum(last, tl.cdiv(tl.maximum(length - WINDOW, 0), TILE))
    edge = tl.minimum(tl.maximum(whole, (position + 1) // TILE), last)
    k = k_cache + head.to(tl.int64) * K[2]
    v = v_cache + head.to(tl.int64) * V[2]
    table_row = table + sequence.to(tl.int64) * table_stride
    state = (
        tl.full([ROWS], -float("inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, DIM_POW2], tl.float32),
    )
    if WINDOW > 0:
        state = _attend(
            queries,
            k,
            v,
            table_row,
            length,
            position + nth,
            first,
            whole,
            state,
            factor,
            K,
            V,
            BLOCK_SIZE,
            TILE,
            DIM,
            DIM_POW2,
            WINDOW,
            True,
            1,
        )
    state = _attend(
        queries,
        k,
        v,
        table_row,
        length,
        position + nth,
        whole,
        edge,
        state,
        factor,
        K,
        V,
        BLOCK_SIZE,
        TILE,
        DIM,
        DIM_POW2,
        WINDOW,
        False,
        STAGES,
    )
    m, total, acc = _attend(
        queries,
        k,
        v,
        table_row,
        length,
        position + nth,
        edge,
        last,
        state,
        factor,
        K,
        V,
        BLOCK_SIZE,
        TILE,
        DIM,
        DIM_POW2,
        WINDOW,
        True,
        1,
    )
    if sinks is not None:
        total = with_sink(total, m, sinks, head * GROUP + rows % GROUP, rows < count * GROUP)
    result = acc * (v_factor / total)[:, None]
    slot = tl.load(entry + 6) if parts is not None else -1
    if slot < 0:
        at = out + tokens * OUT[0] + heads * OUT[1] + dims[None, :] * OUT[2]
        tl.store(at, result.to(out.dtype.element_ty), mask=mask)
    elif parts is not None:
        lanes = (slot * KV_HEADS + head) * SLOT_ROWS + rows
        tl.store(parts + lanes[:, None] * DIM_POW2 + dims[None, :], result, mask=mask)
        tl.store(sums + lanes, m + tl.log2(total), mask=rows < count * GROUP)


_launches: dict[Any, Any] = {}


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    *,
    out: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    pieces: Pieces | None = None,
    longest: int | None = None,
    rows: int | None = None,
) -> Tensor:
    """Causal attention of new tokens over all cached tokens of their sequences, themselves included.

    q and out are [tokens, heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim], in q's dtype
    or fp8 with scales (fp32, [1] or [kv_heads]), already holding the new tokens; block_table int32
    [tables, blocks]; `tiles` from `plan_prefill`, on the device, where their number is read: a CUDA graph may
    hold a call with more rows than a step's plan has. `window`: how many positions a token sees, itself
    included. `sinks` [heads]: for each query head a logit that takes its share of the softmax and has no
    value (gpt-oss). `pieces`: needed where the plan may hold cut tiles; not with a window or sinks.
    `longest`: the most keys of a sequence, where the host knows; speed depends on it, the result does not.
    `rows`: those of a tile of the plan and of `pieces`, where not `rows_per_tile`; see `TileRows`.
    Raises BadInput where shapes don't fit together.
    """
    out = torch.empty_like(q) if out is None else out
    if tiles.shape[0] <= 1:
        return out
    rows = rows or rows_per_tile(q.shape[1], k_cache.shape[2], q.dtype)
    key = (
        q.dtype,
        q.shape[1:],
        q.stride(),
        out.stride(),
        k_cache.dtype,
        k_cache.shape[1:],
        k_cache.stride(),
        v_cache.stride(),
        block_table.dtype,
        k_scale is None or k_scale.shape[0],
        window,
        q.device,
        q.data_ptr() % 16,
        pieces is None,
        sinks is None or (sinks.dtype, sinks.shape),
        longest is not None and longest <= SHORT_KEYS,
        rows,
    )
    launch = _launches.get(key)
    if launch is None:
        require_attention("paged_prefill", q, k_cache, v_cache, block_table)
        require_sinks("paged_prefill", q, sinks)
        require(
            pieces is None or (window is None and sinks is None),
            "paged_prefill: tiles with a window or with sinks are not cut in pieces",
        )
        if sinks is not None:
            launch = _plain(q, k_cache, v_cache, out, k_scale, window, rows)
        else:
            launch = _configure(q, k_cache, v_cache, out, k_scale, window, longest, rows)
        _launches[key] = launch
    scale = (q.shape[2] ** -0.5 if scale is None else scale) * math.log2(math.e)
    parts, sums = (None, None) if pieces is None else (pieces.parts, pieces.sums)
    if not isinstance(launch, Launch):
        try:
            launch(q, k_cache, v_cache, block_table, tiles, out, parts, sums, scale)
        except CompilationError:  # this Triton's Gluon differs; the plain kernel does it too
            launch = _launches[key] = _plain(q, k_cache, v_cache, out, k_scale, window, rows)
    if isinstance(launch, Launch):
        tensors = (q, k_cache, v_cache, out, block_table, tiles, k_scale, v_scale, parts, sums, sinks)
        launch((tiles.shape[0] - 1) * k_cache.shape[2], tensors, block_table.stride(0), scale)
    if pieces is not None:
        pieces.merge(tiles, out, rows)
    return out


def _configure(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    k_scale: Tensor | None,
    window: int | None,
    longest: int | None,
    rows: int,
) -> Any:
    """A `Launch` of the plain kernel, or the Hopper one where it applies and imports."""
    if q.is_cuda and k_scale is None:
        try:
            from pagecast.kernels.prefill_hopper import HopperPrefill, usable
        except (ImportError, AttributeError):
            return _plain(q, k_cache, v_cache, out, k_scale, window, rows)
        if usable(q, k_cache, v_cache, rows):
            return HopperPrefill(q, k_cache, v_cache, out, window, longest, rows)
    return _plain(q, k_cache, v_cache, out, k_scale, window, rows)


def _plain(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    k_scale: Tensor | None,
    window: int | None,
    rows: int = 128,
) -> Launch:
    heads, head_dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    dim = next_power_of_2(head_dim)
    tile, stages, options = _tile(dim, q.dtype, k_cache.dtype)
    constants = {
        "Q": q.stride(),
        "K": k_cache.stride(),
        "V": v_cache.stride(),
        "OUT": out.stride(),
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "ROWS": next_power_of_2(rows),
        "SLOT_ROWS": rows,
        "DIM": head_dim,
        "DIM_POW2": dim,
        "BLOCK_SIZE": k_cache.shape[1],
        "TILE": tile,
        "WINDOW": window or 0,
        "SCALE_STRIDE": int(k_scale is not None and k_scale.shape[0] > 1),
        "DTYPE": compute_dtype(q.dtype, k_cache.dtype),
        "STAGES": stages,
    }
    return Launch(_paged_prefill, constants, **options)


def _tile(dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[int, int, dict[str, int]]:
    """Tokens of a KV tile, pipeline stages and compiler options; measured on an H200."""
    if dtype == torch.float32:
        return 32, 3, {"num_warps": 4}
    if dim > 128:
        return 32, 5, {"num_warps": 8}
    if kv_dtype != dtype:
        return 64, 5, {"num_warps": 8}
    # 128 registers let two programs share a multiprocessor: one multiplies while the other exponentiates.
    return 64, 3, {"num_warps": 8, "maxnreg": 128}
