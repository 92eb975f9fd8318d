"""Blocks arrive whole at their destination, wherever it lies and however it is strided; others stay."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.kernels import reference
from pagecast.kernels.copy_blocks import copy_blocks
from pagecast.sim.core.errors import BadInput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    layers=st.integers(1, 2),
    block_size=st.sampled_from([4, 6]),
    dim=st.sampled_from([64, 80, 200]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    order=st.permutations([0, 2, 3, 4]),
    pairs=st.integers(0, 5),
)
def test_copies_the_pairs_and_nothing_else(
    seed: int, layers: int, block_size: int, dim: int, dtype: torch.dtype, order: list[int], pairs: int
) -> None:
    """Pools are [layers, blocks, 2, block_size, heads, dim]; the source's rows lie in any order."""
    torch.manual_seed(seed)
    shape = (layers, 9, 2, block_size, 3, dim)
    laid_out = torch.randn([shape[d] for d in (1, *order, 5)]).to(dtype).to(DEVICE)
    source = laid_out.permute([(1, *order, 5).index(d) for d in range(6)])
    target = torch.randn(layers, 7, *shape[2:]).to(dtype).to(DEVICE)
    expected = target.clone()
    chosen = torch.stack([torch.randperm(9)[:pairs], torch.randperm(7)[:pairs]], 1)
    if pairs > 2:
        chosen[1, seed % 2] = -1
    copy_blocks(source, target, chosen.to(DEVICE), block_dim=1)
    kept = [(a, b) for a, b in chosen.tolist() if min(a, b) >= 0]
    reference.copy_blocks(source, expected, kept, block_dim=1)
    assert torch.equal(target, expected)


def test_rows_need_not_be_dense() -> None:
    source = torch.randn(3, 5, 4, 2, device=DEVICE)[..., 1]
    target = torch.zeros(3, 4, 5, device=DEVICE).transpose(1, 2)
    copy_blocks(source, target, torch.tensor([[2, 0]], device=DEVICE))
    assert torch.equal(target[0], source[2])
    assert not target[1:].any()


def test_within_one_pool_is_copy_on_write() -> None:
    pool = torch.randn(6, 2, 16, 2, 64, device=DEVICE)
    before = pool.clone()
    copy_blocks(pool, pool, torch.tensor([[2, 5], [0, 1]], device=DEVICE))
    before[5], before[1] = before[2], before[0]
    assert torch.equal(pool, before)


def test_blocks_of_another_shape_are_refused() -> None:
    small, large = torch.zeros(3, 16, device=DEVICE), torch.zeros(3, 32, device=DEVICE)
    with pytest.raises(BadInput, match="don't fit"):
        copy_blocks(small, large, torch.zeros(1, 2, dtype=torch.int64, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [1, 5])
def test_to_the_host_and_back(layers: int) -> None:
    pool = torch.randn(layers, 50, 2, 16, 8, 128, device="cuda").bfloat16()
    host = torch.zeros(layers, 20, 2, 16, 8, 128, dtype=torch.bfloat16, pin_memory=True)
    out = torch.stack([torch.randperm(50)[:20], torch.randperm(20)], 1).cuda()
    copy_blocks(pool, host, out, block_dim=1)
    torch.cuda.synchronize()
    reference_pool = pool.cpu()
    for a, b in out.tolist():
        assert torch.equal(host[:, b], reference_pool[:, a])
    restored = torch.zeros_like(pool)
    copy_blocks(host, restored, out.flip(1).contiguous(), block_dim=1)
    assert torch.equal(restored[:, out[:, 0]], pool[:, out[:, 0]])
    assert restored.count_nonzero() == pool[:, out[:, 0]].count_nonzero()


@pytest.mark.gpu
def test_pageable_host_memory_is_refused() -> None:
    with pytest.raises(BadInput, match="pinned"):
        copy_blocks(torch.zeros(3, 16, device="cuda"), torch.zeros(3, 16), torch.zeros(1, 2).long().cuda())
