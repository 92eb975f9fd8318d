"""Measured mixtures of experts: routed experts of one layer on one GPU, by tokens.

The source has times with balanced and with skewed routing (a power law). Few tokens are mostly decoding
requests, each of another text, and choose about evenly: they touch the expected number of distinct experts,
and take that share of the time with balanced routing. Many tokens are mostly prompts, whose tokens choose
alike: they take the time with skewed routing. Between 512 and 1,024 tokens one passes into the other.

A shape that was not measured takes the utilisation of the nearest: its time, times the ratio of what both
take at the least (weights of the touched experts over bandwidth, or arithmetic over peak).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pagecast.sim.costs.measured.grid import completed
from pagecast.sim.costs.measured.missing import NotMeasured
from pagecast.sim.costs.measured.packing import Floats
from pagecast.sim.costs.measured.tables import MeasuredTable
from pagecast.sim.machine.gpus import Gpu
from pagecast.sim.machine.model_facts import WEIGHT_BITS, Moe

BALANCED, SKEWED = "balanced", "skewed"
_FEW, _MANY = 512.0, 1024.0  # tokens
_KERNELS = {
    "bf16": ("bfloat16",),
    "fp16": ("bfloat16",),
    "fp8": ("fp8_block", "fp8"),
    "int4": ("int4_wo",),
    "nvfp4": ("nvfp4",),
    "mxfp4": ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"),
}
_FARTHEST = np.log(8.0)  # of the product of all sizes, to a measured shape


class ExpertShape(NamedTuple):
    """Routed experts of a layer: sizes of the whole layer, and how it is cut over GPUs."""

    dtype: str
    hidden: int
    inter: int
    active: int
    experts: int
    tp: int
    ep: int


class ExpertTimes:
    """Measured layers of experts of one GPU and engine."""

    def __init__(self, table: MeasuredTable, gpu: Gpu) -> None:
        if "moe" not in table:
            raise NotMeasured("mixtures of experts were not measured")
        self._family = table.family("moe")
        self._gpu = gpu
        self.tokens = self._family.axes["tokens"]

    def shape(self, hidden: int, moe: Moe, weight_dtype: str, tp: int, ep: int) -> ExpertShape:
        """The shape of a model's experts. Errors: NotMeasured for the dtype of its weights."""
        measured = {key[0] for key in self._family.keys}
        for dtype in _KERNELS.get(weight_dtype, ()):
            if dtype in measured:
                return ExpertShape(dtype, hidden, moe.intermediate, moe.active, moe.experts, tp, ep)
        raise NotMeasured(f"experts with {weight_dtype} weights were not measured")

    def seconds(self, shape: ExpertShape, weight_dtype: str) -> Floats:
        """Time of one layer's experts for each number of tokens in `tokens`. Errors: NotMeasured."""
        if (*shape, SKEWED) in self._family.keys:
            return self._measured(shape)
        near = self._nearest(shape)
        return self._measured(near) * self._least(shape, weight_dtype) / self._least(near, weight_dtype)

    def _measured(self, shape: ExpertShape) -> Floats:
        """Time with the routing that so many tokens have."""
        skewed = self._routed(shape, SKEWED)
        if (*shape, BALANCED) not in self._family.keys:
            return skewed
        touched = touched_experts(shape.experts, shape.active, self.tokens)
        most = np.minimum(self.tokens * shape.active, shape.experts)
        even = self._routed(shape, BALANCED) * touched / most
        many = np.clip((self.tokens - _FEW) / (_MANY - _FEW), 0.0, 1.0)
        return np.asarray(even + many * (skewed - even))

    def _routed(self, shape: ExpertShape, routing: str) -> Floats:
        times = completed(self._family.times[self._family.keys[*shape, routing]], self.tokens)
        return np.asarray(np.minimum.accumulate(times[::-1])[::-1])  # see `products`

    def _nearest(self, shape: ExpertShape) -> ExpertShape:
        keys = [
            ExpertShape(*key[:-1]) for key in self._family.keys if key[0] == shape.dtype and key[-1] == SKEWED
        ]

        def distance(key: ExpertShape) -> float:
            return float(sum(abs(np.log(a / b)) for a, b in zip(_local(key), _local(shape), strict=True)))

        near = min(keys, key=distance, default=None)
        if near is None or distance(near) > _FARTHEST:
            raise NotMeasured(
                f"no experts like {shape.experts} of {shape.hidden} x {shape.inter} were measured"
            )
        return near

    def _least(self, shape: ExpertShape, weight_dtype: str) -> Floats:
        """The least time for each number of tokens: streaming touched experts, or the arithmetic."""
        matrix = 3.0 * shape.hidden * shape.inter / shape.tp
        touched = touched_experts(shape.experts, shape.active, self.tokens) / shape.ep
        stream = touched * matrix * WEIGHT_BITS[weight_dtype] / 8 / self._gpu.hbm_bytes_per_s
        rate = self._gpu.matmul_flops("fp8" if shape.dtype.startswith("fp8") else "bf16")
        return np.maximum(stream, 2.0 * self.tokens * shape.active / shape.ep * matrix / rate)


def touched_experts(experts: int, active: int, tokens: Floats) -> Floats:
    """Expected number of distinct experts that tokens are sent to, if each chooses evenly."""
    return np.asarray(experts * (1.0 - (1.0 - active / experts) ** tokens))


def _local(shape: ExpertShape) -> tuple[float, ...]:
    """Sizes that a time hangs on: of a GPU's share of experts."""
    return (shape.hidden, shape.inter / shape.tp, shape.experts / shape.ep, shape.active)
