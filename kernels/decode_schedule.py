"""Shares of a step's decode attention, computed on the device from the lengths of the step.

`paged_decode` says how work is shared out; here is who gets what.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from pagecast.kernels.capabilities import processors_of
from pagecast.kernels.launch import Launch, after_predecessor, next_power_of_2
from torch import Tensor

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
    LANE_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    START_COST: tl.constexpr,
    STRETCHES: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """ends[1 + row]: work on a head up to the end of a row; ends[0]: work of a stretch; first_row[n]: where
    stretch n starts, the one after the last included."""
    after_predecessor(OVERLAP)
    total = 0
    for start in range(0, batch, CHUNK):
        total += tl.sum(_work_of(seq_lens, start + tl.arange(0, CHUNK), batch, TILE, WINDOW, START_COST))
    share = tl.maximum(tl.cdiv(total * LANE_HEADS, STRETCHES), 1 + START_COST)
    stretch = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    rows_before = tl.zeros([SHARE], tl.int32)
    done = 0
    for start in range(0, batch, CHUNK):
        row = start + tl.arange(0, CHUNK)
        work = _work_of(seq_lens, row, batch, TILE, WINDOW, START_COST)
        end = done + tl.cumsum(work, 0)
        done += tl.sum(work)
        before = (end[None, :] * LANE_HEADS <= (stretch * share)[:, None]) & (row < batch)[None, :]
        rows_before += tl.sum(before.to(tl.int32), 1)
        if tl.program_id(0) == 0:
            tl.store(ends + 1 + row, end, mask=row < batch)
    tl.store(first_row + stretch, rows_before, mask=stretch <= STRETCHES)
    if tl.program_id(0) == 0:
        tl.store(ends, share)


@dataclass(frozen=True, slots=True)
class DecodeCut:
    """How decode attention uses a multiprocessor: `programs_per_sm` programs of `warps` warps, each with
    pipelines of `stages` steps, which take `tile_bytes` of K. `registers` of a thread at most; 0: any.
    Starting on another head costs a program as much as `start_cost` tiles.

    Programs are brought up while the kernel before them ends. Therefore no more of them must fit on a
    multiprocessor than are meant to, or they fill the GPU unevenly: registers and shared memory see to that.
    Few warps with many registers each execute the fewest instructions, which cost power: a GPU at its power
    limit then runs at higher clocks.
    """

    tile_bytes: int
    programs_per_sm: int
    stages: int
    warps: int = 4
    registers: int = 0
    start_cost: int = 2


FEW_ROWS = 64
# Of so few rows each is cut in many parts: fewer programs with more tiles under way leave less to merge. More
# rows, that share a prefix, read it from the L2 cache, and there more warps are faster.
FEW_CUT = DecodeCut(8192, 3, 6, warps=1, registers=255, start_cost=3)
WIDE_CUT = DecodeCut(8192, 6, 5, warps=1, registers=255, start_cost=3)
# One warp has no registers for more than 8 query heads per KV head.
MANY_HEADS_CUT = DecodeCut(8192, 4, 5, registers=128)
FP8_CUT = DecodeCut(8192, 4, 5, warps=2, registers=224)


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Facts that a schedule depends on: the model's attention heads, the cache's dtype and the window."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    window: int | None = None

    @property
    def is_fp8(self) -> bool:
        """True where the cache holds fp8."""
        return self.kv_dtype == torch.float8_e4m3fn


def _cut_of(shape: DecodeShape, max_batch: int) -> DecodeCut:
    """How the work is cut up where the caller does not say: measured on an H200, FEW_CUT on H100s."""
    if shape.is_fp8:
        return FP8_CUT
    if shape.heads // shape.kv_heads > 8:
        return MANY_HEADS_CUT
    return FEW_CUT if max_batch <= FEW_ROWS else WIDE_CUT


class DecodeSchedule:
    """Shares of a step's work and the workspace of `paged_decode`; one serves every layer of a step.

    One that is made for at most `FEW_ROWS` rows cuts the work in another way.

    `update` computes the shares on the device from the lengths of the step; it and the attention that
    follows must run on one stream, and both may be captured in a CUDA graph.
    """

    def __init__(
        self,
        shape: DecodeShape,
        max_batch: int,
        device: torch.device | str,
        programs: int | None = None,
        cut: DecodeCut | None = None,
    ) -> None:
        device = torch.device(device)
        self.shape = shape
        self.cut = cut or _cut_of(shape, max_batch)
        self.tile = _tile(shape, self.cut)
        self.programs = _programs(self.cut, device) if programs is None else programs
        group_rows = next_power_of_2(shape.heads // shape.kv_heads)
        slots = 2 * self.programs * group_rows
        dim = next_power_of_2(shape.head_dim)
        self.lanes = _lanes(self.programs, shape.kv_heads)
        self.ends = torch.zeros(max_batch + 1, dtype=torch.int32, device=device)
        self.first_row = torch.zeros(self.programs // self.lanes + 1, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(max_batch * shape.kv_heads, dtype=torch.int32, device=device)
        self.sums = torch.empty(slots * 2, dtype=torch.float32, device=device)
        self.outputs = torch.empty(slots * dim, dtype=torch.float32, device=device)
        constants = {
            "LANE_HEADS": shape.kv_heads // self.lanes,
            "TILE": self.tile,
            "WINDOW": shape.window or 0,
            "STRETCHES": self.programs // self.lanes,
            "START_COST": self.cut.start_cost,
            "CHUNK": 256,
            "SHARE": SHARE,
        }
        self._share_work = Launch(_share_work, constants, device, num_warps=4)

    @property
    def workspace(self) -> tuple[Tensor, ...]:
        """Shares and partial sums, as kernels take them: ends, first rows, sums, outputs, arrivals."""
        return self.ends, self.first_row, self.sums, self.outputs, self.arrivals

    def update(self, seq_lens: Tensor) -> None:
        """Shares out the work of a step with these lengths (int32 [batch], on the device; 0 for padding)."""
        self._share_work(
            self.programs // self.lanes // SHARE + 1, (seq_lens, self.ends, self.first_row), seq_lens.shape[0]
        )


def _tile(shape: DecodeShape, cut: DecodeCut) -> int:
    """Tokens of K that a step of the loop takes."""
    row_bytes = next_power_of_2(shape.head_dim) * shape.kv_dtype.itemsize
    return min(128, max(16, cut.tile_bytes // row_bytes))


def _programs(cut: DecodeCut, device: torch.device) -> int:
    if device.type != "cuda":
        return 8
    return cut.programs_per_sm * processors_of(device)


def _lanes(programs: int, kv_heads: int) -> int:
    """How many lanes the KV heads are shared among: as many as divide the programs evenly."""
    return math.gcd(programs, kv_heads)
