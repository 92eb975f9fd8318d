"""Cuts of products: each divides its product and fits a multiprocessor, and a CPU leaves products alone."""

import pytest
import torch
from pagecast.kernels import linear_cuts
from pagecast.kernels.linear_cuts import Kind, LinearCut, cut_of

SHARED_BYTES = 227 * 1024
CUTS = [
    pytest.param(kind, outputs, inputs, cut, id=f"{kind} {outputs}x{inputs} of {most}")
    for (kind, outputs, inputs), ladder in linear_cuts._CUTS.items()
    for most, cut in ladder
]


@pytest.mark.parametrize(("kind", "outputs", "inputs", "cut"), CUTS)
def test_a_cut_divides_its_product_and_fits(kind: Kind, outputs: int, inputs: int, cut: LinearCut) -> None:
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
