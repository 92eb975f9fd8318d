"""Tuned products are the library's, by algorithms that were timed."""

from typing import Any

import pytest
import torch
from pagecast.engine import ops, tuned_products
from pagecast.engine.params import SamplingParams
from pagecast.kernels.cublas_lt import cublas_lt
from pagecast.sim.core.errors import BadInput

ON_GPU = torch.cuda.is_available()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """The algorithms chosen by a test, forgotten when it ends."""
    chosen: dict[Any, Any] = {}
    monkeypatch.setattr(tuned_products, "_chosen", chosen)
    return chosen


@pytest.mark.skipif(ON_GPU, reason="the engine would start")
def test_tuning_needs_a_gpu(model_of: Any, engine_of: Any) -> None:
    with pytest.raises(BadInput, match="tune_products times products on a GPU"):
        engine_of(model_of("qwen3").folder, tune_products=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_algorithm_multiplies_and_adds(dtype: torch.dtype) -> None:
    x = torch.randn(300, 256, device="cuda").to(dtype)
    weight, states = torch.randn(384, 256, device="cuda").to(dtype), torch.randn(300, 384, device="cuda")
    exact = x.double() @ weight.double().T
    library = cublas_lt(x.device)
    algorithms = library.algorithms(x, weight)
    assert len(algorithms) > 1
    for algorithm in algorithms:
        out, total = torch.empty(300, 384, device="cuda", dtype=dtype), states.to(dtype)
        assert library.multiply(algorithm, x, weight, out, add=False)
        torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=0.1)
        assert library.multiply(algorithm, x, weight, total, add=True)
        torch.testing.assert_close(total.double(), exact + states.to(dtype).double(), rtol=1e-2, atol=0.1)


@pytest.mark.gpu
def test_large_steps_take_the_algorithm_that_was_chosen(
    products: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any algorithm counts as faster than the library's own choice.
    monkeypatch.setattr(tuned_products, "_LEAST_GAIN", 0.0)
    weights = [torch.randn(512, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    tuned_products.tune(weights, 2048)
    assert [least for least, _ in products.values()] == [1025]
    for tokens, tuned in ((2048, True), (1500, True), (1025, True), (1024, False)):
        x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
        exact = x.double() @ weights[2].double().T
        out = tuned_products.multiply(x, weights[2])
        assert (out is not None) == tuned
        torch.testing.assert_close(ops.linear(x, weights[2], None, None).double(), exact, rtol=1e-2, atol=0.1)
        states = torch.ones(tokens, 512, device="cuda", dtype=torch.bfloat16)
        ops.add_linear(states, x, weights[2])
        torch.testing.assert_close(states.double(), exact + 1, rtol=1e-2, atol=0.1)
    assert tuned_products.multiply(x.half(), weights[2].half()) is None


@pytest.mark.gpu
def test_a_tuned_engine_generates_the_same(
    products: dict[Any, Any], monkeypatch: pytest.MonkeyPatch, model_of: Any, engine_of: Any
) -> None:
    monkeypatch.setattr(tuned_products, "_LEAST_GAIN", 0.0)
    model = model_of("qwen3", hidden_size=256, intermediate_size=512)
    prompts = [torch.randint(0, 256, (200,), generator=torch.Generator().manual_seed(2)).tolist()]
    texts = []
    for tuned in (False, True):
        engine = engine_of(
            model.folder,
            dtype="bfloat16",
            max_num_batched_tokens=256,
            enforce_eager=True,
            tune_products=tuned,
        )
        assert bool(products) == tuned
        (completion,) = engine.generate(prompts, SamplingParams(max_tokens=4))
        texts.append(completion.outputs[0].token_ids)
    assert texts[0] == texts[1]
