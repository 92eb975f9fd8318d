"""Measured matrix products: the time of `m` rows for any inputs x outputs.

Two traps of the source. Some times stand above those of more rows, which hold the work of fewer: a product
takes at most as long as one of more rows. vLLM's products scaled by blocks were measured with the launches
of Python, 60 to 280 us for any few rows: the same kernels are taken from SGLang's measurements, or
TensorRT-LLM's. Of its other FP8 products, some hold launches as well, and all of TensorRT-LLM's do (8 to
12 us each): of the engines' times the least counts.
"""

from __future__ import annotations

import numpy as np
from pagecast.sim.costs.measured.grid import bracket, completed, extended
from pagecast.sim.costs.measured.missing import NotMeasured
from pagecast.sim.costs.measured.tables import MeasuredTable, OperationTimes
from pagecast.sim.costs.measured.tables import table as find_table
from pagecast.traces.arrays import Floats

BF16 = "bfloat16"
FP8, BLOCKS = "fp8", "fp8_block"
# How the tables call the kernels for weights stored so, best first. Published FP8 checkpoints of the models
# below are scaled by blocks of 128 x 128, others by tensor or channel.
_KERNELS = {
    "bf16": (BF16,),
    "fp16": (BF16,),
    "fp8": (FP8, BLOCKS),
    "int8": ("sq", "int8_wo"),
    "int4": ("int4_wo",),
    "nvfp4": ("nvfp4",),
    "mxfp4": (),
}
_SCALED_BY_BLOCKS = ("qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2", "glm4_moe", "minimax_m2")
_LEAST_SHAPES = 100  # with fewer, a kernel was not swept over shapes


class Products:
    """Matrix products of one GPU and engine. A shape between measured ones is interpolated in both sizes."""

    def __init__(self, table: MeasuredTable) -> None:
        self._family = table.family("gemm")
        self._lanes = _lanes(table)
        self.rows = self._family.axes["m"]
        self._sizes: dict[str, tuple[list[float], list[float]]] = {}

    def dtype(self, weight_dtype: str, model_type: str) -> str:
        """The kernel for weights of dtype `weight_dtype`. Errors: NotMeasured."""
        dtypes = _KERNELS.get(weight_dtype, ())
        if weight_dtype == "fp8" and model_type in _SCALED_BY_BLOCKS:
            dtypes = dtypes[::-1]
        for dtype in dtypes:
            if _shapes(self._of(dtype)[0], dtype) >= _LEAST_SHAPES:
                return dtype
        raise NotMeasured(f"matrix products with {weight_dtype} weights were not measured")

    def seconds(self, dtype: str, inputs: int, outputs: int) -> Floats:
        """Time of one product for each number of rows in `rows`."""
        wide, deep = self._shapes(dtype)
        total = np.zeros(len(self.rows))
        for n, share in bracket(outputs, wide):
            for k, part in bracket(inputs, deep):
                total += share * part * self._measured(dtype, n, k)
        return total

    def _shapes(self, dtype: str) -> tuple[list[float], list[float]]:
        if dtype not in self._sizes:
            keys = [key for key in self._of(dtype)[0].keys if key[0] == dtype]
            self._sizes[dtype] = sorted({key[1] for key in keys}), sorted({key[2] for key in keys})
        return self._sizes[dtype]

    def _of(self, dtype: str) -> tuple[OperationTimes, ...]:
        """The measurements that kernels of `dtype` are taken from."""
        return self._lanes.get(dtype, (self._family,))

    def _measured(self, dtype: str, n: float, k: float) -> Floats:
        """A measured shape, the least of all lanes."""
        lanes = [self._in_lane(family, dtype, n, k) for family in self._of(dtype)]
        return np.asarray(np.minimum.reduce(lanes))

    def _in_lane(self, family: OperationTimes, dtype: str, n: float, k: float) -> Floats:
        """A measured shape, or the nearest one in proportion to its weights."""
        times, scale = family.of(dtype, n, k), 1.0
        if times is None:
            keys = [key for key in family.keys if key[0] == dtype]
            near = min(keys, key=lambda key: abs(np.log(key[1] / n)) + abs(np.log(key[2] / k)))
            times, scale = family.times[family.keys[near]], n * k / (near[1] * near[2])
        rows = family.axes["m"]
        whole = completed(times, rows)
        bounded_s = np.minimum.accumulate(whole[::-1])[::-1] * scale
        return bounded_s if rows is self.rows else extended(self.rows, rows, bounded_s)


def _lanes(table: MeasuredTable) -> dict[str, tuple[OperationTimes, ...]]:
    """Where products in 8 bits are taken from, as far as it is not their own lane alone."""
    own = table.family("gemm")
    lanes: dict[str, tuple[OperationTimes, ...]] = {}
    if table.engine == "sglang":
        return lanes
    for engine in ("trtllm", "sglang", "vllm"):
        other = None if engine == table.engine else find_table(table.gpu, engine)
        if other is None:
            continue
        products = other.family("gemm")
        if table.engine == "vllm" and _shapes(products, BLOCKS) >= _LEAST_SHAPES:
            lanes[BLOCKS] = (products,)
        if engine != "trtllm" and _shapes(products, FP8) >= _LEAST_SHAPES:
            lanes[FP8] = (*lanes.get(FP8, (own,)), products)
    return lanes


def _shapes(family: OperationTimes, dtype: str) -> int:
    """How many shapes were measured."""
    return sum(key[0] == dtype for key in family.keys)
