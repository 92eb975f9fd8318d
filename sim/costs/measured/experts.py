"""Measured mixtures of experts: routed experts of one layer on one GPU, by tokens.

The source has times with balanced and with skewed routing (a power law). Few tokens are mostly decoding
requests, each of another text, and choose about evenly: they touch the expected number of distinct experts,
and take that share of the time with balanced routing. Many tokens are mostly prompts, whose tokens choose
alike: they take the time with skewed routing. Between 512 and 1,024 tokens one passes into the other.

A shape that was not measured takes the time of the nearest, times the ratio of both in another engine's
measurements; where neither has both, times the ratio of what both take at the least (weights of the touched
experts over bandwidth, or arithmetic over peak).

TensorRT-LLM's FP8 experts on Blackwell were published with a kernel that it does not serve with: they take
the least of all engines' times, for vLLM and SGLang have TensorRT-LLM's own there, through FlashInfer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pagecast.sim.costs.measured.grid import completed, extended
from pagecast.sim.costs.measured.missing import NotMeasured
from pagecast.sim.costs.measured.tables import MeasuredTable
from pagecast.sim.costs.measured.tables import table as find_table
from pagecast.sim.machine.gpus import Gpu
from pagecast.sim.machine.model_facts import WEIGHT_BITS, Moe
from pagecast.traces.arrays import Floats

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
# TensorRT-LLM multiplies MXFP4 in 8 bits where a GPU can (Blackwell); vLLM and SGLang do so only if told.
_TRTLLM_KERNELS = {**_KERNELS, "mxfp4": _KERNELS["mxfp4"][::-1]}
_SHARED = "fp8_block"
_OTHERS = {"vllm": (), "sglang": (), "trtllm": ("vllm", "sglang")}
_BLACKWELL = ("B200", "B300", "GB200", "GB300")
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
        self._trtllm = table.engine == "trtllm"
        self._gpu = gpu
        self.tokens = self._family.axes["tokens"]
        self._others = [other for name in _OTHERS[table.engine] if (other := _lane(table.gpu, name, gpu))]

    def shape(self, hidden: int, moe: Moe, weight_dtype: str, tp: int, ep: int) -> ExpertShape:
        """The shape of a model's experts. Errors: NotMeasured for the dtype of its weights."""
        measured = {key[0] for key in self._family.keys}
        kernels = _TRTLLM_KERNELS if self._trtllm else _KERNELS
        for dtype in kernels.get(weight_dtype, ()):
            if dtype in measured:
                return ExpertShape(dtype, hidden, moe.intermediate, moe.active, moe.experts, tp, ep)
        raise NotMeasured(f"experts with {weight_dtype} weights were not measured")

    def seconds(self, shape: ExpertShape, weight_dtype: str) -> Floats:
        """Time of one layer's experts for each number of tokens in `tokens`. Errors: NotMeasured."""
        times = self._own(shape, weight_dtype)
        if self._trtllm and shape.dtype == _SHARED and self._gpu.name in _BLACKWELL:
            for other in self._others:
                if other.has(shape):
                    times = np.minimum(times, other.at(shape, self.tokens))
        return times

    def has(self, shape: ExpertShape) -> bool:
        """Whether the shape was measured."""
        return (*shape, SKEWED) in self._family.keys

    def at(self, shape: ExpertShape, tokens: Floats) -> Floats:
        """A measured shape's time at some numbers of tokens."""
        return extended(tokens, self.tokens, self._measured(shape))

    def _own(self, shape: ExpertShape, weight_dtype: str) -> Floats:
        if self.has(shape):
            return self._measured(shape)
        near = self._nearest(shape)
        times = self._measured(near)
        for other in self._others:
            if other.has(shape) and other.has(near):
                return times * other.at(shape, self.tokens) / other.at(near, self.tokens)
        return times * self._least(shape, weight_dtype) / self._least(near, weight_dtype)

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
        rate = self._gpu.matmul_flops("fp8" if shape.dtype.startswith("fp8") else "bf16")
        arithmetic = 2.0 * self.tokens * shape.active / shape.ep * matrix / rate
        return np.maximum(self.streaming(shape, weight_dtype, self.tokens), arithmetic)

    def streaming(self, shape: ExpertShape, weight_dtype: str, tokens: Floats) -> Floats:
        """Seconds to read the experts of one layer that so many tokens touch."""
        touched = touched_experts(shape.experts, shape.active, tokens) / shape.ep
        matrix_bytes = 3.0 * shape.hidden * shape.inter / shape.tp * WEIGHT_BITS[weight_dtype] / 8
        return np.asarray(touched * matrix_bytes / self._gpu.hbm_bytes_per_s)


def _lane(gpu_name: str, engine: str, gpu: Gpu) -> ExpertTimes | None:
    table = find_table(gpu_name, engine)
    return ExpertTimes(table, gpu) if table and "moe" in table else None


def touched_experts(experts: int, active: int, tokens: Floats) -> Floats:
    """Expected number of distinct experts that tokens are sent to, if each chooses evenly."""
    return np.asarray(experts * (1.0 - (1.0 - active / experts) ** tokens))


def _local(shape: ExpertShape) -> tuple[float, ...]:
    """Sizes that a time hangs on: of a GPU's share of experts."""
    return (shape.hidden, shape.inter / shape.tp, shape.experts / shape.ep, shape.active)
