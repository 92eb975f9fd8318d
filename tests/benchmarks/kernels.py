"""The kernels beside their peers on one GPU: `python tests/benchmarks/kernels.py [ceilings decode ...]`.

Each row is timed by replaying a CUDA graph, on random data several times larger than the L2 cache. GB/s of
decode count K and V read once; of the movers, bytes read plus bytes written. FlashAttention-3 joins where
it is found (see flash_peer.py), and its results must equal ours.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import flash_peer
import torch
import triton
from pagecast.kernels.copy_blocks import copy_blocks
from pagecast.kernels.paged_decode import DecodeSchedule, DecodeShape, paged_decode
from pagecast.kernels.paged_prefill import paged_prefill, plan_prefill, tokens_per_tile
from pagecast.kernels.store_kv import store_kv
from torch import Tensor

DTYPE = torch.bfloat16
FP8 = torch.float8_e4m3fn
SHAPES = ((64, 4096), (256, 1024), (16, 16384))
PREFILL_TOKENS = 16384


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
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (blocks, 2, block_size, model.kv_heads, model.dim)
    kv = torch.randn(shape, generator=generator, device="cuda", dtype=DTYPE).to(model.kv_dtype)
    order = torch.randperm(blocks, generator=generator, device="cuda", dtype=torch.int32)
    table = torch.zeros(len(lens), max(needed), dtype=torch.int32, device="cuda")
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
    lens: Sequence[int], block_size: int, peer: bool, model: Heads = QWEN3_8B
) -> tuple[float, float | None]:
    """Seconds of our decode kernel and of FlashAttention-3, each with its plan made before."""
    kv, table = paged(lens, block_size, model)
    k, v = kv[:, 0], kv[:, 1]
    q = torch.randn(len(lens), model.heads, model.dim, device="cuda", dtype=DTYPE)
    out, theirs, longest = torch.empty_like(q), torch.empty_like(q), max(lens)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    shape = DecodeShape(model.heads, model.kv_heads, model.dim, model.kv_dtype)
    plan = DecodeSchedule(shape, len(lens), "cuda")
    plan.update(seq_lens)
    scale = None if model.kv_dtype == DTYPE else torch.ones(1, device="cuda")
    ours = seconds(
        lambda: paged_decode(q, k, v, table, seq_lens, schedule=plan, out=out, k_scale=scale, v_scale=scale)
    )
    if not peer:
        return ours, None
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device="cuda")
    metadata = flash_peer.schedule(q, k, seq_lens, starts, 1, longest)
    flash = seconds(lambda: flash_peer.attend(q, k, v, theirs, starts, seq_lens, table, 1, longest, metadata))
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=2e-3)
    return ours, flash


def prefill_seconds(
    new: Sequence[int], cached: Sequence[int], block_size: int, peer: bool, model: Heads = QWEN3_8B
) -> tuple[float, float | None]:
    """Seconds of causal attention of new tokens behind cached ones, ours and FlashAttention-3's."""
    lens = [a + b for a, b in zip(new, cached, strict=True)]
    kv, table = paged(lens, block_size, model)
    k, v = kv[:, 0], kv[:, 1]
    q = torch.randn(sum(new), model.heads, model.dim, device="cuda", dtype=DTYPE)
    out, theirs = torch.empty_like(q), torch.empty_like(q)
    tokens = tokens_per_tile(model.heads, model.kv_heads, DTYPE)
    tiles = torch.from_numpy(plan_prefill(new, lens, tokens)).cuda()
    ours = seconds(lambda: paged_prefill(q, k, v, table, tiles, out=out))
    if not peer:
        return ours, None
    starts = torch.tensor([0, *new], device="cuda").cumsum(0).int()
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    longest = max(new), max(lens)
    flash = seconds(lambda: flash_peer.attend(q, k, v, theirs, starts, seq_lens, table, *longest))
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=4e-3)
    return ours, flash


def prefill_tflops(
    each: int, block_size: int, peer: bool, model: Heads = QWEN3_8B
) -> tuple[float, float | None]:
    """TFLOP/s of causal prefill of whole sequences of `each` tokens, ours and FlashAttention-3's."""
    count = PREFILL_TOKENS // each
    operations = count * each * (each + 1) / 2 * 4 * model.dim * model.heads / 1e12
    ours, flash = prefill_seconds([each] * count, [0] * count, block_size, peer, model)
    return operations / ours, operations / flash if flash else None


