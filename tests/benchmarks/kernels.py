"""The kernels beside their peers on one GPU: `python tests/benchmarks/kernels.py [decode prefill move host]`.

Each row is timed by replaying a CUDA graph, with data several times larger than the L2 cache. GB/s of
decode count K and V read once; of the movers, bytes read plus bytes written. FlashAttention-3 joins where
it is found (see flash_peer.py).
"""

import statistics
import time
from collections.abc import Callable

import flash_peer
import torch
from pagecast.kernels.copy_blocks import copy_blocks
from pagecast.kernels.paged_decode import DecodeSchedule, DecodeShape, paged_decode
from pagecast.kernels.paged_prefill import paged_prefill, plan_prefill, tokens_per_tile
from pagecast.kernels.store_kv import store_kv
from torch import Tensor

HEADS, KV_HEADS, DIM = 32, 8, 128
DTYPE = torch.bfloat16
DECODE = ((64, 4096), (256, 1024), (16, 16384))
PREFILL_TOKENS = 16384


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


def paged(lens: list[int], block_size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A random pool [blocks, 2, block_size, kv_heads, dim] and a shuffled block table for these lengths."""
    needed = [-(-n // block_size) for n in lens]
    blocks = sum(needed)
    generator = torch.Generator("cuda").manual_seed(seed)
    kv = torch.randn(blocks, 2, block_size, KV_HEADS, DIM, generator=generator, device="cuda", dtype=DTYPE)
    order = torch.randperm(blocks, generator=generator, device="cuda", dtype=torch.int32)
    table = torch.zeros(len(lens), max(needed), dtype=torch.int32, device="cuda")
    first = 0
    for row, n in enumerate(needed):
        table[row, :n] = order[first : first + n]
        first += n
    return kv, table


def ragged(batch: int, total: int, seed: int = 0) -> list[int]:
    """Log-normal lengths (sigma 1) that sum to `total`."""
    weights = torch.randn(batch, generator=torch.Generator().manual_seed(seed)).exp()
    lens = (weights / weights.sum() * total).long().clamp(min=1)
    lens[lens.argmax()] += total - lens.sum()
    return [int(n) for n in lens]


def decode_row(lens: list[int], block_size: int, peer: bool) -> tuple[float, float | None]:
    """GB/s of KV of our kernel and of FlashAttention-3."""
    kv, table = paged(lens, block_size)
    k, v = kv[:, 0], kv[:, 1]
    q = torch.randn(len(lens), HEADS, DIM, device="cuda", dtype=DTYPE)
    out = torch.empty_like(q)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    plan = DecodeSchedule(DecodeShape(HEADS, KV_HEADS, DIM, DTYPE), len(lens), "cuda")
    plan.update(seq_lens)
    size = sum(lens) * KV_HEADS * DIM * 2 * kv.element_size() / 1e9
    ours = size / seconds(lambda: paged_decode(q, k, v, table, seq_lens, schedule=plan, out=out))
    if not peer:
        return ours, None
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device="cuda")
    theirs, longest = torch.empty_like(q), max(lens)
    metadata = flash_peer.schedule(q, k, seq_lens, starts, 1, longest)
    flash = seconds(lambda: flash_peer.attend(q, k, v, theirs, starts, seq_lens, table, 1, longest, metadata))
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=2e-3)
    return ours, size / flash


def prefill_row(each: int, block_size: int, peer: bool) -> tuple[float, float | None]:
    """TFLOP/s of causal prefill of sequences of `each` tokens, ours and FlashAttention-3's."""
    lens = [each] * (PREFILL_TOKENS // each)
    kv, table = paged(lens, block_size)
    k, v = kv[:, 0], kv[:, 1]
    q = torch.randn(PREFILL_TOKENS, HEADS, DIM, device="cuda", dtype=DTYPE)
    out = torch.empty_like(q)
    tiles = torch.from_numpy(plan_prefill(lens, lens, tokens_per_tile(HEADS, KV_HEADS, DTYPE))).cuda()
    operations = sum(n * (n + 1) / 2 for n in lens) * 4 * DIM * HEADS / 1e12
    ours = operations / seconds(lambda: paged_prefill(q, k, v, table, tiles, out=out))
    if not peer:
        return ours, None
    starts = torch.tensor([0, *lens], device="cuda").cumsum(0).int()
    seq_lens, theirs = torch.tensor(lens, dtype=torch.int32, device="cuda"), torch.empty_like(q)
    flash = seconds(lambda: flash_peer.attend(q, k, v, theirs, starts, seq_lens, table, each, each))
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=4e-3)
    return ours, operations / flash


def store_row(tokens: int) -> tuple[float, float]:
    """GB/s moved by store_kv out of a fused projection, and by a device copy of the same bytes."""
    sets = 6
    kv, _ = paged([16 * 4096], 16)
    qkv = [torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=DTYPE) for _ in range(sets)]
    slots = [torch.randperm(kv.shape[0] * 16, device="cuda")[:tokens] for _ in range(sets)]
    dense = [x[:, HEADS:].contiguous() for x in qkv]
    copies = [torch.empty_like(x) for x in dense]

    def store(i: int) -> Callable[[], object]:
        k, v = qkv[i][:, HEADS : HEADS + KV_HEADS], qkv[i][:, HEADS + KV_HEADS :]
        return lambda: store_kv(k, v, kv[:, 0], kv[:, 1], slots[i])

    def copy(i: int) -> Callable[[], object]:
        return lambda: copies[i].copy_(dense[i])

    size = 2 * dense[0].nbytes / 1e9
    ours = size / seconds(*(store(i) for i in range(sets)))
    return ours, size / seconds(*(copy(i) for i in range(sets)), graph=False)


