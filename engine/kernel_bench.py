"""Speed of the kernels on this GPU, in tables. A peer's attention may join if it computes the same.

Each row is timed by replaying a CUDA graph, on random data several times larger than the L2 cache. GB/s of
decode count K and V read once; of the movers, bytes read plus bytes written.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import triton
from pagecast.engine.ops import silu_mul
from pagecast.kernels.capabilities import processors_of
from pagecast.kernels.copy_blocks import copy_blocks
from pagecast.kernels.decode_schedule import DecodeSchedule, DecodeShape
from pagecast.kernels.merge_pieces import Pieces
from pagecast.kernels.mixture import mixture
from pagecast.kernels.paged_decode import paged_decode
from pagecast.kernels.paged_prefill import paged_prefill
from pagecast.kernels.prefill_plan import plan_prefill
from pagecast.kernels.reference import choose_experts
from pagecast.kernels.tile_rows import TileRows
from pagecast.sim.core.errors import BadInput, CannotRunHere
from torch import Tensor

DEVICE = "cuda"
DTYPE = torch.bfloat16
FP8 = torch.float8_e4m3fn
SHAPES = ((64, 4096), (256, 1024), (16, 16384))
PREFILL_TOKENS = 16384


class PagedBatch(NamedTuple):
    """The sequences of one call: where each one's queries start, and the most queries and tokens of one.

    `seq_lens`, `block_table`: None where K and V are dense.
    """

    starts: Tensor
    seq_lens: Tensor | None
    block_table: Tensor | None
    most_queries: int
    most_tokens: int


class Peer(Protocol):
    """Another implementation of paged attention: `tests/benchmarks/flash_peer.py` is FlashAttention-3."""

    NAME: str

    def schedule(self, q: Tensor, k_cache: Tensor, batch: PagedBatch) -> Any:
        """Its plan of a step, made once a step and not timed."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, batch: PagedBatch, plan: Any = None
    ) -> None:
        """Causal attention through the block table."""


class KernelTime(NamedTuple):
    """A line of a table: ours, and beside it another's where there is one."""

    name: str
    unit: str
    ours: float
    theirs: float | None = None
    peer: str = ""

    def markdown(self) -> str:
        """As a line of a Markdown table; the ratio says how much faster we are."""
        if self.theirs is None:
            return f"| {self.name} | {self.ours:,.1f} {self.unit} | | |"
        faster = self.theirs / self.ours if self.unit == "us" else self.ours / self.theirs
        beside = f"{self.theirs:,.1f} {self.unit} ({self.peer})"
        return f"| {self.name} | {self.ours:,.1f} {self.unit} | {beside} | {faster:.2f} |"


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention: query heads, KV heads, head dimension, dtype of the cache."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    kv_dtype: torch.dtype = DTYPE

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * self.dim * self.kv_dtype.itemsize


QWEN3_8B = Heads()


class ExpertLayerSize(NamedTuple):
    """A layer's mixture: experts, those of a token, hidden size, width of an expert."""

    experts: int = 128
    active: int = 8
    hidden: int = 2048
    width: int = 768


QWEN3_30B_A3B = ExpertLayerSize()
MIXTURE_TOKENS = (1, 8, 64, 256, 2048, 8192)
MIXTURE_LAYERS = 4  # in turn, so that no layer's experts are in the L2 cache


def seconds(*calls: Callable[[], object], inner: int = 5, outer: int = 12, graph: bool = True) -> float:
    """Median seconds of one call, of `outer` replays of `inner` rounds of these calls as a CUDA graph.

    A plain copy is faster outside a graph, so it is timed there (`graph=False`).
    """

    def rounds() -> None:
        for _ in range(inner):
            for call in calls:
                call()

    rounds()
    if not graph:
        return eager_seconds(rounds, outer) / inner / len(calls)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        rounds()
    return eager_seconds(captured.replay, outer) / inner / len(calls)


def eager_seconds(call: Callable[[], object], outer: int = 12) -> float:
    """Median seconds on the GPU of `outer` calls, one at a time."""
    call()
    times = []
    for _ in range(outer):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def launch_microseconds(call: Callable[[], object], count: int = 300) -> float:
    """Microseconds of host time that one call takes when the GPU is not waited for."""
    call()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
    return min(times)


