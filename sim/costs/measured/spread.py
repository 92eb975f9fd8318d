"""Spread of measured costs around a recorded set-up: of step times, and of the host's time.

Of the logarithm of step time, from errors in TPOT, by the lane of the tables. vLLM: root mean square over the
public set-ups on one GPU or over NVLink in docs/measured-operations.md (Llama-2-70B and 7B, CodeLlama-34B,
Mixtral, Llama-3.1-8B), and the error of the one over PCIe (Qwen3-32B), whose all-reduces the tables have too
fast. The others: 1.48 times the median size over every fourth row of AIConfigurator's silicon_sample.csv that
is simulated (252 of TensorRT-LLM, 100 of SGLang). None of these judges an interval; recorded runs do
(`tests/benchmarks/coverage.py --costs measured`).

Synchronous scheduling adds the host's time to every step. Two hosts are known, one twice as slow as the
other.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.machine.gpus import Gpu


@dataclass(frozen=True, slots=True)
class MeasuredSpread:
    """Standard deviation of the logarithm of step time, and its degrees of freedom (Student's t)."""

    sd: float
    freedom: float


HOST_SD = 0.49  # of the logarithm of the host's time: two hosts that are a factor of 2 apart
_LANES = {
    "vllm": MeasuredSpread(0.035, 5.0),
    "trtllm": MeasuredSpread(0.235, 252.0),
    "sglang": MeasuredSpread(0.290, 100.0),
}
_PCIE = MeasuredSpread(0.218, 5.0)


def spread_of(engine: str, gpu: Gpu, gpus: int) -> MeasuredSpread:
    """The spread of an engine's lane on so many of these GPUs."""
    if engine == "vllm" and gpus > 1 and gpu.link == "PCIe":
        return _PCIE
    return _LANES[engine]
