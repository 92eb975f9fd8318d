"""Choice of cuBLASLt's algorithms for the products of large steps, by timing them on this GPU.

Large products draw so much power that the GPU lowers its clock, and then the algorithm with the least energy
is the fastest. Neither cuBLAS's heuristics nor short runs find it, so each candidate runs long enough here
for the clock to settle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from pagecast.engine.layers import ColumnLinear, RowLinear
from pagecast.engine.tuned_product import TunedProduct
from pagecast.kernels.cublas_lt import DTYPES, Algorithm, cublas_lt
from pagecast.sim.core.errors import BadInput, CannotRunHere
from torch import Tensor

_FINALISTS = 12
_HEAT_S = 0.5
_SETTLE_S = 0.1
_TIMED_S = 0.2
# Differences below this are noise.
_LEAST_GAIN = 1.005
_TOLERANCE = 0.02


def tune(products: Iterable[ColumnLinear | RowLinear], tokens: int, *, adding: bool) -> None:
    """Chooses algorithms for these products in steps of more than half of `tokens` tokens.

    `adding`: row-wise products add to what is there. Takes some 5 seconds for each shape of weight. Errors:
    BadInput where no product can be tuned; CannotRunHere without cuBLASLt, or without enough memory.
    """
    alike: dict[tuple[object, ...], list[ColumnLinear | RowLinear]] = {}
    for product in products:
        if product.weight.dtype in DTYPES and product.scales is None and product.bias is None:
            alike.setdefault((type(product), *product.weight.shape), []).append(product)
    if not alike:
        raise BadInput(
            "tune_products: this model has no product that can be tuned; those in bf16 or fp16 can, without "
            "bias and without fp8 weights"
        )
    for group in alike.values():
        add = adding and isinstance(group[0], RowLinear)
        try:
            fastest = _fastest([product.weight for product in group[:2]], tokens, add)
        except CannotRunHere as error:
            raise CannotRunHere(f"{error}; leave out tune_products") from None
        except torch.OutOfMemoryError:
            raise CannotRunHere(
                f"products of {tokens} tokens don't fit beside the weights; lower max_num_batched_tokens, or "
                "leave out tune_products"
            ) from None
        for product in group:
            product.tuned = None if fastest is None else TunedProduct(tokens // 2 + 1, fastest)
    torch.cuda.empty_cache()


def _fastest(weights: list[Tensor], tokens: int, add: bool) -> Algorithm | None:
    """The algorithm with the shortest time under sustained load; None: PyTorch's choice is as fast."""
    outputs, inputs = weights[0].shape
    kind = {"dtype": weights[0].dtype, "device": weights[0].device}
    x, out = torch.randn(tokens, inputs, **kind), torch.zeros(tokens, outputs, **kind)
    library = cublas_lt(x.device)

    def default() -> None:
        for weight in weights:
            if add:
                out.addmm_(x, weight.t())
            else:
                torch.mm(x, weight.t(), out=out)

    def by(algorithm: Algorithm) -> Callable[[], None]:
        def run() -> None:
            for weight in weights:
                library.multiply(algorithm, x, weight, out, add=add)

        return run

    expected = F.linear(x, weights[0])
    allowed = _TOLERANCE * max(float(expected.max()), -float(expected.min()))
    candidates = []
    for algorithm in library.algorithms(x, weights[0]):
        out.zero_()
        done = library.multiply(algorithm, x, weights[0], out, add=add)
        if done and float(out.sub_(expected).abs_().max()) <= allowed:
            candidates.append((_shortest_ms(by(algorithm)), algorithm))
    del expected
    candidates.sort(key=lambda timed: timed[0])
    out.zero_()
    _sustained_ms(default, _HEAT_S)
    before = _sustained_ms(default)
    best_ms, best = before, None
    for _, algorithm in candidates[:_FINALISTS]:
        out.zero_()
        took = _sustained_ms(by(algorithm))
        if took < best_ms:
            best_ms, best = took, algorithm
    out.zero_()
    default_ms = (before + _sustained_ms(default)) / 2
    return best if best_ms * _LEAST_GAIN < default_ms else None


def _shortest_ms(run: Callable[[], None], times: int = 3) -> float:
    """The shortest of several runs."""
    return min(_event_ms(run) for _ in range(times))


def _sustained_ms(run: Callable[[], None], settle_s: float = _SETTLE_S) -> float:
    """Mean time of runs one after another, once they have run for `settle_s`."""
    end = time.perf_counter() + settle_s
    while time.perf_counter() < end:
        _event_ms(run)
    count = max(1, round(_TIMED_S * 1e3 / _event_ms(run)))

    def many() -> None:
        for _ in range(count):
            run()

    return _event_ms(many) / count


def _event_ms(run: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
