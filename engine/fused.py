"""The small operations of `ops` and the draw of `sampling` as one Triton kernel each.

They read and write what they must once, and compute in fp32; `ops` and `sampling` say what they compute.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from pagecast.engine.shard import Shard, VocabPart
from pagecast.kernels.launch import (
    Launch,
    after_predecessor,
    let_next_start,
    next_power_of_2,
    wait_for_predecessor,
)
from pagecast.kernels.rms_scale import rms_scale
from torch import Tensor

_SPLITS = 8
_DRAW_BLOCK = 2048
_MUL_BLOCK = 1024
# Larger where each program reads a whole row of states.
_SCALED_MUL_BLOCK = 4096
_COPY_BLOCK = 512
_launches: dict[Any, Launch] = {}


class DrawOptions(Protocol):
    """Inputs of a draw by a `Sampler`: its rows' parameters, where their newest tokens go, and which tokens
    have their logits here."""

    temperature: Tensor
    seed: Tensor
    newest: Tensor
    shard: Shard

    def part(self, columns: int) -> VocabPart:
        """The tokens of `columns` columns of logits."""
        ...


def _launch(kernel: Any, on: Tensor, key: Any, constants: dict[str, Any], warps: int) -> Launch:
    launch = _launches.get((kernel, on.device, key))
    if launch is None:
        launch = _launches[kernel, on.device, key] = Launch(kernel, constants, on.device, num_warps=warps)
    return launch


@triton.jit(do_not_specialize=["eps"])
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    total,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDENDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * WIDTH
    lanes = tl.arange(0, BLOCK)
    mask = lanes < WIDTH
    factor = tl.load(weight + lanes, mask=mask, other=0.0).to(tl.float32)
    wait_for_predecessor(OVERLAP)
    wide = tl.load(x + row + lanes, mask=mask, other=0.0).to(tl.float32)
    for nth in tl.static_range(1, ADDENDS):
        part = tl.num_programs(0).to(tl.int64) * WIDTH * nth
        wide += tl.load(x + part + row + lanes, mask=mask, other=0.0)
    if residual is not None:
        wide += tl.load(residual + row + lanes, mask=mask, other=0.0).to(tl.float32)
        tl.store(total + row + lanes, wide.to(total.dtype.element_ty), mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide) / WIDTH + eps)
    tl.store(out + row + lanes, (wide * scale * factor).to(out.dtype.element_ty), mask=mask)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`ops.add_rms_norm` for dense tensors."""
    *addends, tokens, width = x.shape
    block = next_power_of_2(width)
    dtype = x.dtype if residual is None else residual.dtype
    out = torch.empty(tokens, width, dtype=dtype, device=x.device)
    total = x if residual is None else torch.empty_like(residual)
    key, warps = (x.dtype, dtype, width, residual is None, *addends), 8 if block > 2048 else 4
    constants = {"WIDTH": width, "BLOCK": block, "ADDENDS": addends[0] if addends else 1}
    launch = _launch(_add_rms_norm, x, key, constants, warps)
    launch(tokens, (x, residual, weight, out, total), eps)
    return out, total