def paged(lens: Sequence[int], block_size: int, model: Heads = QWEN3_8B) -> tuple[Tensor, Tensor]:
    """A random pool [blocks, 2, block_size, kv_heads, dim] and a shuffled block table for these lengths."""
    needed = [-(-n // block_size) for n in lens]
    blocks = sum(needed)
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (blocks, 2, block_size, model.kv_heads, model.dim)
    kv = torch.randn(shape, generator=generator, device=DEVICE, dtype=DTYPE).to(model.kv_dtype)
    order = torch.randperm(blocks, generator=generator, device=DEVICE, dtype=torch.int32)
    table = torch.zeros(len(lens), max(needed), dtype=torch.int32, device=DEVICE)
    first = 0
    for row, n in enumerate(needed):
        table[row, :n] = order[first : first + n]
        first += n
    return kv, table


def ragged(batch: int, total: int, seed: int = 1) -> list[int]:
    """Log-normal lengths (sigma 1) that sum to `total`."""
    weights = torch.randn(batch, generator=torch.Generator().manual_seed(seed)).exp()
    lens = (weights / weights.sum() * total).long().clamp(min=1)
    lens[lens.argmax()] += total - lens.sum()
    return [int(n) for n in lens]


def decode_seconds(
    lens: Sequence[int], block_size: int, peer: Peer | None, model: Heads = QWEN3_8B
) -> tuple[float, float | None]:
    """Seconds of our decode kernel and of FlashAttention-3, each with its plan made before."""
    kv, table = paged(lens, block_size, model)
    k, v = kv[:, 0], kv[:, 1]
    q = torch.randn(len(lens), model.heads, model.dim, device=DEVICE, dtype=DTYPE)
    out, theirs, longest = torch.empty_like(q), torch.empty_like(q), max(lens)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    shape = DecodeShape(model.heads, model.kv_heads, model.dim, model.kv_dtype)
    plan = DecodeSchedule(shape, len(lens), DEVICE)
    plan.update(seq_lens)
    scale = None if model.kv_dtype == DTYPE else torch.ones(1, device=DEVICE)
    ours = seconds(
        lambda: paged_decode(q, k, v, table, seq_lens, schedule=plan, out=out, k_scale=scale, v_scale=scale)
    )
    if peer is None:
        return ours, None
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=DEVICE)
    batch = PagedBatch(starts, seq_lens, table, 1, longest)
    metadata = peer.schedule(q, k, batch)
    flash = seconds(lambda: peer.attend(q, k, v, theirs, batch, metadata))
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=2e-3)
    return ours, flash


def prefill_plan(
    new: Sequence[int], lens: Sequence[int], model: Heads = QWEN3_8B
) -> tuple[Tensor, Pieces | None, int]:
    """The plan of a step on the device, where its cut tiles wait, if it has any, and the rows of a tile."""
    device = torch.device(DEVICE)
    processors = processors_of(device) if DEVICE == "cuda" else 4
    tiles = TileRows(model.heads, model.kv_heads, model.dim, DTYPE, model.kv_dtype, device)
    rows = tiles.of_step(new, lens)
    plan = plan_prefill(new, lens, tiles.tokens(rows), kv_heads=model.kv_heads, processors=processors)
    pieces = None
    if plan[0, 1]:
        pieces = Pieces(model.heads, model.kv_heads, model.dim, DTYPE, DEVICE, processors, rows)
    return torch.from_numpy(plan).to(DEVICE), pieces, rows


def prefill_seconds(
    new: Sequence[int], cached: Sequence[int], block_size: int, peer: Peer | None, model: Heads = QWEN3_8B
) -> tuple[float, float | None]:
    """Seconds of causal attention of new tokens behind cached ones, ours and FlashAttention-3's."""
    lens = [a + b for a, b in zip(new, cached, strict=True)]
    kv, table = paged(lens, block_size, model)
    k, v = kv[:, 0], kv[:, 1]
    q = torch.randn(sum(new), model.heads, model.dim, device=DEVICE, dtype=DTYPE)
    out, theirs = torch.empty_like(q), torch.empty_like(q)
    plan, pieces, rows = prefill_plan(new, lens, model)
    options: dict[str, Any] = {"out": out, "pieces": pieces, "longest": max(lens), "rows": rows}
    ours = seconds(lambda: paged_prefill(q, k, v, table, plan, **options))
    if peer is None:
        return ours, None
    starts = torch.tensor([0, *new], device=DEVICE).cumsum(0).int()
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    batch = PagedBatch(starts, seq_lens, table, max(new), max(lens))
    flash = seconds(lambda: peer.attend(q, k, v, theirs, batch))
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=4e-3)
    return ours, flash