def copy_row(block_size: int, layers: int = 36, blocks: int = 64) -> tuple[float, float]:
    """GB/s moved by copy_blocks within a pool of many layers, and by a device copy of the same bytes."""
    pool = torch.zeros(layers, 4 * blocks, 2, block_size, KV_HEADS, DIM, device="cuda", dtype=DTYPE).normal_()
    order = torch.randperm(4 * blocks, device="cuda").view(-1, 2)
    pairs = order[:blocks].contiguous()
    dense, target = pool[:, :blocks].contiguous(), torch.empty_like(pool[:, :blocks])
    size = 2 * dense.nbytes / 1e9
    ours = size / seconds(lambda: copy_blocks(pool, pool, pairs, block_dim=1))
    return ours, size / seconds(lambda: target.copy_(dense), graph=False)


def host_rows(block_size: int, layers: int = 36, blocks: int = 64) -> list[tuple[str, float, float]]:
    """GB/s to and from pinned host memory, ours and a plain pinned copy's."""
    shape = (layers, 2 * blocks, 2, block_size, KV_HEADS, DIM)
    pool = torch.zeros(shape, device="cuda", dtype=DTYPE).normal_()
    host = torch.zeros(shape, dtype=DTYPE, pin_memory=True)
    pairs = torch.stack([torch.randperm(2 * blocks)[:blocks], torch.randperm(2 * blocks)[:blocks]], 1).cuda()
    dense = pool[:, :blocks].contiguous()
    pinned = torch.empty(dense.shape, dtype=DTYPE, pin_memory=True)
    size = dense.nbytes / 1e9
    rows = []
    for name, ours, plain in (
        ("to", lambda: copy_blocks(pool, host, pairs, 1), lambda: pinned.copy_(dense, non_blocking=True)),
        ("from", lambda: copy_blocks(host, pool, pairs, 1), lambda: dense.copy_(pinned, non_blocking=True)),
    ):
        rows.append((name, size / eager_seconds(ours), size / eager_seconds(plain)))
    return rows


def launch_microseconds(call: Callable[[], object], count: int = 500) -> float:
    """Microseconds of host time that one call takes when the GPU is not waited for."""
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
        torch.cuda.synchronize()
    return min(times)
