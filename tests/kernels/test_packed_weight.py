"""Weights in 12 bits: which numbers they keep, and how much the others change."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagecast.kernels.packed_weight import pack, packing_error, unpack


def some_weight(outputs: int, inputs: int, seed: int = 0, spread: float = 0.0) -> torch.Tensor:
    """A random bf16 weight whose rows differ in size, and whose numbers' exponents by `spread` besides."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-20, 20, (outputs, 1), generator=generator).float())
    numbers = torch.randn(outputs, inputs, generator=generator)
    return (size * numbers * torch.exp2(spread * torch.randn(inputs, generator=generator))).bfloat16()


@given(st.integers(0, 10_000), st.sampled_from([(64, 64), (128, 192), (192, 64)]), st.booleans())
def test_numbers_within_15_binades_are_kept_and_smaller_ones_become_the_least(
    seed: int, shape: tuple[int, int], gated: bool
) -> None:
    weight = some_weight(*shape, seed, spread=6.0)
    weight[seed % len(weight)] = 0
    held = unpack(pack(weight, gated=gated))
    largest = torch.exp2(torch.floor(torch.log2(weight.float().abs().amax(1, keepdim=True))))
    least = largest * 2.0**-15
    small = weight.float().abs() < least
    assert small.any() and not small.all()
    assert torch.equal(held[~small & (largest > 0)], weight[~small & (largest > 0)])
    assert torch.equal(held.float().abs()[small], least.expand_as(weight)[small])
    assert torch.equal(held.signbit(), weight.signbit())
    rows = weight.float().norm(dim=1).clamp(min=1e-30)
    changed = (held.float() - weight.float()).norm(dim=1) / rows
    assert packing_error(weight) == pytest.approx(float(changed[largest[:, 0] > 0].max()), rel=1e-4)


def test_packed_weights_take_three_quarters() -> None:
    packed = pack(some_weight(128, 256))
    assert packed.signs.nbytes + packed.exponents.nbytes == 128 * 256 * 3 // 2
    assert packed.scales.shape == (128,)


def test_random_weights_hardly_change() -> None:
    assert packing_error(some_weight(256, 4096)) < 1e-5


def test_rows_of_zeros_have_no_error() -> None:
    weight = some_weight(64, 64, spread=6.0)
    error = packing_error(weight)
    assert error > 0
    assert packing_error(torch.cat((weight, torch.zeros_like(weight)))) == error
    assert packing_error(torch.zeros_like(weight)) == 0
