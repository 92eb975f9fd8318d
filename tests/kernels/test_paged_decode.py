"""Decode attention through the block table equals float64 attention over the gathered tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagecast.kernels import reference
from pagecast.kernels.decode_schedule import FEW_ROWS, DecodeSchedule, DecodeShape
from pagecast.kernels.paged_decode import paged_decode
from pagecast.kernels.rotate_store_kv import rotate_store_kv
from pagecast.sim.core.errors import BadInput

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SLOW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def attend(
    cache: Any,
    q: torch.Tensor,
    window: int | None = None,
    programs: int = 5,
    **more: Any,
) -> torch.Tensor:
    """Runs decode twice over a schedule of few programs, so that work is split; results must be equal."""
    shape = DecodeShape(q.shape[1], cache.k.shape[2], q.shape[2], cache.k.dtype, window)
    schedule = DecodeSchedule(shape, q.shape[0], q.device, programs)
    schedule.update(cache.seq_lens)
    runs = [
        paged_decode(
            q,
            cache.k,
            cache.v,
            cache.table,
            cache.seq_lens,
            schedule=schedule,
            window=window,
            out=torch.zeros_like(q),
            **more,
        )
        for _ in range(2)
    ]
    assert torch.equal(*runs)
    return runs[0]


@SLOW
@given(
    seed=st.integers(0, 1000),
    lens=st.lists(st.one_of(st.just(0), st.integers(1, 400)), min_size=1, max_size=5),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    block_size=st.sampled_from([16, 32, 64, 128, 256]),
    window=st.sampled_from([None, None, 1, 37, 150]),
    programs=st.sampled_from([1, 3, 7, 40]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_equals_attention_in_float64(
    paged: Callable[..., Any],
    error: Callable[..., float],
    seed: int,
    lens: list[int],
    group: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int | None,
    programs: int,
    dtype: torch.dtype,
) -> None:
    cache = paged(lens, kv_heads, dim, block_size, dtype, seed)
    torch.manual_seed(seed)
    q = torch.randn(len(lens), group * kv_heads + 2, dim).to(dtype).to(cache.k.device)[:, 2:]
    out = attend(cache, q, window, programs)
    expected = reference.paged_decode(
        q, cache.k, cache.v, cache.table, lens, window=window, dtype=torch.float64
    )
    if any(lens):
        assert error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("kv_heads", "programs", "lanes"), [(4, 12, 4), (4, 6, 2), (3, 8, 1), (2, 4, 2)])
def test_lanes_share_the_heads(
    paged: Callable[..., Any],
    error: Callable[..., float],
    device: str,
    kv_heads: int,
    programs: int,
    lanes: int,
) -> None:
    """Every way to share heads among lanes, with heads that are cut and heads that are whole, windows too."""
    lens = [130, 0, 17, 300]
    cache = paged(lens, kv_heads, 64, 16, torch.float32)
    q = torch.randn(len(lens), 2 * kv_heads, 64, device=device)
    shape = DecodeShape(2 * kv_heads, kv_heads, 64, torch.float32)
    assert DecodeSchedule(shape, len(lens), device, programs).lanes == lanes
    for window in (None, 40):
        out = attend(cache, q, window, programs)
        expected = reference.paged_decode(
            q, cache.k, cache.v, cache.table, lens, window=window, dtype=torch.float64
        )
        assert error(out, expected) < 2e-6


def test_a_schedule_for_few_rows_computes_what_one_for_more_does(
    paged: Callable[..., Any], device: str
) -> None:
    cache = paged([130, 17, 300], 2, 64, 16, torch.float32)
    q = torch.randn(3, 4, 64, device=device)
    shape = DecodeShape(4, 2, 64, torch.float32)
    few, many = (DecodeSchedule(shape, rows, device) for rows in (FEW_ROWS, FEW_ROWS + 1))
    assert few.cut != many.cut
    outs = []
    for schedule in (few, many):
        schedule.update(cache.seq_lens)
        outs.append(paged_decode(q, cache.k, cache.v, cache.table, cache.seq_lens, schedule=schedule))
    torch.testing.assert_close(*outs)


def test_rows_of_length_0_are_left_alone(paged: Callable[..., Any], device: str) -> None:
    cache = paged([0, 40, 0], 2, 64, 16, torch.float16)
    q = torch.randn(3, 4, 64, device=device).half()
    out = torch.full_like(q, 7.0)
    paged_decode(q, cache.k, cache.v, cache.table, cache.seq_lens, out=out)
    assert (out[[0, 2]] == 7.0).all()
    assert (out[1] != 7.0).any()


def test_one_schedule_serves_steps_of_other_lengths(
    paged: Callable[..., Any], error: Callable[..., float], device: str
) -> None:
    schedule = DecodeSchedule(DecodeShape(4, 2, 64, torch.float32), 8, device, 6)
    for lens in ([300, 5, 70], [1, 0, 0, 900, 16, 17, 33, 2], [64]):
        cache = paged(lens, 2, 64, 16, torch.float32, len(lens))
        q = torch.randn(len(lens), 4, 64, device=device)
        out = torch.zeros_like(q)
        schedule.update(cache.seq_lens)
        paged_decode(q, cache.k, cache.v, cache.table, cache.seq_lens, schedule=schedule, out=out)
        expected = reference.paged_decode(q, cache.k, cache.v, cache.table, lens, dtype=torch.float64)
        assert error(out, expected) < 2e-6


def test_batches_beyond_one_chunk_of_the_schedule(
    paged: Callable[..., Any], error: Callable[..., float], device: str
) -> None:
    lens = [(7 * i) % 50 if i % 17 == 0 or i > 294 else 0 for i in range(300)]
    cache = paged(lens, 1, 64, 16, torch.float32)
    q = torch.randn(300, 1, 64, device=device)
    out = attend(cache, q, programs=16)
    expected = reference.paged_decode(q, cache.k, cache.v, cache.table, lens, dtype=torch.float64)
    assert error(out, expected) < 2e-6


@pytest.mark.parametrize(("per_head", "dim", "group"), [(True, 80, 4), (False, 128, 1), (False, 64, 11)])
def test_fp8_cache_with_scales(
    paged: Callable[..., Any], error: Callable[..., float], device: str, per_head: bool, dim: int, group: int
) -> None:
    lens = [100, 33]
    cache = paged(lens, 2, dim, 16, torch.float8_e4m3fn)
    q = torch.randn(2, 2 * group, dim, device=device).half()
    scale = (torch.tensor([0.5, 2.0]) if per_head else torch.tensor([0.7])).to(device)
    out = attend(cache, q, k_scale=scale, v_scale=scale)
    expected = reference.paged_decode(
        q, cache.k, cache.v, cache.table, lens, k_scale=scale, v_scale=scale, dtype=torch.float64
    )
    assert error(out, expected) < 2e-3


def test_a_schedule_of_another_model_is_refused(paged: Callable[..., Any], device: str) -> None:
    cache = paged([20], 2, 64, 16, torch.float32)
    schedule = DecodeSchedule(DecodeShape(4, 4, 64, torch.float32), 1, device)
    with pytest.raises(BadInput, match="schedule"):
        paged_decode(
            torch.randn(1, 4, 64, device=device),
            cache.k,
            cache.v,
            cache.table,
            cache.seq_lens,
            schedule=schedule,
        )


@pytest.mark.gpu
def test_a_captured_step_follows_the_lengths(paged: Callable[..., Any], error: Callable[..., float]) -> None:
    """A CUDA graph captured at one set of lengths is right for others, rows of length 0 among them; each
    newest token is stored by the kernel before, while which attention begins."""
    cache = paged([3000, 1, 700, 64, 17, 5000], 2, 128, 16, torch.bfloat16)
    qkv, angles = torch.randn(6, 12, 128, device="cuda").bfloat16(), torch.ones(6, 128, device="cuda")
    out, seq_lens = torch.zeros_like(qkv[:, :8]), cache.seq_lens.clone()
    slots = torch.full((6,), -1, device="cuda")
    shape = DecodeShape(8, 2, 128, torch.bfloat16)
    schedule = DecodeSchedule(shape, 6, "cuda")
    options: dict[str, Any] = {"schedule": schedule, "out": out, "settled": True}

    def step() -> None:
        schedule.update(seq_lens)
        q = rotate_store_kv(qkv, angles, None, None, 1e-6, cache.k, cache.v, slots)
        paged_decode(q, cache.k, cache.v, cache.table, seq_lens, **options)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ([3000, 1, 700, 64, 17, 5000], [2, 0, 0, 64, 16, 4999], [0, 0, 650, 0, 0, 0]) * 5:
        seq_lens.copy_(torch.tensor(lens))
        qkv.normal_()
        newest = (seq_lens - 1).clamp(min=0).long()
        blocks = cache.table.gather(1, newest[:, None] // 16)[:, 0]
        slots.copy_(torch.where(seq_lens > 0, blocks * 16 + newest % 16, -1))
        graph.replay()
        live, q = [i for i, n in enumerate(lens) if n], qkv[:, :8]
        expected = reference.paged_decode(q, cache.k, cache.v, cache.table, lens, dtype=torch.float64)
        assert error(out[live], expected[live]) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_random_shapes_on_the_gpu(paged: Callable[..., Any], error: Callable[..., float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    dtype = pick(torch.bfloat16, torch.float16, torch.float32)
    kv_heads, group, dim = pick(1, 2, 8), pick(1, 2, 3, 4, 5, 7, 8, 16), pick(64, 80, 96, 128, 256)
    lens = [pick(0, 1, 15, 16, 17, 500, 3000, 20_000) for _ in range(pick(1, 7, 60))] + [65]
    window = pick(None, None, 100, 4096)
    fp8 = dtype != torch.float32 and pick(False, False, True)
    cache = paged(
        lens, kv_heads, dim, pick(16, 32, 64, 128, 256), torch.float8_e4m3fn if fp8 else dtype, seed
    )
    scales = {"k_scale": torch.rand(kv_heads) + 0.5, "v_scale": torch.rand(kv_heads) + 0.5} if fp8 else {}
    scales = {name: scale.cuda() for name, scale in scales.items()}
    q = torch.randn(len(lens), kv_heads * group, dim, generator=generator).to(dtype).cuda()
    programs = pick(2, 100, 396, 792)
    expected = reference.paged_decode(
        q, cache.k, cache.v, cache.table, lens, window=window, dtype=torch.float64, **scales
    )
    out = attend(cache, q, window, programs, **scales)
    assert error(out, expected) < TOLERANCE[dtype]
