"""Widened blocks are the cache's blocks, number for number."""

import pytest
import torch
from pagecast.kernels.widen_blocks import widen_blocks
from pagecast.sim.core.errors import BadInput


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_blocks_are_copied_as_they_are(dtype: torch.dtype, device: str) -> None:
    kv = torch.randn(2, 9, 2, 16, 3, 80, device=device).to(torch.float8_e4m3fn)
    out = torch.full((6, 2, 16, 3, 80), 7.0, dtype=dtype, device=device)
    blocks = torch.tensor([5, 0, 8, 5], device=device)
    widen_blocks(kv[1], blocks, out)
    assert torch.equal(out[:4].float(), kv[1].float()[blocks])
    assert (out[4:] == 7).all()


def test_too_many_blocks_are_refused(device: str) -> None:
    kv = torch.zeros(9, 2, 16, 1, 64, device=device).to(torch.float8_e4m3fn)
    out = torch.zeros(2, 2, 16, 1, 64, device=device)
    with pytest.raises(BadInput, match="room for 2"):
        widen_blocks(kv, torch.tensor([1, 2, 3], device=device), out)
