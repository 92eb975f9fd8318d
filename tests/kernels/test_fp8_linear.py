"""Products with fp8 weights equal float64 products of the numbers that fp8 and its scales stand for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pagecast.kernels import fp8_linear as module
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
        (5, 384, 256, 192, None),  # a tile has outputs of two scales
        (4, 512, 256, 256, None),
        (6, 576, 256, 64, None),  # the last tile is not whole, and has outputs of many scales
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="reads are seen in the interpreter alone")
@pytest.mark.parametrize(("outputs", "rows"), [(576, 64), (192, 1), (384, 192)])
def test_no_scale_past_the_last_is_read(
    outputs: int, rows: int, error: Error, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import interpreter

    x, weight, scales = some(6, outputs, 256, rows, "cpu")
    held = torch.full((2 * scales.numel(),), 1e30)
    held[: scales.numel()] = scales.flatten()
    scales, past = held[: scales.numel()].view(scales.shape), held[scales.numel() :]
    first, last = past.data_ptr(), past.data_ptr() + past.nbytes
    read = list[int]()
    interpreted = interpreter._interpreter

    class Watched:
        """Triton's interpreter; notes the addresses that are read past the scales."""

        def __getattr__(self, name: str) -> Any:
            return getattr(interpreted, name)

        def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
            read.extend(int(at) for at in addresses[mask].flat if first <= at < last)
            return interpreted.load(addresses, mask, other, dtype)

    monkeypatch.setattr(interpreter, "_interpreter", Watched())
    out = fp8_linear(x, weight, scales)
    assert not read
    assert error(out, product(x, weight, scales)) < 1e-3


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in the same shape, but not dense."""
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("launched", [False, True])
def test_what_does_not_fit_is_refused(launched: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_launches", {})
    x, weight, scales = some(2, 256, 256, 128, device)
    if launched:
        fp8_linear(x, weight, scales)
    with pytest.raises(BadInput, match="multiple of 128"):
        fp8_linear(x[:, :200].contiguous(), weight, scales)
    for others in (
        (x[:, :128].contiguous(), weight, scales),
        (x, transposed(weight), scales),
        (x, weight.half(), scales),
        (x, weight, transposed(scales)),
        (x, weight, scales.half()),
        (x, weight, scales[:, :1].contiguous()),
        (x, weight, scales.repeat(300, 1)),
        (x, weight, scales[:0]),
        (x, weight, scales.repeat(2, 1)[:3]),
    ):
        with pytest.raises(BadInput, match="don't fit"):
            fp8_linear(*others)
    with pytest.raises(BadInput, match="dense rows"):
        fp8_linear(transposed(x), weight, scales)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 40, 200, 1000])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 12288), (1024, 3072)])
def test_sizes_of_models_on_the_gpu(tokens: int, outputs: int, inputs: int, error: Error) -> None:
    x, weight, scales = some(tokens, outputs, inputs, 128, "cuda")
    x = x.bfloat16()
    out = fp8_linear(x, weight, scales)
    assert torch.equal(out, fp8_linear(x, weight, scales))
    assert error(out, product(x, weight, scales)) < 8e-3