def prefill_tflops(
    each: int, block_size: int, peer: Peer | None, model: Heads = QWEN3_8B
) -> tuple[float, float | None]:
    """TFLOP/s of causal prefill of whole sequences of `each` tokens, ours and FlashAttention-3's."""
    count = PREFILL_TOKENS // each
    operations = count * each * (each + 1) / 2 * 4 * model.dim * model.heads / 1e12
    ours, flash = prefill_seconds([each] * count, [0] * count, block_size, peer, model)
    return operations / ours, operations / flash if flash else None


def copy_gbs(block_size: int, layers: int = 36, tokens: int = 2048) -> tuple[float, float]:
    """GB/s moved by copy_blocks within a pool of many layers, and by a device copy of the same bytes."""
    blocks = tokens // block_size
    shape = (layers, 4 * blocks, 2, block_size, QWEN3_8B.kv_heads, QWEN3_8B.dim)
    pool = torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_()
    pairs = torch.randperm(4 * blocks, device=DEVICE).view(-1, 2)[:blocks].contiguous()
    dense, target = pool[:, :blocks].contiguous(), torch.empty_like(pool[:, :blocks])
    size = 2 * dense.nbytes / 1e9
    ours = size / seconds(lambda: copy_blocks(pool, pool, pairs, block_dim=1))
    return ours, size / seconds(lambda: target.copy_(dense), graph=False)


def host_gbs(block_size: int, layers: int = 36, tokens: int = 1024) -> list[tuple[str, float, float]]:
    """GB/s to and from pinned host memory, ours and a plain pinned copy's."""
    blocks = tokens // block_size
    shape = (layers, 2 * blocks, 2, block_size, QWEN3_8B.kv_heads, QWEN3_8B.dim)
    pool = torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_()
    host = torch.zeros(shape, dtype=DTYPE, pin_memory=True)
    blocks_of = [torch.randperm(2 * blocks)[:blocks] for _ in range(2)]
    pairs = torch.stack(blocks_of, 1).to(DEVICE)
    dense = pool[:, :blocks].contiguous()
    pinned = torch.zeros(dense.shape, dtype=DTYPE, pin_memory=True)
    size = dense.nbytes / 1e9
    rows = []
    for name, ours, plain in (
        ("to", lambda: copy_blocks(pool, host, pairs, 1), lambda: pinned.copy_(dense, non_blocking=True)),
        ("from", lambda: copy_blocks(host, pool, pairs, 1), lambda: dense.copy_(pinned, non_blocking=True)),
    ):
        rows.append((name, size / eager_seconds(ours), size / eager_seconds(plain)))
    return rows


def ceilings(_: Peer | None) -> Iterator[KernelTime]:
    """Rates that the machine reaches: copy, read, multiply."""
    x = torch.randn(1 << 29, device=DEVICE)
    y = torch.empty_like(x)
    yield KernelTime("device copy", "GB/s", 2 * x.nbytes / 1e9 / seconds(lambda: y.copy_(x), graph=False))
    yield KernelTime("read-only sum", "GB/s", x.nbytes / 1e9 / seconds(lambda: x.sum()))
    a = torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE)
    yield KernelTime("matrix product 8192^3", "TFLOP/s", 2 * 8192**3 / 1e12 / seconds(lambda: a @ a))


def decode(peer: Peer | None) -> Iterator[KernelTime]:
    """Decode at the three shapes, uniform and ragged, three page sizes."""
    for block_size in (16, 64, 256):
        for batch, length in SHAPES:
            for name, lens in (("", [length] * batch), (" ragged", ragged(batch, batch * length))):
                ours, flash = decode_seconds(lens, block_size, peer)
                size = sum(lens) * QWEN3_8B.token_bytes / 1e9
                title = f"decode {batch} x {length}{name}, page {block_size}"
                yield KernelTime(title, "GB/s", size / ours, size / flash if flash else None, name_of(peer))


