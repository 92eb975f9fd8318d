"""Products with packed weights: cuts fit a multiprocessor, and products equal float64 ones on Hopper GPUs."""

from collections.abc import Callable

import pytest
import torch
from pagecast.kernels import packed_cuts
from pagecast.kernels import packed_hopper as module
from pagecast.kernels.linear_cuts import Kind
from pagecast.kernels.packed_cuts import MOST_PACKED_TOKENS, PackedCut, has_cuts, packed_cut_of, packed_sizes
from pagecast.kernels.packed_hopper import packed_hopper
from pagecast.kernels.packed_weight import pack, unpack
from pagecast.sim.core.errors import BadInput

Error = Callable[[torch.Tensor, torch.Tensor], float]
SHARED_BYTES = 227 * 1024
IN_USE = [
    pytest.param(kind, outputs, inputs, most, cut, id=f"{kind} {outputs}x{inputs} of {most}")
    for (kind, outputs, inputs), ladder in packed_cuts._CUTS.items()
    for most, cut in ladder
]
each_cut_in_use = pytest.mark.parametrize(("kind", "outputs", "inputs", "most", "cut"), IN_USE)


def weights(outputs: int, inputs: int) -> torch.Tensor:
    """Random bf16 weights."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    return (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).bfloat16()


@each_cut_in_use
def test_a_cut_divides_its_product_and_fits(
    kind: Kind, outputs: int, inputs: int, most: int, cut: PackedCut
) -> None:
    assert cut.divides(inputs) and outputs % 64 == 0
    assert (kind == "sums") == (cut.splits > 1)
    assert cut.tokens + cut.rest == most
    stage = cut.parts * 64 * cut.depth * 3 // 2 + most * cut.depth * 2 + 16
    assert cut.stages >= 3
    assert cut.stages * stage <= SHARED_BYTES
    # Items fill the multiprocessors of an H200 but for a few.
    items = cut.items(outputs, most)
    assert items / (-(-items // 132) * 132) > 0.96


def test_a_ladder_rises_and_what_is_beyond_is_left_to_bf16() -> None:
    for (kind, outputs, inputs), ladder in packed_cuts._CUTS.items():
        sizes = packed_sizes(kind, outputs, inputs)
        assert sizes == sorted(set(sizes))
        assert has_cuts(kind, outputs, inputs)
        assert packed_cut_of(kind, 1, (outputs, inputs)) == ladder[0][1]
        assert packed_cut_of(kind, sizes[-1], (outputs, inputs)) == ladder[-1][1]
        assert packed_cut_of(kind, sizes[-1] + 1, (outputs, inputs)) is None
        assert sizes[-1] == MOST_PACKED_TOKENS
    assert not has_cuts("plain", 64, 64)
    assert packed_cut_of("plain", 1, (64, 64)) is None


def test_what_does_not_fit_is_refused_before_and_after_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched here: a launch that stands for the kernel counts calls."""
    launched = list[int]()
    monkeypatch.setattr(module, "_launches", {})
    monkeypatch.setattr(module, "packed_launch", lambda *_: lambda programs, *_: launched.append(programs))
    monkeypatch.setattr(module, "processors_of", lambda _device: 132)
    cut = PackedCut(2, 16, 0)
    x, weight = torch.empty(8, 1024).bfloat16(), pack(weights(256, 1024))
    refused = (
        (x[:, :512].contiguous(), weight, cut),
        (x.half(), weight, cut),
        (torch.empty(8, 2048).bfloat16()[:, :1024], weight, cut),
        (x, weight, PackedCut(2, 16, 0, 3)),
        (x, pack(weights(256, 1024), gated=True), PackedCut(2, 16, 0, 2)),
        (torch.empty(8, 128).bfloat16(), pack(weights(256, 128)), cut),
    )
    for _ in range(2):
        for arguments in refused:
            with pytest.raises(BadInput, match="don't fit"):
                packed_hopper(*arguments)
        assert packed_hopper(x, weight, cut).shape == (8, 256)
        assert packed_hopper(x[:0], weight, cut).shape == (0, 256)
    assert launched == [2, 2]


def exact(x: torch.Tensor, weight: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
    """Their product in float64; gated: silu of its first half times the second."""
    product = x.double() @ weight.double().T
    if not gated:
        return product
    gate, up = product.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def some(tokens: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens, and weights that 12 bits hold exactly."""
    generator = torch.Generator().manual_seed(tokens + outputs)
    x = torch.randn(tokens, inputs, generator=generator)
    return x.bfloat16().cuda(), unpack(pack(weights(outputs, inputs).cuda()))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 16, 33, 64, 100, 192])
@pytest.mark.parametrize(
    "cut",
    [
        PackedCut(2, 16, 0, 1, 128),
        PackedCut(2, 64, 0, 2),
        PackedCut(2, 64, 32, 2),
        PackedCut(3, 32, 16),
        PackedCut(3, 128, 64),
    ],
)
def test_equals_the_product_in_float64(tokens: int, cut: PackedCut, error: Error) -> None:
    x, weight = some(tokens, 640, 2048)
    packed = pack(weight)
    torch.cuda.synchronize()  # weights must be there before a kernel that reads them is queued
    runs = [packed_hopper(x, packed, cut) for _ in range(20)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    out = runs[0].sum(0) if cut.splits > 1 else runs[0]
    assert error(out, exact(x, weight)) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 64, 192, 400])
def test_gated_is_silu_of_the_first_half_times_the_second(tokens: int, error: Error) -> None:
    x, weight = some(tokens, 6144, 1024)
    packed = pack(weight, gated=True)
    torch.cuda.synchronize()
    out = packed_hopper(x, packed, PackedCut(3, 128, 64))
    assert error(out, exact(x, weight, gated=True)) < 3e-3


@pytest.mark.gpu
@each_cut_in_use
def test_each_cut_in_use_equals_the_product_in_float64(
    kind: Kind, outputs: int, inputs: int, most: int, cut: PackedCut, error: Error
) -> None:
    outputs = min(outputs, 192 * 150)  # more than one round of items
    x, weight = some(most, outputs, inputs)
    packed = pack(weight, gated=kind == "gated")
    torch.cuda.synchronize()
    runs = [packed_hopper(x, packed, cut) for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    whole = runs[0].sum(0) if cut.splits > 1 else runs[0]
    assert error(whole, exact(x, weight, gated=kind == "gated")) < 3e-3
