"""Tuned products are the library's, by the algorithm that was the fastest."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pagecast.engine import ops, product_tuning
from pagecast.engine.layers import ColumnLinear, RowLinear
from pagecast.engine.params import SamplingParams
from pagecast.engine.tuned_product import TunedProduct
from pagecast.kernels.cublas_lt import cublas_lt
from pagecast.sim.core.errors import BadInput, CannotRunHere

ON_GPU = torch.cuda.is_available()
DEFAULT_MS = 10.0


class FakeLibrary:
    """Algorithms by name, with the time that each takes; one whose name ends in ! computes nonsense."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times = times
        self.spent_ms = 0.0
        self.added: set[bool] = set()

    def algorithms(self, x: torch.Tensor, weight: torch.Tensor) -> list[str]:
        return list(self.times)

    def multiply(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool
    ) -> bool:
        product = x @ weight.T * (2 if name.endswith("!") else 1)
        out.copy_(out + product if add else product)
        self.spent_ms += self.times[name]
        self.added.add(add)
        return True


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, float]], FakeLibrary]:
    """Puts a fake library, on a fake clock, in the place of cuBLASLt."""

    def make(times: dict[str, float]) -> FakeLibrary:
        fake = FakeLibrary(times)

        def event_ms(run: Callable[[], None]) -> float:
            before = fake.spent_ms
            run()
            return fake.spent_ms - before or DEFAULT_MS

        monkeypatch.setattr(product_tuning, "cublas_lt", lambda device: fake)
        monkeypatch.setattr(product_tuning, "_event_ms", event_ms)
        monkeypatch.setattr(product_tuning, "_TIMED_S", 0.0)  # one run
        return fake

    return make


def products(kind: type[ColumnLinear | RowLinear], count: int, *, bias: bool = False) -> list[Any]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        outputs: Any = 32 if kind is RowLinear else (32,)
        made = [kind(16, outputs, bias=bias) for _ in range(count)]
    finally:
        torch.set_default_dtype(torch.float32)
    for product in made:
        torch.nn.init.normal_(product.weight)
    return made


@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
@pytest.mark.parametrize("adding", [False, True])
def test_the_fastest_algorithm_that_is_right_is_taken(
    kind: type[ColumnLinear | RowLinear], adding: bool, library: Any
) -> None:
    fake = library({"slow": 8.0, "fast": 4.0, "faster!": 1.0})
    made = products(kind, 3)
    product_tuning.tune(made, 64, adding=adding)
    assert {product.tuned for product in made} == {TunedProduct(33, "fast")}  # type: ignore[arg-type]
    assert fake.added == {adding and kind is RowLinear}


def test_without_a_faster_algorithm_the_library_chooses(library: Any) -> None:
    library({"as fast": DEFAULT_MS / 2 * 0.999, "slow": 20.0})
    made = products(ColumnLinear, 2)
    product_tuning.tune(made, 64, adding=False)
    assert made[0].tuned is None


def test_a_model_without_a_product_to_tune_is_named(library: Any) -> None:
    library({"fast": 1.0})
    with pytest.raises(BadInput, match="no product that can be tuned"):
        product_tuning.tune(
            [*products(ColumnLinear, 1, bias=True), ColumnLinear(16, (32,), bias=False)], 64, adding=False
        )


def test_too_little_memory_is_named(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = library({"fast": 1.0})

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(fake, "algorithms", fail)
    with pytest.raises(
        CannotRunHere, match="products of 64 tokens don't fit beside the weights; lower max_num"
    ):
        product_tuning.tune(products(ColumnLinear, 1), 64, adding=False)


@pytest.mark.skipif(ON_GPU, reason="the engine would start")
def test_tuning_needs_a_gpu(model_of: Any, engine_of: Any) -> None:
    for gpus in (1, 2):
        with pytest.raises(BadInput, match="tune_products times products on a GPU"):
            engine_of(model_of("qwen3").folder, tune_products=True, tensor_parallel_size=gpus)


@pytest.fixture
def faster_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is timed takes half as long as what was timed before it: the last algorithm is chosen."""
    times = (0.5**n for n in itertools.count())

    def sustained_ms(run: Any, settle_s: float = 0.0) -> float:
        run()
        return next(times)

    monkeypatch.setattr(product_tuning, "_sustained_ms", sustained_ms)


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
@pytest.mark.parametrize("adding", [False, True])
@pytest.mark.usefixtures("faster_each_time")
def test_large_steps_take_the_algorithm_that_was_chosen(adding: bool) -> None:
    made = [product.cuda() for product in products(RowLinear, 3)]
    product_tuning.tune(made, 2048, adding=adding)
    tuned, weight = made[2].tuned, made[2].weight
    assert tuned is not None and tuned.least == 1025
    for tokens in (2048, 1500, 1025, 1024):
        x = torch.randn(tokens, 16, device="cuda", dtype=torch.bfloat16)
        exact = x.double() @ weight.double().T
        assert (tuned.multiply(x, weight) is not None) == (tokens > 1024)
        out = ops.linear(x, ops.Product(weight, tuned=tuned))
        torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=0.1)
        states = torch.ones(tokens, 32, device="cuda", dtype=torch.bfloat16)
        made[2].add_to(states, x)
        torch.testing.assert_close(states.double(), exact + 1, rtol=1e-2, atol=0.1)
    assert tuned.multiply(torch.zeros(2048, 8, device="cuda", dtype=torch.bfloat16), weight) is None


@pytest.mark.gpu
@pytest.mark.usefixtures("faster_each_time")
def test_a_tuned_engine_generates_the_same(model_of: Any, engine_of: Any) -> None:
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
        chosen = [product.tuned is not None for product in engine.loop.runner.model.library_products(256)]
        assert chosen == [tuned] * len(chosen)
        (completion,) = engine.generate(prompts, SamplingParams(max_tokens=4))
        texts.append(completion.outputs[0].token_ids)
    assert texts[0] == texts[1]
