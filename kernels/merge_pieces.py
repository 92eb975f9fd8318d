"""Merge of the tiles of prefill attention whose keys were cut into pieces (see prefill_plan.py).

Each piece left its output as if it were all, and for each row the logarithm of the sum it was divided by;
the weights that follow from these add the pieces up, always in the same order.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.kernels.launch import Launch, after_predecessor, next_power_of_2
from pagecast.kernels.prefill_plan import most_slots
from torch import Tensor

ROWS = 128
FP32_ROWS = 16
LANES = 4
WARPS = 4
AT_ONCE = 8
PROGRAMS_PER_SM = 4


@triton.jit
def _piece(parts, sums, lanes, nth, number, STRIDE: tl.constexpr, DIM_POW2: tl.constexpr):
    """Sum [lanes] and output [lanes, dim] of a tile's piece; past the last, that one's with a sum of 0.

    Nothing is masked, so that all loads are under way at once.
    """
    at = tl.minimum(nth, number - 1) * STRIDE + lanes
    part = tl.load(parts + at[:, None] * DIM_POW2 + tl.arange(0, DIM_POW2)[None, :])
    return tl.where(nth < number, tl.load(sums + at), -float("inf")), part


@triton.jit
def _merge(
    parts,
    sums,
    plan,
    out,
    OUT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each program takes some rows of every n-th tile that was cut."""
    after_predecessor(OVERLAP)
    BLOCKS: tl.constexpr = ROWS // LANES
    STRIDE: tl.constexpr = KV_HEADS * ROWS
    merges = plan + 8 * (1 + tl.load(plan))
    units = tl.load(plan + 1) * KV_HEADS * BLOCKS
    dims = tl.arange(0, DIM_POW2)[None, :]
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        entry = merges + 8 * (unit // (KV_HEADS * BLOCKS))
        head = unit // BLOCKS % KV_HEADS
        lane = unit % BLOCKS * LANES + tl.arange(0, LANES)
        slot, number = tl.load(entry), tl.load(entry + 1)
        row, count = tl.load(entry + 2), tl.load(entry + 3)
        mask = lane < count * GROUP
        lanes = slot * STRIDE + head * ROWS + lane
        m = tl.full([LANES], -1.0e30, tl.float32)
        total = tl.zeros([LANES], tl.float32)
        acc = tl.zeros([LANES, DIM_POW2], tl.float32)
        number = tl.where(unit % BLOCKS * LANES < count * GROUP, number, 0)
        for nth in range(0, number, AT_ONCE):
            pieces = ()
            new_m = m
            for i in tl.static_range(AT_ONCE):
                piece = _piece(parts, sums, lanes, nth + i, number, STRIDE, DIM_POW2)
                pieces += (piece,)  # type: ignore[assignment]
                new_m = tl.maximum(new_m, piece[0])
            fade = tl.exp2(m - new_m)
            total = total * fade
            acc = acc * fade[:, None]
            for i in tl.static_range(AT_ONCE):
                weight = tl.exp2(pieces[i][0] - new_m)
                total += weight
                acc += pieces[i][1] * weight[:, None]
            m = new_m
        tokens = (row + lane // GROUP).to(tl.int64)[:, None]
        at = out + tokens * OUT[0] + (head * GROUP + lane % GROUP)[:, None] * OUT[1] + dims * OUT[2]
        result = acc / tl.where(mask, total, 1.0)[:, None]
        tl.store(at, result.to(out.dtype.element_ty), mask=mask[:, None] & (dims < DIM))


def rows_per_tile(heads: int, kv_heads: int, dtype: torch.dtype) -> int:
    """Rows, (token, head in the group), that one program takes: a power of two."""
    return max(FP32_ROWS if dtype == torch.float32 else ROWS, next_power_of_2(heads // kv_heads))


def tokens_per_tile(heads: int, kv_heads: int, dtype: torch.dtype, rows: int | None = None) -> int:
    """New tokens that one program takes: as many as fill its rows with the heads of a group."""
    return (rows or rows_per_tile(heads, kv_heads, dtype)) // (heads // kv_heads)


class Pieces:
    """Where pieces of tiles wait to be merged; one serves every layer of a step.

    `parts` fp32 [slots, kv_heads, rows, dim] holds their outputs, `sums` fp32 [slots, kv_heads, rows] the
    logarithms, in base 2, of what these were divided by. `processors` as `plan_prefill` is given it; `rows`
    the most of a tile of a plan (`rows_per_tile`): tiles of fewer lie in the first part of this memory.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        processors: int,
        rows: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.processors = processors
        rows = rows or rows_per_tile(heads, kv_heads, dtype)
        shape = (most_slots(kv_heads, processors), kv_heads, rows, next_power_of_2(head_dim))
        self.parts = torch.empty(shape, dtype=torch.float32, device=device)
        self.sums = torch.empty(shape[:3], dtype=torch.float32, device=device)
        self._constants: dict[str, Any] = {
            "KV_HEADS": kv_heads,
            "GROUP": heads // kv_heads,
            "ROWS": rows,
            "DIM": head_dim,
            "DIM_POW2": shape[3],
            "LANES": LANES,
            "AT_ONCE": AT_ONCE,
        }
        self._launches: dict[Any, Launch] = {}

    def merge(self, plan: Tensor, out: Tensor, rows: int) -> None:
        """Queues the merges of a plan from `plan_prefill`, on the device, into out [tokens, heads, dim].

        `rows`: those of a tile of this plan.
        """
        launch = self._launches.get((out.stride(), rows))
        if launch is None:
            constants = {"OUT": out.stride(), **self._constants, "ROWS": rows}
            launch = Launch(_merge, constants, self.device, num_warps=WARPS)
            self._launches[out.stride(), rows] = launch
        launch(PROGRAMS_PER_SM * self.processors, (self.parts, self.sums, plan, out))
