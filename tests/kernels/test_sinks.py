"""Attention sinks: a logit beside the scores takes its share of the softmax, with windows and without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pagecast.kernels import reference
from pagecast.kernels.decode_schedule import DecodeSchedule, DecodeShape
from pagecast.kernels.merge_pieces import tokens_per_tile
from pagecast.kernels.paged_decode import paged_decode
from pagecast.kernels.paged_prefill import paged_prefill
from pagecast.kernels.prefill_plan import plan_prefill
from pagecast.sim.core.errors import BadInput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, DIM = 6, 2, 64
Errors = Callable[[torch.Tensor, torch.Tensor], float]


def some_sinks() -> torch.Tensor:
    """Weak and strong ones, and one that nothing outweighs."""
    return torch.tensor([-3.0, 0.0, 1.5, 4.0, -50.0, 200.0], device=DEVICE)


def exact(kernel: Callable[..., Any], q: torch.Tensor, cache: Any, *lens: Any, **options: Any) -> Any:
    k, v = cache.k.nan_to_num(), cache.v.nan_to_num()
    return kernel(q.double(), k, v, cache.table.clamp(min=0), *lens, dtype=torch.float64, **options)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("programs", [2, 11])
def test_decode(window: int | None, programs: int, paged: Any, error: Errors) -> None:
    cache = paged([100, 1, 37, 333], KV_HEADS, DIM, 16, torch.float32)
    q = torch.randn(4, HEADS, DIM, device=DEVICE)
    shape = DecodeShape(HEADS, KV_HEADS, DIM, torch.float32, window)
    schedule = DecodeSchedule(shape, 4, DEVICE, programs=programs)
    schedule.update(cache.seq_lens)
    options = {"window": window, "sinks": some_sinks()}
    ours = paged_decode(q, cache.k, cache.v, cache.table, cache.seq_lens, schedule=schedule, **options)
    expected = exact(reference.paged_decode, q, cache, cache.lens, **options)
    assert error(ours, expected) < 1e-5
    plain = paged_decode(q, cache.k, cache.v, cache.table, cache.seq_lens, schedule=schedule, window=window)
    assert error(plain, expected) > 1e-2


@pytest.mark.parametrize("window", [None, 24])
def test_prefill(window: int | None, paged: Any, error: Errors) -> None:
    new, lens = [30, 5], [30, 90]
    cache = paged(lens, KV_HEADS, DIM, 16, torch.float32)
    q = torch.randn(sum(new), HEADS, DIM, device=DEVICE)
    plan = plan_prefill(new, lens, tokens_per_tile(HEADS, KV_HEADS, torch.float32))
    options = {"window": window, "sinks": some_sinks()}
    ours = paged_prefill(q, cache.k, cache.v, cache.table, torch.from_numpy(plan).to(DEVICE), **options)
    expected = exact(reference.paged_prefill, q, cache, new, lens, **options)
    assert error(ours, expected) < 1e-5


def test_a_sink_is_a_key_without_a_value() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 8)
    scores = torch.einsum("qhd,khd->hqk", q, k)[0].tril(2)
    weights = torch.full((3, 5), 0.0)
    for row in range(3):
        seen = scores[row, : row + 3].exp()
        weights[row, : row + 3] = seen / (seen.sum() + torch.tensor(0.7).exp())
    out = reference.attention(q, k, v, 1.0, None, torch.tensor([0.7]))
    torch.testing.assert_close(out[:, 0], weights @ v[:, 0])


def test_a_sink_for_each_head_is_needed(paged: Any) -> None:
    cache = paged([10], KV_HEADS, DIM, 16, torch.float32)
    q = torch.randn(1, HEADS, DIM, device=DEVICE)
    sinks = torch.zeros(KV_HEADS, device=DEVICE)
    with pytest.raises(BadInput, match=r"sinks \(2,\) must be dense, one for each of 6 query heads"):
        paged_decode(q, cache.k, cache.v, cache.table, cache.seq_lens, sinks=sinks)
