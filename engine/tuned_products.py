"""Products of large steps by the algorithm of cuBLASLt that was timed fastest on this GPU.

Large products draw so much power that the GPU lowers its clock, and then the algorithm with the least energy
is the fastest. Neither cuBLAS's heuristics nor short runs find it, so each candidate runs long enough here
for the clock to settle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from pagecast.kernels.cublas_lt import Algorithm, cublas_lt, takes
from pagecast.sim.core.errors import CannotRunHere
from torch import Tensor

_FINALISTS = 12
_HEAT_S = 0.5
_SETTLE_S = 0.1
_TIMED_S = 0.2
# Differences below this are noise.
_LEAST_GAIN = 1.005
_TOLERANCE = 0.02

_Key = tuple[torch.device, torch.dtype, int, int]
_chosen: dict[_Key, tuple[int, Algorithm]] = {}


def multiply(x: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor | None:
    """x [tokens, inputs] times the transposed weight [outputs, inputs] by the tuned algorithm, added to
    `onto` where that is given; None where there is none for this product."""
    least, algorithm = _chosen.get(_key(weight), (0, None))
    if algorithm is None or len(x) < least or not takes(x, weight):
        return None
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device) if onto is None else onto
    done = cublas_lt(x.device).multiply(algorithm, x, weight, out, add=onto is not None)
    return out if done else None


def tune(weights: Iterable[Tensor], tokens: int) -> None:
    """Chooses algorithms for the products with these weights in steps of more than half of `tokens` tokens,
    for all models in this process.

    Takes some 5 seconds for each shape of weight. Errors: CannotRunHere without cuBLASLt.
    """
    kinds: dict[_Key, list[Tensor]] = {}
    for weight in weights:
        kinds.setdefault(_key(weight), []).append(weight)
    for key, alike in kinds.items():
        x = torch.randn(tokens, alike[0].shape[1], dtype=alike[0].dtype, device=alike[0].device)
        if takes(x, alike[0]):
            _chosen.pop(key, None)
            try:
                fastest = _fastest(x, alike[:2])
            except CannotRunHere as error:
                raise CannotRunHere(f"{error}; leave out tune_products") from None
            if fastest is not None:
                _chosen[key] = (tokens // 2 + 1, fastest)
    torch.cuda.empty_cache()


def _key(weight: Tensor) -> _Key:
    return weight.device, weight.dtype, weight.shape[0], weight.shape[1]


def _fastest(x: Tensor, weights: list[Tensor]) -> Algorithm | None:
    """The algorithm with the shortest time under sustained load; None: PyTorch's choice is as fast."""
    library, out = cublas_lt(x.device), torch.empty(len(x), len(weights[0]), dtype=x.dtype, device=x.device)

    def runs(algorithm: Algorithm) -> Callable[[], None]:
        def run() -> None:
            for weight in weights:
                library.multiply(algorithm, x, weight, out, add=False)

        return run

    def default() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=out)

    expected = F.linear(x, weights[0])
    candidates = []
    for algorithm in library.algorithms(x, weights[0]):
        if library.multiply(algorithm, x, weights[0], out, add=False) and _agree(out, expected):
            candidates.append((_shortest_ms(runs(algorithm)), algorithm))
    candidates.sort(key=lambda timed: timed[0])
    _sustained_ms(default, _HEAT_S)
    before = _sustained_ms(default)
    timed = [(_sustained_ms(runs(algorithm)), algorithm) for _, algorithm in candidates[:_FINALISTS]]
    default_ms = (before + _sustained_ms(default)) / 2
    best_ms, best = min(timed, key=lambda timed: timed[0], default=(default_ms, None))
    return best if best_ms * _LEAST_GAIN < default_ms else None


def _agree(out: Tensor, expected: Tensor) -> bool:
    return float((out - expected).abs().max()) <= _TOLERANCE * float(expected.abs().max())


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
