"""New K and V land in their slots, exactly, and nowhere else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.kernels import reference
from pagecast.kernels.store_kv import store_kv
from pagecast.sim.core.errors import BadInput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def fused_qkv(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as views into one projection's output, behind two query heads."""
    qkv = torch.randn(tokens, 2 + 2 * heads, dim).to(dtype).to(DEVICE)
    return qkv[:, 2 : 2 + heads], qkv[:, 2 + heads :]


def some_slots(tokens: int, slots: int) -> torch.Tensor:
    chosen = torch.randperm(slots)[:tokens]
    chosen[torch.rand(tokens) < 0.2] = -1
    return chosen.to(DEVICE)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 40),
    heads=st.integers(1, 8),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    block_size=st.sampled_from([16, 32, 48, 256]),
    dtype=st.sampled_from(DTYPES),
    heads_first=st.booleans(),
)
def test_writes_its_slots_and_nothing_else(
    seed: int, tokens: int, heads: int, dim: int, block_size: int, dtype: torch.dtype, heads_first: bool
) -> None:
    torch.manual_seed(seed)
    k, v = fused_qkv(tokens, heads, dim, dtype)
    blocks = -(-tokens // block_size) + 1
    kv = torch.randn(blocks, 2, block_size, heads, dim).to(dtype).to(DEVICE)
    if heads_first:
        kv = kv.transpose(2, 3).contiguous().transpose(2, 3)
    expected = kv.clone()
    slots = some_slots(tokens, blocks * block_size)
    slots = slots.int() if seed % 2 else slots
    store_kv(k, v, kv[:, 0], kv[:, 1], slots)
    reference.store_kv(k, v, expected[:, 0], expected[:, 1], slots)
    assert torch.equal(kv, expected)


@pytest.mark.parametrize("per_head", [True, False])
def test_fp8_holds_the_quotient_by_the_scale(per_head: bool) -> None:
    torch.manual_seed(0)
    # Values that fp8 holds exactly, times a power of two: the interpreter doesn't round to fp8 correctly.
    codes = torch.randint(0, 120, (2, 12, 3, 80), dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scale = (torch.tensor([0.5, 2.0, 4.0]) if per_head else torch.tensor([0.25])).to(DEVICE)
    k, v = (codes.to(DEVICE) * scale[:, None]).half().unbind(0)
    kv = torch.zeros(3, 2, 16, 3, 80, dtype=torch.float8_e4m3fn, device=DEVICE)
    expected = kv.clone()
    slots = some_slots(12, 48)
    store_kv(k, v, kv[:, 0], kv[:, 1], slots, scale, scale)
    reference.store_kv(k, v, expected[:, 0], expected[:, 1], slots, scale, scale)
    assert torch.equal(kv.float(), expected.float())
    assert kv.float().any()


def test_fp8_clamps_what_is_too_large() -> None:
    k = torch.tensor([1e4, -1e4]).repeat(32).view(1, 1, 64).to(DEVICE)
    kv = torch.zeros(1, 2, 16, 1, 64, dtype=torch.float8_e4m3fn, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    store_kv(k, k, kv[:, 0], kv[:, 1], torch.tensor([3], device=DEVICE), one, one)
    assert kv[0, 0, 3, 0, :2].float().tolist() == [448.0, -448.0]


def test_offsets_are_64_bit(device: str) -> None:
    """A slot whose offset in elements exceeds 2^31, in a cache that only claims to be that large."""
    if device == "cpu":
        pytest.skip("needs real memory of that size")
    kv = torch.zeros(70_000, 2, 16, 8, 128, dtype=torch.bfloat16, device=device)
    k = torch.randn(1, 8, 128, device=device).bfloat16()
    store_kv(k, k, kv[:, 0], kv[:, 1], torch.tensor([69_999 * 16 + 5], dtype=torch.int32, device=device))
    assert torch.equal(kv[69_999, 1, 5], k[0])
    assert kv.count_nonzero() == 2 * k.count_nonzero()


def test_no_tokens_is_no_launch() -> None:
    kv = torch.zeros(1, 2, 16, 1, 64, device=DEVICE)
    none = torch.zeros(0, 1, 64, device=DEVICE)
    store_kv(none, none, kv[:, 0], kv[:, 1], torch.zeros(0, dtype=torch.int64, device=DEVICE))


def test_caches_that_do_not_fit_are_refused() -> None:
    k = torch.zeros(1, 2, 64, device=DEVICE)
    kv = torch.zeros(1, 2, 16, 4, 64, device=DEVICE)
    with pytest.raises(BadInput, match="kv_heads"):
        store_kv(k, k, kv[:, 0], kv[:, 1], torch.zeros(1, dtype=torch.int64, device=DEVICE))