def models(peer: Peer | None) -> Iterator[KernelTime]:
    """Decode and prefill of other head shapes, page 16."""
    for model in (
        Heads(16, 8),
        Heads(28, 4),
        Heads(32, 32),
        Heads(64, 8),
        Heads(32, 8, 64),
        Heads(32, 8, 96),
        Heads(32, 8, 80),
        Heads(16, 8, 256),
        Heads(32, 8, 128, FP8),
    ):
        name = (
            f"{model.heads}/{model.kv_heads} heads, D {model.dim}{', fp8' if model.kv_dtype == FP8 else ''}"
        )
        joins = peer if model.kv_dtype == DTYPE and model.dim != 80 else None
        ours, flash = decode_seconds([4096 + i for i in range(64)], 16, joins, model)
        size = (64 * 4096 + 64 * 63 / 2) * model.token_bytes / 1e9
        theirs = size / flash if flash else None
        yield KernelTime(f"decode 64 x 4096, {name}", "GB/s", size / ours, theirs, name_of(peer))
        if model.kv_dtype == DTYPE:
            tflops, flash = prefill_tflops(4096, 16, joins, model)
            yield KernelTime(f"prefill 4 x 4096, {name}", "TFLOP/s", tflops, flash, name_of(peer))


def small(peer: Peer | None) -> Iterator[KernelTime]:
    """Latency of small batches, and host time of a launch."""
    for batch, length in ((1, 500), (1, 4000), (1, 32000), (8, 1000), (8, 8000), (32, 500)):
        ours, flash = decode_seconds([length] * batch, 16, peer)
        theirs = flash * 1e6 if flash else None
        yield KernelTime(f"decode {batch} x {length}", "us", ours * 1e6, theirs, name_of(peer))
    kv, table = paged([64] * 8, 16)
    k, v = kv[:, 0], kv[:, 1]
    q = torch.randn(64, 32, 128, device=DEVICE, dtype=DTYPE)
    seq_lens = torch.full((8,), 64, dtype=torch.int32, device=DEVICE)
    plan = DecodeSchedule(DecodeShape(32, 8, 128, DTYPE), 8, DEVICE)
    tiles, *_ = prefill_plan([8] * 8, [64] * 8)
    out = torch.empty_like(q)
    for name, call in (
        ("schedule", lambda: plan.update(seq_lens)),
        ("decode", lambda: paged_decode(q[:8], k, v, table, seq_lens, schedule=plan, out=out[:8])),
        ("prefill", lambda: paged_prefill(q, k, v, table, tiles, out=out)),
    ):
        yield KernelTime(f"{name}, host time of a launch", "us", launch_microseconds(call))
        yield KernelTime(f"{name}, tiny, on the GPU", "us", seconds(call, inner=20) * 1e6)


def prefill(peer: Peer | None) -> Iterator[KernelTime]:
    """Causal prefill of 16,384 tokens in sequences of three lengths, pages of 16 and 256."""
    for block_size in (16, 256):
        for each in (1024, 4096, 16384):
            ours, flash = prefill_tflops(each, block_size, peer)
            title = f"prefill {PREFILL_TOKENS // each} x {each}, page {block_size}"
            yield KernelTime(title, "TFLOP/s", ours, flash, name_of(peer))


def chunks(peer: Peer | None) -> Iterator[KernelTime]:
    """Chunks of new tokens behind cached ones, page 16."""
    for count, new, cached in ((1, 2048, 14336), (8, 256, 4096), (32, 32, 2048), (1, 64, 16384)):
        ours, flash = prefill_seconds([new] * count, [cached] * count, 16, peer)
        title = f"prefill {count} x {new} new behind {cached}, page 16"
        yield KernelTime(title, "us", ours * 1e6, flash * 1e6 if flash else None, name_of(peer))


