"""q comes back normed and turned, K and V land in their slots, and nothing else changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.kernels import reference
from pagecast.kernels.rotate_store_kv import rotate_store_kv
from pagecast.sim.core.errors import BadInput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 30),
    kv_heads=st.integers(1, 5),
    group=st.integers(1, 5),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    block_size=st.sampled_from([16, 48, 256]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    normed=st.booleans(),
    scaled=st.booleans(),
)
def test_as_norms_rotation_and_store_one_after_another(
    seed: int,
    tokens: int,
    kv_heads: int,
    group: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    normed: bool,
    scaled: bool,
) -> None:
    torch.manual_seed(seed)
    qkv = torch.randn(tokens, kv_heads * (group + 2), dim).to(dtype).to(DEVICE)
    turns = torch.rand(tokens, dim // 2, device=DEVICE) * 7
    angles = torch.cat([turns.cos(), turns.sin()], 1)
    norms = [torch.rand(dim).to(dtype).to(DEVICE) + 0.5 if normed else None for _ in range(2)]
    blocks = -(-tokens // block_size) + 1
    slots = torch.randperm(blocks * block_size, device=DEVICE)[:tokens].int()
    slots[torch.rand(tokens, device=DEVICE) < 0.2] = -1
    kv = torch.randn(blocks, 2, block_size, kv_heads, dim).to(dtype).to(DEVICE)
    expected = kv.double()
    wide = [None if norm is None else norm.double() for norm in norms]
    states = torch.randn(tokens, 72).mul(3).to(dtype).to(DEVICE) if scaled else None
    exact = qkv.double()
    if states is not None:
        exact = exact / (states.double().square().mean(1) + 1e-6).sqrt()[:, None, None]
    q_expected = reference.rotate_store_kv(
        exact, angles.double(), *wide, 1e-6, expected[:, 0], expected[:, 1], slots
    )
    v = qkv[:, -kv_heads:].clone()
    q = rotate_store_kv(qkv, angles, *norms, 1e-6, kv[:, 0], kv[:, 1], slots, states)
    error = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(q.double(), q_expected, rtol=error, atol=error)
    torch.testing.assert_close(kv.double(), expected, rtol=error, atol=error)
    assert torch.equal(qkv[:, -kv_heads:], v)


def _stored(numbers: torch.Tensor, kv: torch.Tensor, slot: int) -> None:
    """Writes `numbers` [kv_heads, head_dim] as K and V of one token without a turn."""
    dim = numbers.shape[1]
    still = torch.cat([torch.ones(1, dim // 2), torch.zeros(1, dim // 2)], 1).to(DEVICE)
    slots = torch.tensor([slot], dtype=torch.int32, device=DEVICE)
    qkv = numbers.repeat(3, 1)[None]
    rotate_store_kv(qkv, still, None, None, 1e-6, kv[:, 0], kv[:, 1], slots)


def test_fp8_clamps_what_is_too_large() -> None:
    kv = torch.zeros(1, 2, 16, 1, 64, dtype=torch.float8_e4m3fn, device=DEVICE)
    _stored(torch.tensor([[1e4, -1e4] * 32], device=DEVICE), kv, 3)
    assert kv[0, :, 3, 0, :2].float().tolist() == [[448.0, -448.0]] * 2


def test_offsets_are_64_bit(device: str) -> None:
    """A slot whose offset in elements exceeds 2^31, in a cache that only claims to be that large."""
    if device == "cpu":
        pytest.skip("needs real memory of that size")
    kv = torch.zeros(70_000, 2, 16, 8, 128, dtype=torch.bfloat16, device=device)
    k = torch.randn(8, 128, device=device).bfloat16()
    _stored(k, kv, 69_999 * 16 + 5)
    assert torch.equal(kv[69_999, 1, 5], k)
    assert kv.count_nonzero() == 2 * k.count_nonzero()


def test_no_token_is_nothing_to_do() -> None:
    qkv, kv = torch.randn(0, 6, 64, device=DEVICE), torch.randn(3, 2, 16, 2, 64, device=DEVICE)
    slots = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    q = rotate_store_kv(qkv, torch.zeros(0, 64, device=DEVICE), None, None, 1e-6, kv[:, 0], kv[:, 1], slots)
    assert q.shape == (0, 2, 64)


def test_shapes_that_do_not_fit_are_named() -> None:
    qkv, kv = torch.randn(2, 6, 64, device=DEVICE), torch.randn(3, 2, 16, 2, 80, device=DEVICE)
    slots = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(BadInput, match=r"qkv \(2, 6, 64\) doesn't fit caches \(3, 16, 2, 80\)"):
        rotate_store_kv(qkv, torch.zeros(2, 64, device=DEVICE), None, None, 1e-6, kv[:, 0], kv[:, 1], slots)
    angles, kv = torch.zeros(2, 64, device=DEVICE), torch.randn(3, 2, 16, 2, 64, device=DEVICE)
    states = torch.randn(3, 8, device=DEVICE)
    with pytest.raises(BadInput, match=r"states \(3, 8\) don't fit qkv \(2, 6, 64\)"):
        rotate_store_kv(qkv, angles, None, None, 1e-6, kv[:, 0], kv[:, 1], slots, states)
