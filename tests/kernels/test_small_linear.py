"""Products of few tokens equal float64 products, whatever they are cut into."""

from collections.abc import Callable

import pytest
import torch
from pagecast.kernels.small_linear import SmallCut, small_linear
from pagecast.sim.core.errors import BadInput

Error = Callable[[torch.Tensor, torch.Tensor], float]


def some(tokens: int, outputs: int, inputs: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + outputs)
    x = torch.randn(tokens, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    return x.half().to(device), weight.half().to(device)


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "cut"),
    [
        (1, 128, 512, None),
        (5, 192, 768, SmallCut(64, 16, 3, 256, 3, 4)),
        (33, 100, 256, SmallCut(32, 64, 2, 128, 3, 4)),  # the last tile of outputs is not whole
        (64, 64, 1024, SmallCut(64, 64, 8, 128, 3, 4)),
    ],
)
def test_equals_the_product_in_float64(
    tokens: int, outputs: int, inputs: int, cut: SmallCut | None, error: Error, device: str
) -> None:
    x, weight = some(tokens, outputs, inputs, device)
    runs = [small_linear(x, weight, cut=cut) for _ in range(2)]
    assert torch.equal(*runs)
    assert error(runs[0], x.double() @ weight.double().T) < 1e-3


def test_what_does_not_fit_is_refused(device: str) -> None:
    x, weight = some(65, 64, 256, device)
    with pytest.raises(BadInput, match="at most 64 tokens"):
        small_linear(x, weight)
    with pytest.raises(BadInput, match="256 inputs"):
        small_linear(x[:2, :200].contiguous(), weight[:, :200].contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 17, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288)])
def test_sizes_of_models_on_the_gpu(tokens: int, outputs: int, inputs: int, error: Error) -> None:
    x, weight = (tensor.bfloat16() for tensor in some(tokens, outputs, inputs, "cuda"))
    assert error(small_linear(x, weight), x.double() @ weight.double().T) < 4e-3
