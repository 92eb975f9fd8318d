"""Grouped matrix products: rows of each expert times that expert's matrix, tile by tile of a `Routes` table.

`gate_up_silu` gathers the tokens of each row and multiplies gate by up where they are computed; `down` reads
and writes rows in their order. A program computes one tile of rows and one of columns, and ends at once where
the table has no such tile: the grid depends on the number of tokens alone (CUDA graphs). With fp8 weights,
rows are quantised as in `fp8_linear`.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from pagecast.kernels.fp8_linear import GROUP
from pagecast.kernels.launch import Launch, after_predecessor, next_power_of_2, require
from pagecast.kernels.routing import TILE_FIELDS, Routes
from pagecast.kernels.tensor_map import matrix_map
from torch import Tensor

_ROW_BYTES = 16  # what the tensor memory accelerator needs rows to be a multiple of


@dataclass(frozen=True, slots=True)
class Blocking:
    """How a product is cut: `columns` of the result per program (of gate and of up each), `depth` of the
    inner dimension per step of a pipeline of `stages`."""

    columns: int
    depth: int
    stages: int
    warps: int


@triton.jit
def _product(
    a,
    weights,
    first_column,
    second_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    PAIR: tl.constexpr,
):
    """Rows at the pointers `a` [ROWS, 1] times COLUMNS lines of `weights` from `first_column` on; with PAIR
    also those from `second_column` on (else zeros). fp32 [ROWS, COLUMNS] each."""
    one = tl.zeros([ROWS, COLUMNS], tl.float32)
    other = tl.zeros([ROWS, COLUMNS], tl.float32)
    lanes = tl.arange(0, DEPTH)[None, :]
    for k in tl.range(0, INNER, DEPTH, num_stages=STAGES):
        if INNER % DEPTH == 0:
            tile = tl.load(a + k + lanes)
        else:
            tile = tl.load(a + k + lanes, mask=k + lanes < INNER, other=0.0)
        one = tl.dot(tile, weights.load([first_column, k]).T, one, input_precision="ieee")
        if PAIR:
            other = tl.dot(tile, weights.load([second_column, k]).T, other, input_precision="ieee")
    return one, other


@triton.jit
def _fp8_product(
    a,
    a_scales,
    weights,
    scales,
    first_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`_product` of fp8 rows and weights, whose scales begin at `a_scales` [ROWS] and `scales`.

    Weights are the rows of the tensor cores' tiles, as rows of an expert may be few. fp32 [ROWS, COLUMNS].
    """
    GROUPS: tl.constexpr = INNER // GROUP
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    lanes = tl.arange(0, GROUP)[None, :]
    at = scales + (first_column + tl.arange(0, COLUMNS)) // SCALE_ROWS * GROUPS
    for group in tl.range(0, GROUPS, num_stages=STAGES):
        tile = tl.load(a + group * GROUP + lanes)
        product = tl.dot(weights.load([first_column, group * GROUP]), tile.T)
        acc += product * tl.load(at + group)[:, None] * tl.load(a_scales + group)[None, :]
    return acc.T


