"""Kernels run on the GPU where there is one, else in Triton's interpreter; random caches for all tests."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

# The choice is made when a kernel is defined, so before any module with kernels is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class Paged:
    """A paged cache with shuffled blocks; NaN in every place that a kernel has no business to read."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    lens: list[int]


def make_paged(
    lens: Sequence[int], kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, seed: int = 0
) -> Paged:
    """Random K and V of sequences of these lengths in the cache's layout, the unused rest poisoned."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-n // block_size) for n in lens]
    blocks = sum(needed) + 2
    kv = torch.full((blocks, 2, block_size, kv_heads, dim), float("nan"))
    order = (torch.randperm(blocks - 1, generator=generator) + 1).int()
    table = torch.full((len(lens), max([*needed, 1]) + 1), -7, dtype=torch.int32)
    first = 0
    for row, (n, count) in enumerate(zip(lens, needed, strict=True)):
        mine = order[first : first + count]
        first += count
        table[row, :count] = mine
        new = torch.randn(count, 2, block_size, kv_heads, dim, generator=generator)
        if n % block_size:
            new[-1, :, n % block_size :] = float("nan")
        kv[mine.long()] = new
    kv = kv.to(dtype).to(DEVICE)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    return Paged(kv[:, 0], kv[:, 1], table.to(DEVICE), seq_lens, list(lens))


@pytest.fixture(scope="session")
def paged() -> Callable[..., Paged]:
    """`make_paged`."""
    return make_paged


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run here."""
    return DEVICE


@pytest.fixture(scope="session")
def error() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Relative error ‖a - b‖ / ‖b‖ in float64; NaN and infinity count as infinite."""

    def relative(a: torch.Tensor, b: torch.Tensor) -> float:
        a, b = a.double().cpu(), b.double().cpu()
        return float((a - b).norm() / b.norm()) if bool(a.isfinite().all()) else float("inf")

    return relative