def store_gbs(tokens: int, model: Heads = QWEN3_8B) -> tuple[float, float]:
    """GB/s moved by store_kv out of a fused projection, and by a device copy of the same bytes."""
    sets, n = 6, model.heads
    kv, _ = paged([16 * 4096], 16, model)
    qkv = [
        torch.randn(tokens, n + 2 * model.kv_heads, model.dim, device="cuda").to(DTYPE) for _ in range(sets)
    ]
    slots = [torch.randperm(kv.shape[0] * 16, device="cuda")[:tokens] for _ in range(sets)]
    dense = [x[:, n:].contiguous() for x in qkv]
    copies = [torch.empty_like(x) for x in dense]

    def store(i: int) -> Callable[[], object]:
        k, v = qkv[i][:, n : n + model.kv_heads], qkv[i][:, n + model.kv_heads :]
        return lambda: store_kv(k, v, kv[:, 0], kv[:, 1], slots[i])

    def copy(i: int) -> Callable[[], object]:
        return lambda: copies[i].copy_(dense[i])

    size = 2 * dense[0].nbytes / 1e9
    ours = size / seconds(*(store(i) for i in range(sets)))
    return ours, size / seconds(*(copy(i) for i in range(sets)), graph=False)


def copy_gbs(block_size: int, layers: int = 36, tokens: int = 2048) -> tuple[float, float]:
    """GB/s moved by copy_blocks within a pool of many layers, and by a device copy of the same bytes."""
    blocks = tokens // block_size
    shape = (layers, 4 * blocks, 2, block_size, QWEN3_8B.kv_heads, QWEN3_8B.dim)
    pool = torch.empty(shape, device="cuda", dtype=DTYPE).normal_()
    pairs = torch.randperm(4 * blocks, device="cuda").view(-1, 2)[:blocks].contiguous()
    dense, target = pool[:, :blocks].contiguous(), torch.empty_like(pool[:, :blocks])
    size = 2 * dense.nbytes / 1e9
    ours = size / seconds(lambda: copy_blocks(pool, pool, pairs, block_dim=1))
    return ours, size / seconds(lambda: target.copy_(dense), graph=False)


def host_gbs(block_size: int, layers: int = 36, tokens: int = 1024) -> list[tuple[str, float, float]]:
    """GB/s to and from pinned host memory, ours and a plain pinned copy's."""
    blocks = tokens // block_size
    shape = (layers, 2 * blocks, 2, block_size, QWEN3_8B.kv_heads, QWEN3_8B.dim)
    pool = torch.empty(shape, device="cuda", dtype=DTYPE).normal_()
    host = torch.zeros(shape, dtype=DTYPE, pin_memory=True)
    pairs = torch.stack([torch.randperm(2 * blocks)[:blocks], torch.randperm(2 * blocks)[:blocks]], 1).cuda()
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


def row(name: str, unit: str, ours: float, theirs: float | None, peer: str) -> None:
    """Prints a row of the table that `main` began; its ratio is how much faster we are."""
    faster = 0.0 if theirs is None else theirs / ours if unit == "us" else ours / theirs
    beside = "| |" if theirs is None else f"{theirs:,.1f} {unit} ({peer}) | {faster:.2f} |"
    print(f"| {name} | {ours:,.1f} {unit} | {beside}", flush=True)


def ceilings(_: bool) -> None:
    """What the machine can do: copy, read, multiply."""
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    row("device copy", "GB/s", 2 * x.nbytes / 1e9 / seconds(lambda: y.copy_(x), graph=False), None, "")
    row("read-only sum", "GB/s", x.nbytes / 1e9 / seconds(lambda: x.sum()), None, "")
    a = torch.randn(8192, 8192, device="cuda", dtype=DTYPE)
    row("matrix product 8192^3", "TFLOP/s", 2 * 8192**3 / 1e12 / seconds(lambda: a @ a), None, "")


def decode(peer: bool) -> None:
    """Decode at the three shapes, uniform and ragged, three page sizes."""
    for block_size in (16, 64, 256):
        for batch, length in SHAPES:
            for name, lens in (("", [length] * batch), (" ragged", ragged(batch, batch * length))):
                ours, flash = decode_seconds(lens, block_size, peer)
                size = sum(lens) * QWEN3_8B.token_bytes / 1e9
                title = f"decode {batch} x {length}{name}, page {block_size}"
                row(title, "GB/s", size / ours, size / flash if flash else None, "FA3")


