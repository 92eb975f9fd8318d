"""Products with fp8 weights equal float64 products of the numbers that fp8 and its scales stand for."""

from collections.abc import Callable

import pytest
import torch
from pagecast.kernels import reference
from pagecast.kernels.fp8_linear import GROUP, Fp8Cut, fp8_linear, quantise_activations, scale_rows
from pagecast.sim.core.errors import BadInput

Error = Callable[[torch.Tensor, torch.Tensor], float]


def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The product in float64, of the activations as they are quantised."""
    numbers, x_scales = quantise_activations(x)
    wide = numbers.double() * x_scales.double().repeat_interleave(GROUP, 1)
    rows = scale_rows(weight.shape[0], scales.shape[0])
    factors = scales.double().repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(GROUP, 1)
    return wide @ (weight.double() * factors).T


def some(tokens: int, outputs: int, inputs: int, rows: int, device: str) -> tuple[torch.Tensor, ...]:
    """Random activations, fp8 weights and scales; one outlier in the activations."""
    generator = torch.Generator().manual_seed(tokens + outputs)
    x = torch.randn(tokens, inputs, generator=generator)
    x[0, 3] = 300.0
    weight = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // rows), inputs // GROUP, generator=generator) / 64
    return x.half().to(device), weight.to(device), scales.to(device)


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "rows", "cut"),
    [
        (5, 192, 384, 64, Fp8Cut(64, 16, 2, 3, 4)),
        (33, 256, 512, 128, Fp8Cut(128, 32, 3, 3, 4)),
        (20, 300, 256, 128, Fp8Cut(64, 16, 1, 3, 4)),  # the last block of outputs is not whole
        (7, 192, 256, 1, Fp8Cut(64, 16, 2, 3, 4)),  # a scale per channel
        (3, 128, 256, 128, None),
    ],
)
def test_equals_the_product_in_float64(
    tokens: int, outputs: int, inputs: int, rows: int, cut: Fp8Cut | None, error: Error, device: str
) -> None:
    x, weight, scales = some(tokens, outputs, inputs, rows, device)
    runs = [fp8_linear(x, weight, scales, cut=cut) for _ in range(2)]
    assert torch.equal(*runs)
    assert error(runs[0], product(x, weight, scales)) < 1e-3


def test_activations_are_rounded_to_the_nearest_fp8_number(device: str) -> None:
    x, _, _ = some(9, 128, 384, 128, device)
    numbers, scales = quantise_activations(x)
    nearest, expected = reference.quantise_groups(x, GROUP)
    assert torch.equal(scales, expected)
    assert float(numbers[0, 3]) == 448
    # Triton's interpreter rounds what lies just below a power of two down to half of it.
    share = float((numbers.float() == nearest.float()).float().mean())
    assert share > (0.999 if device == "cuda" else 0.97)


def test_what_does_not_fit_is_refused(device: str) -> None:
    x, weight, scales = some(2, 128, 256, 128, device)
    with pytest.raises(BadInput, match="multiple of 128"):
        fp8_linear(x[:, :200].contiguous(), weight, scales)
    with pytest.raises(BadInput, match="don't fit"):
        fp8_linear(x, weight, scales[:, :1].contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 40, 200, 1000])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 12288), (1024, 3072)])
def test_sizes_of_models_on_the_gpu(tokens: int, outputs: int, inputs: int, error: Error) -> None:
    x, weight, scales = some(tokens, outputs, inputs, 128, "cuda")
    x = x.bfloat16()
    out = fp8_linear(x, weight, scales)
    assert torch.equal(out, fp8_linear(x, weight, scales))
    assert error(out, product(x, weight, scales)) < 8e-3