@triton.jit(do_not_specialize=["first"])
def _embed_share(
    tokens,
    weight,
    out,
    first,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_predecessor(OVERLAP)
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i = (tl.program_id(0) // PARTS).to(tl.int64)
    lanes = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    row = (tl.load(tokens + i) - first).to(tl.int64)
    here = (row >= 0) & (row < ROWS) & (lanes < WIDTH)
    value = tl.load(weight + row * WIDTH + lanes, mask=here, other=0.0)
    tl.store(out + i * WIDTH + lanes, value, mask=lanes < WIDTH)


def embed_share(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    """`ops.embed_share` for dense weights."""
    rows, width = weight.shape
    out = torch.empty(tokens.shape[0], width, dtype=weight.dtype, device=weight.device)
    key = (tokens.dtype, weight.dtype, rows, width)
    constants = {"ROWS": rows, "WIDTH": width, "BLOCK": _MUL_BLOCK}
    launch = _launch(_embed_share, weight, key, constants, 4)
    launch(tokens.shape[0] * -(-width // _MUL_BLOCK), (tokens, weight, out), first)
    return out


@triton.jit(do_not_specialize=["n"])
def _copy_numbers(source, target, n, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    after_predecessor(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


def copy_numbers(source: Tensor, target: Tensor) -> None:
    """`ops.copy_numbers` of a few numbers, of which one side may be pinned host memory."""
    on = target if target.is_cuda else source
    launch = _launch(_copy_numbers, on, target.is_cuda, {"BLOCK": _COPY_BLOCK}, 4)
    launch(-(-len(source) // _COPY_BLOCK), (source, target), len(source))


@triton.jit(do_not_specialize=["n"])
def _put_numbers(places, numbers, target, n, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    after_predecessor(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + at, mask=at < n, other=0)
    tl.store(target + place, tl.load(numbers + at, mask=at < n), mask=at < n)


def put_numbers(places: Tensor, numbers: Tensor, target: Tensor) -> None:
    """`ops.put_numbers` on the device."""
    launch = _launch(_put_numbers, target, None, {"BLOCK": _COPY_BLOCK}, 4)
    launch(-(-len(places) // _COPY_BLOCK), (places, numbers, target), len(places))


@triton.jit(do_not_specialize=["eps"])
def _silu_mul(
    gate_up,
    out,
    states,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HIDDEN: tl.constexpr,
    HIDDEN_POW2: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_predecessor(OVERLAP)
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    lanes = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + lanes, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + lanes, mask=mask, other=0.0).to(tl.float32)
    if states is not None:
        scale = rms_scale(states, row, eps, HIDDEN, HIDDEN_POW2)
        gate *= scale
        up *= scale
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + lanes, value.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor, states: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """`ops.silu_mul` for dense [tokens, 2 * width] and dense states."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    hidden = 1 if states is None else states.shape[1]
    block, warps = (_MUL_BLOCK, 4) if states is None else (_SCALED_MUL_BLOCK, 8)
    constants = {"WIDTH": width, "BLOCK": block, "HIDDEN": hidden, "HIDDEN_POW2": next_power_of_2(hidden)}
    key = (gate_up.dtype, width, None if states is None else hidden)
    launch = _launch(_silu_mul, gate_up, key, constants, warps)
    launch(tokens * -(-width // block), (gate_up, out, states), eps)
    return out


@triton.jit(do_not_specialize=["columns"])
def _place(
    rows,
    ids,
    positions,
    newest,
    tables,
    angles,
    new_ids,
    turns,
    slots,
    lens,
    columns,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_predecessor(OVERLAP)
    i = tl.program_id(0).to(tl.int64)
    row = tl.maximum(tl.load(rows + i), 0).to(tl.int64)
    given = tl.load(ids + i)
    position = tl.load(positions + i)
    at = tl.maximum(position, 0).to(tl.int64)
    lanes = tl.arange(0, DIM_POW2)
    turn = tl.load(angles + at * DIM + lanes, mask=lanes < DIM, other=0.0)
    tl.store(turns + i * DIM + lanes, turn, mask=lanes < DIM)
    block = tl.load(tables + row * columns + at // BLOCK_SIZE)
    slot = (block * BLOCK_SIZE + at % BLOCK_SIZE).to(tl.int32)
    tl.store(slots + i, tl.where(position < 0, -1, slot))
    tl.store(lens + i, position + 1)
    tl.store(new_ids + i, tl.where(given < 0, tl.load(newest + row), given))


def place(
    rows: Tensor,
    ids: Tensor,
    positions: Tensor,
    newest: Tensor,
    tables: Tensor,
    angles: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`ops.place` in one launch."""
    n, dim = rows.shape[0], angles.shape[1]
    new_ids, slots, lens = (torch.empty_like(rows) for _ in range(3))
    turns = torch.empty(n, dim, dtype=angles.dtype, device=angles.device)
    constants = {"BLOCK_SIZE": block_size, "DIM": dim, "DIM_POW2": next_power_of_2(dim)}
    launch = _launch(_place, rows, (block_size, dim), constants, 1)
    tensors = (rows, ids, positions, newest, tables, angles, new_ids, turns, slots, lens)
    launch(n, tensors, tables.stride(0))
    return new_ids, turns, slots, lens


@triton.jit
def _mix(x):
    """`sampling._mix` for uint32."""
    x = x ^ (x >> 16)
    x = (x.to(tl.int32, bitcast=True) * 0x7FEB352D).to(tl.uint32, bitcast=True)
    x = x ^ (x >> 15)
    x = (x.to(tl.int32, bitcast=True) * -2073254261).to(tl.uint32, bitcast=True)  # 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log2(x, ON_GPU: tl.constexpr):
    """The GPU's own approximation, some 20 instructions cheaper than the exact one."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def _gumbel2(key, step, tokens, ON_GPU: tl.constexpr):
    """`sampling.gumbel` over log(2), but for a constant; `key` and `step` are the row's, uint32."""
    hashed = _mix((tokens * step.to(tl.int32, bitcast=True)).to(tl.uint32, bitcast=True) + key)
    u = (hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # log(1 - u), which would lose the smallest u: they make the largest noise.
    small = u * (1.4426950408889634 + u * (0.7213475204444817 + u * 0.4808983469629878))
    wait = tl.where(u < 0.001, small, -_log2(1.0 - u, ON_GPU))
    return -_log2(wait, ON_GPU)


@triton.jit
def _draw(
    logits,
    rows,
    positions,
    temperature,
    seed,
    best,
    place,
    COLUMNS: tl.constexpr,
    USED: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,
    ON_GPU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best noisy logit of a share of the columns, and its token; -1 where one is NaN or +inf.

    The logits have COLUMNS columns, of which the first USED are those of tokens from FIRST on.
    """
    after_predecessor(OVERLAP)
    i = (tl.program_id(0) // SPLITS).to(tl.int64)
    split = tl.program_id(0) % SPLITS
    row = tl.load(rows + i)
    warmth = tl.load(temperature + row)
    factor = tl.where(warmth > 0, 1.4426950408889634 / tl.maximum(warmth, 1e-5), 1.0)
    key = _mix(tl.load(seed + row).to(tl.uint32, bitcast=True))
    key = _mix(key + tl.load(positions + i).to(tl.uint32, bitcast=True))
    step = _mix(key ^ 0x5BD1E995) | 1
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    at = tl.full([BLOCK], 0, tl.int32)
    bad = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, SHARE, BLOCK):
        column = split * SHARE + start + lanes
        token = FIRST + column
        value = tl.load(logits + i * COLUMNS + column, mask=column < USED, other=-float("inf")).to(tl.float32)
        bad = tl.where(value < float("inf"), bad, 1)
        value = value * factor
        if warmth > 0:
            value += _gumbel2(key, step, token, ON_GPU)
        better = value > top
        top = tl.where(better, value, top)
        at = tl.where(better, token, at)
    most = tl.max(top, 0)
    first = tl.min(tl.where(top == most, at, FIRST + COLUMNS), 0)
    tl.store(best + i * SPLITS + split, most)
    tl.store(place + i * SPLITS + split, tl.where(tl.max(bad, 0) > 0, -1, first))


@triton.jit(do_not_specialize=["n"])
def _settle(
    shares,
    rows,
    forced,
    newest,
    out,
    n,
    GPUS: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    VOCAB: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best of all shares; writes the token, and -1 for a row whose logits are not finite.

    `shares` int32 [GPUS, 2, n, SPLITS] holds what `_draw` wrote: float32 bits of the best, and their tokens.
    """
    after_predecessor(OVERLAP)
    i = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    mask = lanes < GPUS * SPLITS
    at = lanes // SPLITS * (2 * n * SPLITS) + i * SPLITS + lanes % SPLITS
    lowest = tl.full([LANES], -float("inf"), tl.float32)
    tops = tl.where(mask, tl.load(shares + at, mask=mask, other=0).to(tl.float32, bitcast=True), lowest)
    places = tl.load(shares + n * SPLITS + at, mask=mask, other=VOCAB)
    most = tl.max(tops, 0)
    likeliest = tl.min(tl.where(tops == most, places, VOCAB), 0)
    bad = (tl.min(places, 0) < 0) | (most == -float("inf"))
    choice = tl.load(forced + i)
    token = tl.where(choice >= 0, choice, tl.minimum(tl.maximum(likeliest, 0), VOCAB - 1))
    tl.store(newest + tl.load(rows + i), token)
    tl.store(out + i, tl.where(bad, -1, token))


def sample(logits: Tensor, rows: Tensor, positions: Tensor, forced: Tensor, sampler: DrawOptions) -> Tensor:
    """`Sampler.sample` without filters, for dense logits."""
    n, columns = logits.shape
    shard, part = sampler.shard, sampler.part(columns)
    out = torch.empty(n, dtype=torch.int32, device=logits.device)
    shares_here = torch.empty(2, n, _SPLITS, dtype=torch.int32, device=logits.device)
    share = -(-columns // (_SPLITS * _DRAW_BLOCK)) * _DRAW_BLOCK
    constants = {"COLUMNS": columns, "USED": part.used, "FIRST": part.first}
    constants |= {"BLOCK": _DRAW_BLOCK, "SPLITS": _SPLITS, "SHARE": share, "ON_GPU": logits.is_cuda}
    draw = _launch(_draw, logits, (logits.dtype, columns, part), constants, 8)
    best = shares_here[0].view(torch.float32)
    draw(n * _SPLITS, (logits, rows, positions, sampler.temperature, sampler.seed, best, shares_here[1]))
    shares = shard.gather(shares_here)
    lanes = next_power_of_2(shard.size * _SPLITS)
    constants = {"GPUS": shard.size, "SPLITS": _SPLITS, "LANES": lanes, "VOCAB": part.vocab}
    settle = _launch(_settle, logits, (shard.size, part.vocab), constants, 1)
    settle(n, (shares, rows, forced, sampler.newest, out), n)
    return out
