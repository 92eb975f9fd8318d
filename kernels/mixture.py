"""A mixture of experts over a step's tokens: routing, two grouped products, weighted sum; five launches.

With fp8 experts two more launches quantise what goes into the products.

Products are cut by how many rows an expert gets on average, which follows from the number of tokens alone.
Few rows: the time is that of reading the experts' matrices, so tiles are flat and many. Many rows: the time
is arithmetic, so tiles are as large as registers and shared memory allow.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.kernels.fp8_linear import quantise_activations
from pagecast.kernels.grouped_gemm import Blocking, Fp8Rows, down, gate_up_silu
from pagecast.kernels.launch import Launch, after_predecessor, require
from pagecast.kernels.routing import Routes, route
from torch import Tensor

_SUM_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows of a tile, and the blocking of both products."""

    tile_rows: int
    up: Blocking
    down: Blocking


# By the average number of rows of an expert (up to), for 16-bit weights. Of four plans per size, the fastest
# on an H200 with Qwen3-30B-A3B's experts at 1, 8, 64, 256, 2048 and 8192 tokens.
_PLANS: tuple[tuple[float, Plan], ...] = (
    (2, Plan(16, Blocking(64, 128, 4, 4), Blocking(64, 128, 5, 4))),
    (12, Plan(16, Blocking(64, 128, 3, 4), Blocking(128, 128, 3, 4))),
    (40, Plan(32, Blocking(64, 128, 3, 4), Blocking(128, 128, 3, 4))),
    (80, Plan(64, Blocking(64, 64, 4, 4), Blocking(128, 64, 4, 4))),
    (float("inf"), Plan(128, Blocking(128, 64, 4, 8), Blocking(256, 64, 4, 8))),
)
_WIDE_PLAN = Plan(16, Blocking(32, 32, 2, 4), Blocking(32, 32, 2, 4))
"""For 32-bit weights, which are there to compare results: their products don't use the tensor cores."""


# For fp8 weights, likewise.
_FP8_PLANS: tuple[tuple[float, Plan], ...] = (
    (12, Plan(16, Blocking(128, 128, 5, 4), Blocking(128, 128, 5, 4))),
    (20, Plan(16, Blocking(128, 128, 4, 4), Blocking(128, 128, 4, 4))),
    (40, Plan(32, Blocking(128, 128, 4, 4), Blocking(128, 128, 4, 4))),
    (float("inf"), Plan(64, Blocking(128, 128, 4, 4), Blocking(128, 128, 4, 4))),
)


def plan_of(tokens: int, active: int, experts: int, dtype: torch.dtype) -> Plan:
    """How the products for so many tokens are cut, where each goes to `active` of `experts` experts.

    `dtype` is that of the weights.
    """
    if dtype.itemsize > 2:
        return _WIDE_PLAN
    rows = tokens * active / experts
    return next(plan for most, plan in (_PLANS if dtype.itemsize == 2 else _FP8_PLANS) if rows <= most)


@triton.jit
def _weigh(
    y,
    weights,
    rows,
    out,
    WIDTH: tl.constexpr,
    ACTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A token's rows times their weights, added in the order of its experts' likelihood."""
    after_predecessor(OVERLAP)
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    lanes = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(ACTIVE):
        row = tl.load(rows + token * ACTIVE + i).to(tl.int64)
        weight = tl.load(weights + token * ACTIVE + i)
        value = tl.load(y + row * WIDTH + lanes, mask=inside & (lanes * 0 + row >= 0), other=0.0)
        total += weight * value.to(tl.float32)
    tl.store(out + token * WIDTH + lanes, total.to(out.dtype.element_ty), mask=inside)


_launches: dict[Any, Launch] = {}


def weigh(y: Tensor, routes: Routes) -> Tensor:
    """The weighted sum of each token's rows of dense y [rows, hidden]: [tokens, hidden]; 0 if it has none."""
    (tokens, active), width = routes.weights.shape, y.shape[1]
    out = torch.empty(tokens, width, dtype=y.dtype, device=y.device)
    if not tokens:
        return out
    key = (y.device, y.dtype, width, active)
    launch = _launches.get(key)
    if launch is None:
        constants = {"WIDTH": width, "ACTIVE": active, "BLOCK": _SUM_COLUMNS}
        launch = _launches[key] = Launch(_weigh, constants, y.device, num_warps=4)
    launch(tokens * -(-width // _SUM_COLUMNS), (y, routes.weights, routes.rows, out))
    return out


def mixture(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down_weight: Tensor,
    counts: Tensor,
    active: int,
    normalised: bool,
    *,
    first: int = 0,
    slots: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """Output of a mixture of experts for x, dense [tokens, hidden]; the same shape.

    `logits` [tokens, experts] are the router's. The experts that are here, from number `first` on, have
    `gate_up` [here, 2 * width, hidden] (the gate first) and `down_weight` [here, hidden, width]; others add
    nothing. `counts` int32 [here] is workspace: zero before and after. See `route` for the rest. `scales`:
    those of both weights where they are fp8, fp32 [here, outputs / n, inputs / 128] for any n. `plan`: how
    the products are cut, in place of `plan_of`'s choice. Errors: BadInput where shapes don't fit.
    """
    require(
        x.ndim == 2 and logits.shape[0] == x.shape[0] and gate_up.shape[0] == counts.shape[0],
        f"mixture: x {tuple(x.shape)}, logits {tuple(logits.shape)}, gate_up {tuple(gate_up.shape)} and "
        f"counts {tuple(counts.shape)} don't fit each other",
    )
    plan = plan or plan_of(x.shape[0], active, logits.shape[1], gate_up.dtype)
    routes = route(logits, counts, active, plan.tile_rows, normalised=normalised, first=first, slots=slots)
    if scales is None:
        hidden = gate_up_silu(x, gate_up, routes, counts, plan.up)
        return weigh(down(hidden, down_weight, routes, plan.down), routes)
    numbers, row_scales = quantise_activations(x)
    fp8 = Fp8Rows(row_scales, scales[0], x.dtype)
    hidden = gate_up_silu(numbers, gate_up, routes, counts, plan.up, fp8)
    numbers, row_scales = quantise_activations(hidden)
    fp8 = Fp8Rows(row_scales, scales[1], x.dtype)
    return weigh(down(numbers, down_weight, routes, plan.down, fp8), routes)