@triton.jit
def _gate_up_silu(
    x,
    x_scales,
    weights,
    scales,
    row_tokens,
    tiles,
    counts,
    out,
    LOCAL: tl.constexpr,
    LOCAL_POW2: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    FIELDS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_predecessor(OVERLAP)
    if tl.program_id(0) == 0:
        expert_lanes = tl.arange(0, LOCAL_POW2)
        nothing = tl.zeros([LOCAL_POW2], tl.int32)
        tl.store(counts + expert_lanes, nothing, mask=expert_lanes < LOCAL)
    ACROSS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    line = tiles + tl.program_id(0) // ACROSS * FIELDS
    expert = tl.load(line)
    if expert >= 0:
        column = tl.program_id(0) % ACROSS * COLUMNS
        row = tl.load(line + 1) + tl.arange(0, ROWS)
        live = row < tl.load(line + 2)
        token = tl.load(row_tokens + row, mask=live, other=0).to(tl.int64)
        first = expert * 2 * WIDTH + column
        at = x + token[:, None] * INNER
        second = first + WIDTH
        if SCALE_ROWS > 0:
            by = x_scales + token * (INNER // DEPTH)
            gate = _fp8_product(
                at, by, weights, scales, first, ROWS, COLUMNS, INNER, SCALE_ROWS, DEPTH, STAGES
            )
            up = _fp8_product(
                at, by, weights, scales, second, ROWS, COLUMNS, INNER, SCALE_ROWS, DEPTH, STAGES
            )
        else:
            gate, up = _product(at, weights, first, second, ROWS, COLUMNS, DEPTH, INNER, STAGES, True)
        value = gate / (1.0 + tl.exp(-gate)) * up
        columns = column + tl.arange(0, COLUMNS)
        to = out + row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=live[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def _down(
    x,
    x_scales,
    weights,
    scales,
    tiles,
    out,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    FIELDS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_predecessor(OVERLAP)
    ACROSS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    line = tiles + tl.program_id(0) // ACROSS * FIELDS
    expert = tl.load(line)
    if expert >= 0:
        column = tl.program_id(0) % ACROSS * COLUMNS
        row = tl.load(line + 1) + tl.arange(0, ROWS)
        end = tl.load(line + 2)
        source = tl.minimum(row, end - 1).to(tl.int64)
        at = x + source[:, None] * INNER
        first = expert * WIDTH + column
        if SCALE_ROWS > 0:
            by = x_scales + source * (INNER // DEPTH)
            value = _fp8_product(
                at, by, weights, scales, first, ROWS, COLUMNS, INNER, SCALE_ROWS, DEPTH, STAGES
            )
        else:
            value, _ = _product(at, weights, first, first, ROWS, COLUMNS, DEPTH, INNER, STAGES, False)
        columns = column + tl.arange(0, COLUMNS)
        to = out + row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        live = (row < end)[:, None] & (columns < WIDTH)[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=live)


_launches: dict[Any, Launch] = {}


class Fp8Rows(NamedTuple):
    """Rows of a product with fp8 weights: scales of the rows, fp32 [rows, inner / 128], and of the weights,
    [experts, outputs / n, inner / 128]; `dtype` is that of the result."""

    row_scales: Tensor
    scales: Tensor
    dtype: torch.dtype


def gate_up_silu(
    x: Tensor, weight: Tensor, routes: Routes, counts: Tensor, blocking: Blocking, fp8: Fp8Rows | None = None
) -> Tensor:
    """silu(gate) * up of each row's token, [rows, width]: x is dense [tokens, hidden], weight dense
    [experts, 2 * width, hidden] with the gate first. Zeroes `counts`, which `route` was given."""
    _, twice, inner = weight.shape
    _check("gate_up_silu", x, weight, inner, fp8)
    rows, width = routes.tokens.shape[0], twice // 2
    row_scales, scales, dtype = fp8 or (None, None, x.dtype)
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    if not rows:
        return out
    key = ("up", x.device, x.dtype, dtype, weight.shape, routes.tile_rows, blocking, _scale_rows(weight, fp8))
    launch = _launches.get(key)
    if launch is None:
        launch = gate_up_launch(weight.shape, routes.tile_rows, blocking, x.device, _scale_rows(weight, fp8))
        _launches[key] = launch
    matrix = matrix_map(weight, blocking.columns, blocking.depth)
    launch(
        routes.tiles.shape[0] * -(-width // blocking.columns),
        (x, row_scales, matrix, scales, routes.tokens, routes.tiles, counts, out),
    )
    return out


def down(x: Tensor, weight: Tensor, routes: Routes, blocking: Blocking, fp8: Fp8Rows | None = None) -> Tensor:
    """Each row of x, dense [rows, width], times its expert's weight, dense [experts, hidden, width]: [rows,
    hidden]. Rows that are in no tile are left as they are."""
    _, width, inner = weight.shape
    _check("down", x, weight, inner, fp8)
    row_scales, scales, dtype = fp8 or (None, None, x.dtype)
    out = torch.empty(x.shape[0], width, dtype=dtype, device=x.device)
    if not x.shape[0]:
        return out
    scale_rows = _scale_rows(weight, fp8)
    key = ("down", x.device, x.dtype, dtype, weight.shape, routes.tile_rows, blocking, scale_rows)
    launch = _launches.get(key)
    if launch is None:
        launch = down_launch(weight.shape, routes.tile_rows, blocking, x.device, scale_rows)
        _launches[key] = launch
    programs = routes.tiles.shape[0] * -(-width // blocking.columns)
    matrix = matrix_map(weight, blocking.columns, blocking.depth)
    launch(programs, (x, row_scales, matrix, scales, routes.tiles, out))
    return out


def _scale_rows(weight: Tensor, fp8: Fp8Rows | None) -> int:
    """Outputs that share a scale; 0 where weights are not fp8."""
    return 0 if fp8 is None else weight.shape[1] // fp8.scales.shape[1]


def _check(name: str, x: Tensor, weight: Tensor, inner: int, fp8: Fp8Rows | None) -> None:
    require(
        x.dtype == weight.dtype
        and x.shape[1] == inner
        and x.is_contiguous()
        and weight.is_contiguous()
        and inner * weight.element_size() % _ROW_BYTES == 0,
        f"{name}: x {tuple(x.shape)} {x.dtype} doesn't fit weight {tuple(weight.shape)} {weight.dtype}; both "
        f"must be dense, of one dtype and inner size, with rows of a multiple of {_ROW_BYTES} bytes",
    )
    if fp8 is not None:
        groups = (x.shape[0], inner // GROUP)
        require(
            inner % GROUP == 0
            and fp8.row_scales.shape == groups
            and fp8.scales.shape[::2] == (weight.shape[0], groups[1])
            and weight.shape[1] % fp8.scales.shape[1] == 0
            and fp8.row_scales.is_contiguous()
            and fp8.scales.is_contiguous(),
            f"{name}: fp8 x {tuple(x.shape)} and weight {tuple(weight.shape)} don't fit scales "
            f"{tuple(fp8.row_scales.shape)} and {tuple(fp8.scales.shape)}; each {GROUP} inputs have one",
        )


def gate_up_launch(
    shape: tuple[int, ...], tile_rows: int, blocking: Blocking, device: torch.device, scale_rows: int = 0
) -> Launch:
    """The launch of `gate_up_silu` for a weight of this shape; `scale_rows` outputs share an fp8 scale."""
    experts, twice, inner = shape
    constants = {
        "LOCAL": experts,
        "LOCAL_POW2": next_power_of_2(experts),
        "WIDTH": twice // 2,
        "INNER": inner,
    }
    return _launch(_gate_up_silu, constants, tile_rows, blocking, device, scale_rows)


def down_launch(
    shape: tuple[int, ...], tile_rows: int, blocking: Blocking, device: torch.device, scale_rows: int = 0
) -> Launch:
    """The launch of `down` for a weight of this shape; `scale_rows` outputs share an fp8 scale."""
    _, width, inner = shape
    return _launch(_down, {"WIDTH": width, "INNER": inner}, tile_rows, blocking, device, scale_rows)


def _launch(
    kernel: Any,
    constants: dict[str, int],
    tile_rows: int,
    blocking: Blocking,
    device: torch.device,
    scale_rows: int,
) -> Launch:
    constants |= {
        "ROWS": tile_rows,
        "COLUMNS": blocking.columns,
        "DEPTH": GROUP if scale_rows else blocking.depth,
        "STAGES": blocking.stages,
        "FIELDS": TILE_FIELDS,
        "SCALE_ROWS": scale_rows,
    }
    return Launch(kernel, constants, device, num_warps=blocking.warps)
