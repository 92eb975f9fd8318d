"""Products of few tokens on Hopper GPUs equal float64 products, however they are cut."""

from collections.abc import Callable

import pytest
import torch
from pagecast.kernels import linear_cuts
from pagecast.kernels.linear_cuts import Kind, LinearCut
from pagecast.kernels.linear_hopper import linear_hopper

Error = Callable[[torch.Tensor, torch.Tensor], float]
pytestmark = pytest.mark.gpu


def some(tokens: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and weights in bf16."""
    generator = torch.Generator().manual_seed(tokens + outputs)
    x = torch.randn(tokens, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    return x.bfloat16().cuda(), weight.bfloat16().cuda()


@pytest.mark.parametrize("tokens", [1, 7, 16, 33, 64, 100, 128, 200, 256])
@pytest.mark.parametrize(
    "cut",
    [
        LinearCut(64, 64, 0, 1, 6),
        LinearCut(64, 64, 0, 4, 8),
        LinearCut(64, 64, 16, 2, 4, 128),
        LinearCut(64, 64, 32, 4, 3, 128),
        LinearCut(128, 128, 0, 1, 3, 128, warps=8),
        LinearCut(128, 128, 0, 4, 3, 128, warps=8),
    ],
)
def test_equals_the_product_in_float64(tokens: int, cut: LinearCut, error: Error) -> None:
    x, weight = some(tokens, 1024, 2048)
    runs = [linear_hopper(x, weight, cut) for _ in range(20)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    out = runs[0].sum(0) if cut.splits > 1 else runs[0]
    assert error(out, x.double() @ weight.double().T) < 3e-3


@pytest.mark.parametrize("rest", [0, 32])
@pytest.mark.parametrize("tokens", [3, 64, 130])
def test_gated_is_silu_of_the_first_half_times_the_second(tokens: int, rest: int, error: Error) -> None:
    x, weight = some(tokens, 6144, 1024)
    out = linear_hopper(x, weight, LinearCut(64, 64, rest, 1, 6), gated=True)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    assert error(out, torch.nn.functional.silu(gate) * up) < 3e-3


IN_USE = [
    pytest.param(kind, outputs, inputs, most, cut, id=f"{kind} {outputs}x{inputs} of {most}")
    for (kind, outputs, inputs), ladder in linear_cuts._CUTS.items()
    for most, cut in ladder
]


@pytest.mark.parametrize(("kind", "outputs", "inputs", "tokens", "cut"), IN_USE)
def test_each_cut_in_use_equals_the_product_in_float64(
    kind: Kind, outputs: int, inputs: int, tokens: int, cut: LinearCut, error: Error
) -> None:
    x, weight = some(tokens, outputs, inputs)
    out = linear_hopper(x, weight, cut, gated=kind == "gated")
    expected = x.double() @ weight.double().T
    if kind == "gated":
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    assert error(out.sum(0) if cut.splits > 1 else out, expected) < 3e-3