def models(peer: bool) -> None:
    """Decode and prefill of other head shapes, page 16."""
    for model in (Heads(16, 8), Heads(28, 4), Heads(32, 32), Heads(64, 8), Heads(32, 8, 64), Heads(32, 8, 96),
                  Heads(32, 8, 80), Heads(16, 8, 256), Heads(32, 8, 128, FP8)):  # fmt: skip
        name = (
            f"{model.heads}/{model.kv_heads} heads, D {model.dim}{', fp8' if model.kv_dtype == FP8 else ''}"
        )
        joins = peer and model.kv_dtype == DTYPE and model.dim != 80
        ours, flash = decode_seconds([4096 + i for i in range(64)], 16, joins, model)
        size = (64 * 4096 + 64 * 63 / 2) * model.token_bytes / 1e9
        row(f"decode 64 x 4096, {name}", "GB/s", size / ours, size / flash if flash else None, "FA3")
        if model.kv_dtype == DTYPE:
            tflops, flash = prefill_tflops(4096, 16, joins, model)
            row(f"prefill 4 x 4096, {name}", "TFLOP/s", tflops, flash, "FA3")


def small(peer: bool) -> None:
    """Latency of small batches, and host time of a launch."""
    for batch, length in ((1, 500), (1, 4000), (1, 32000), (8, 1000), (8, 8000), (32, 500)):
        ours, flash = decode_seconds([length] * batch, 16, peer)
        row(f"decode {batch} x {length}", "us", ours * 1e6, flash * 1e6 if flash else None, "FA3")
    kv, table = paged([64] * 8, 16)
    k, v = kv[:, 0], kv[:, 1]
    q = torch.randn(64, 32, 128, device="cuda", dtype=DTYPE)
    seq_lens = torch.full((8,), 64, dtype=torch.int32, device="cuda")
    plan = DecodeSchedule(DecodeShape(32, 8, 128, DTYPE), 8, "cuda")
    tiles = torch.from_numpy(plan_prefill([8] * 8, [64] * 8, tokens_per_tile(32, 8, DTYPE))).cuda()
    new, slots, out = q[:, :8], torch.arange(64, device="cuda"), torch.empty_like(q)
    for name, call in (
        ("schedule", lambda: plan.update(seq_lens)),
        ("decode", lambda: paged_decode(q[:8], k, v, table, seq_lens, schedule=plan, out=out[:8])),
        ("prefill", lambda: paged_prefill(q, k, v, table, tiles, out=out)),
        ("store", lambda: store_kv(new, new, k, v, slots)),
    ):
        row(f"{name}, host time of a launch", "us", launch_microseconds(call), None, "")
        row(f"{name}, tiny, on the GPU", "us", seconds(call, inner=20) * 1e6, None, "")


def prefill(peer: bool) -> None:
    """Causal prefill of 16,384 tokens in sequences of three lengths, pages of 16 and 256."""
    for block_size in (16, 256):
        for each in (1024, 4096, 16384):
            ours, flash = prefill_tflops(each, block_size, peer)
            row(
                f"prefill {PREFILL_TOKENS // each} x {each}, page {block_size}", "TFLOP/s", ours, flash, "FA3"
            )


def chunks(peer: bool) -> None:
    """Chunks of new tokens behind cached ones, page 16."""
    for count, new, cached in ((1, 2048, 14336), (8, 256, 4096), (32, 32, 2048), (1, 64, 16384)):
        ours, flash = prefill_seconds([new] * count, [cached] * count, 16, peer)
        title = f"prefill {count} x {new} new behind {cached}, page 16"
        row(title, "us", ours * 1e6, flash * 1e6 if flash else None, "FA3")


def move(_: bool) -> None:
    """store_kv and copy_blocks beside plain copies of the same bytes."""
    for tokens in (256, 2048, 16384):
        row(f"store_kv {tokens} tokens", "GB/s", *store_gbs(tokens), "copy")
    for block_size in (16, 256):
        row(f"copy_blocks in the pool, page {block_size}", "GB/s", *copy_gbs(block_size), "copy")
    for block_size in (16, 256):
        for way, ours, plain in host_gbs(block_size):
            row(f"copy_blocks {way} the host, page {block_size}", "GB/s", ours, plain, "pinned copy")


SECTIONS = {f.__name__: f for f in (ceilings, decode, prefill, chunks, move, models, small)}


def main(names: Sequence[str]) -> None:
    """Prints the sections named, or all, as one Markdown table."""
    if not torch.cuda.is_available():
        print("the kernel benchmarks need a CUDA GPU, and this machine has none", file=sys.stderr)
        raise SystemExit(3)
    peer = flash_peer.load()
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, triton {triton.__version__}, {time.strftime('%Y-%m-%d')}\n")
    print("| what | ours | beside | times as fast |\n|---|---|---|---|")
    for name in names or SECTIONS:
        SECTIONS[name](peer)


if __name__ == "__main__":
    main(sys.argv[1:])
