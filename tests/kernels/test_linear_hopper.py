"""Products of few tokens: each cut fits a multiprocessor, and products equal float64 ones on Hopper GPUs."""

from collections.abc import Callable

import pytest
import torch
from pagecast.kernels import linear_cuts
from pagecast.kernels import linear_hopper as module
from pagecast.kernels.linear_cuts import Kind, LinearCut, cut_of
from pagecast.kernels.linear_hopper import linear_hopper
from pagecast.sim.core.errors import BadInput

Error = Callable[[torch.Tensor, torch.Tensor], float]
SHARED_BYTES = 227 * 1024
IN_USE = [
    pytest.param(kind, outputs, inputs, most, cut, id=f"{kind} {outputs}x{inputs} of {most}")
    for (kind, outputs, inputs), ladder in linear_cuts._CUTS.items()
    for most, cut in ladder
]
each_cut_in_use = pytest.mark.parametrize(("kind", "outputs", "inputs", "most", "cut"), IN_USE)


@each_cut_in_use
def test_a_cut_divides_its_product_and_fits(
    kind: Kind, outputs: int, inputs: int, most: int, cut: LinearCut
) -> None:
    assert cut.divides(outputs, inputs)
    assert kind == "sums" or cut.splits == 1
    stage = (cut.outputs + cut.tokens + cut.rest) * cut.depth * 2
    assert cut.stages * (stage + 8) <= SHARED_BYTES


def test_a_ladder_rises() -> None:
    for ladder in linear_cuts._CUTS.values():
        sizes = [most for most, _ in ladder]
        assert sizes == sorted(set(sizes))


def test_the_cpu_s_products_are_the_library_s() -> None:
    x, weight = torch.empty(8, 1024).bfloat16(), torch.empty(4096, 1024).bfloat16()
    assert cut_of("plain", x, weight) is None


def test_what_does_not_fit_is_refused_before_and_after_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched here: a launch that stands for the kernel counts calls."""
    cut, launched = LinearCut(64, 16, 0, 1, 6), list[int]()
    monkeypatch.setattr(module, "_launches", {})
    monkeypatch.setattr(module, "linear_launch", lambda *_: lambda programs, *_: launched.append(programs))
    x, weight = torch.empty(8, 256).bfloat16(), torch.empty(128, 256).bfloat16()
    wide = torch.empty(128, 512).bfloat16()
    refused = (
        (x[:, :128].contiguous(), weight, cut),
        (x.half(), weight, cut),
        (x, weight.half(), cut),
        (x.float(), weight.float(), cut),
        (torch.empty(8, 512).bfloat16()[:, :256], weight, cut),
        (x, wide[:, :256], cut),
        (x, weight[:100], cut),
        (x, weight, LinearCut(64, 16, 0, 3, 6)),
    )
    for _ in range(2):
        for arguments in refused:
            with pytest.raises(BadInput, match="don't fit"):
                linear_hopper(*arguments)
        with pytest.raises(BadInput, match="gated product can't be split"):
            linear_hopper(x, weight, LinearCut(64, 16, 0, 2, 6), gated=True)
        assert linear_hopper(x, weight, cut).shape == (8, 128)
    assert launched == [2, 2]


def some(tokens: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and weights in bf16."""
    generator = torch.Generator().manual_seed(tokens + outputs)
    x = torch.randn(tokens, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    return x.bfloat16().cuda(), weight.bfloat16().cuda()


def exact(x: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """Their product in float64; gated: silu of its first half times the second."""
    product = x.double() @ weight.double().T
    if not gated:
        return product
    gate, up = product.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.gpu
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
    assert error(out, exact(x, weight, gated=False)) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("rest", [0, 32])
@pytest.mark.parametrize("tokens", [3, 64, 130])
def test_gated_is_silu_of_the_first_half_times_the_second(tokens: int, rest: int, error: Error) -> None:
    x, weight = some(tokens, 6144, 1024)
    out = linear_hopper(x, weight, LinearCut(64, 64, rest, 1, 6), gated=True)
    assert error(out, exact(x, weight, gated=True)) < 3e-3


@pytest.mark.gpu
@each_cut_in_use
def test_each_cut_in_use_equals_the_product_in_float64(
    kind: Kind, outputs: int, inputs: int, most: int, cut: LinearCut, error: Error
) -> None:
    x, weight = some(most, outputs, inputs)
    out = linear_hopper(x, weight, cut, gated=kind == "gated")
    whole = out.sum(0) if cut.splits > 1 else out
    assert error(whole, exact(x, weight, gated=kind == "gated")) < 3e-3