def prefixes(peer: Peer | None) -> Iterator[KernelTime]:
    """Few new tokens behind long prefixes, page 16."""
    for count in (1, 4):
        for new in (8, 64, 256):
            for cached in (1000, 4000, 16000, 29000, 100000):
                ours, flash = prefill_seconds([new] * count, [cached] * count, 16, peer)
                title = f"prefill {count} x {new} new behind {cached}, page 16"
                yield KernelTime(title, "us", ours * 1e6, flash * 1e6 if flash else None, name_of(peer))


def move(_: Peer | None) -> Iterator[KernelTime]:
    """copy_blocks beside plain copies of the same bytes."""
    for block_size in (16, 256):
        yield KernelTime(f"copy_blocks in the pool, page {block_size}", "GB/s", *copy_gbs(block_size), "copy")
    for block_size in (16, 256):
        for way, ours, plain in host_gbs(block_size):
            yield KernelTime(
                f"copy_blocks {way} the host, page {block_size}", "GB/s", ours, plain, "pinned copy"
            )


def mixture_seconds(tokens: int, shape: ExpertLayerSize) -> tuple[float, float | None]:
    """Seconds of a mixture from router logits to the weighted sum, and of PyTorch's grouped products of rows
    that are gathered and sorted already (None where it has none)."""
    calls, theirs = [], []
    for _ in range(MIXTURE_LAYERS):
        x = torch.randn(tokens, shape.hidden, device=DEVICE).to(DTYPE)
        logits = torch.randn(tokens, shape.experts, device=DEVICE).to(DTYPE)
        up = torch.empty(shape.experts, 2 * shape.width, shape.hidden, device=DEVICE, dtype=DTYPE)
        down = torch.empty(shape.experts, shape.hidden, shape.width, device=DEVICE, dtype=DTYPE)
        up.normal_(0, shape.hidden**-0.5)
        down.normal_(0, shape.width**-0.5)
        counts = torch.zeros(shape.experts, dtype=torch.int32, device=DEVICE)
        calls.append(partial(mixture, x, logits, up, down, counts, shape.active, True))
        choices = choose_experts(logits, shape.active, normalised=True)[0].flatten()
        rows = x[choices.sort().indices // shape.active]
        ends = torch.bincount(choices, minlength=shape.experts).cumsum(0).int()
        theirs.append(partial(_grouped_products, rows, up, down, ends))
    ours = seconds(*calls)
    return ours, seconds(*theirs) if hasattr(torch, "_grouped_mm") and DEVICE == "cuda" else None


def _grouped_products(rows: Tensor, up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
    hidden = silu_mul(torch._grouped_mm(rows, up.mT, offs=ends))
    return torch._grouped_mm(hidden, down.mT, offs=ends)


def mixtures(_: Peer | None) -> Iterator[KernelTime]:
    """A layer's mixture of experts, beside PyTorch's products alone."""
    for tokens in MIXTURE_TOKENS:
        ours, theirs = mixture_seconds(tokens, QWEN3_30B_A3B)
        beside = None if theirs is None else theirs * 1e6
        yield KernelTime(f"mixture of {tokens} tokens", "us", ours * 1e6, beside, "torch's products alone")


SECTIONS: dict[str, Callable[[Peer | None], Iterator[KernelTime]]] = {
    f.__name__: f for f in (ceilings, decode, prefill, chunks, prefixes, move, models, small, mixtures)
}


def name_of(peer: Peer | None) -> str:
    """The peer's name, empty without one."""
    return "" if peer is None else peer.NAME


def tables(names: Sequence[str] = (), peer: Peer | None = None) -> Iterator[str]:
    """Lines of one Markdown table with the sections named, or all, as they are measured.

    Errors: BadInput for a section that is not known; CannotRunHere without a CUDA GPU.
    """
    for name in names:
        if name not in SECTIONS:
            raise BadInput(f"kernel table {name!r} is not known; choose from {', '.join(SECTIONS)}")
    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise CannotRunHere("the kernel tables need a CUDA GPU, and this machine has none")
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU"
    yield f"{gpu}, torch {torch.__version__}, triton {triton.__version__}, {time.strftime('%Y-%m-%d')}"
    yield "\n| what | ours | beside | times as fast |\n|---|---|---|---|"
    for name in names or SECTIONS:
        for table in SECTIONS[name](peer):
            yield table.markdown()
