"""Spread of measured costs around a recorded set-up: of step times, and of the host's time.

Of the logarithm of step time, by the lane of the tables. vLLM: the factor on all step times with which a
replay meets the mean TPOT of a public run, the mean over a set-up's runs, the root mean square over the six
set-ups in docs/measured-operations.md (Llama-2-70B, Llama-2-7B, CodeLlama-34B, Mixtral, Llama-3.1-8B and
Qwen3-32B with its own link; `tests/benchmarks/public_spread.py` repeats it), and the error of the last one
where its PCIe link is not given, whose all-reduces the tables have too fast. The others: 1.48 times the
median size over every fourth row of AIConfigurator's silicon_sample.csv that is simulated (252 of
TensorRT-LLM, 100 of SGLang). vLLM with recurrent layers or sparse latents: so over all rows of such models
there (394, of SGLang: of vLLM there are none).

Steps with prompts are off by more than decode steps are: by 8.1% in the sweep of Qwen3-30B-A3B, by 2.0 and
4.7% in two of Qwen3-32B on two GPUs, and by 8.2% (Qwen2.5-7B), 8.1% (Llama-3.2-3B), 4.8% (Phi-4) and 3.9%
(Mistral-Small-24B) in asynchronous runs of the Azure trace on an H100 (`measured_operations.py --prompts
RUN`; root mean square of six set-ups). A run whose steps with prompts wait for their launches sets no spread
(Qwen3-1.7B). TTFT follows them, mean TPOT is known from the public set-ups whatever they take: the level
makes up for them.

Synchronous scheduling adds the host's time to every step. Four hosts are known by their sweeps, one at 1.73
times the others' time for a request. A host that a sweep has measured is known as well as two
determinations of one agree (24.1 us for a request from the sweep of Qwen3-30B-A3B, 24 us from its warm-up
runs; 13.6 and 13.9 us under two rules of composition). Launches, and the least time of a step that is planned
ahead, are given the same spread: a layer without a CUDA graph took five hosts 0.42 to 1.0 ms of a step.

Recorded runs judge these intervals, and each public set-up those that the others give (`coverage.py --costs
measured`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.machine.gpus import Gpu

PROMPT_SD = 0.064
PROMPT_SHARE = 0.2  # of the time in which requests decode, that of steps with prompts: mean of public runs


@dataclass(frozen=True, slots=True)
class MeasuredSpread:
    """Standard deviation of the logarithm of step time, and its degrees of freedom (Student's t).

    `prompt_sd`, `prompt_freedom`: the same of steps with prompts against pure decode steps.
    """

    sd: float
    freedom: float
    prompt_sd: float = PROMPT_SD
    prompt_freedom: float = 6.0


@dataclass(frozen=True, slots=True)
class HostSpread:
    """Mean and standard deviation of the logarithm of a host's time, against the one that is counted."""

    mean: float
    sd: float


UNKNOWN_HOST = HostSpread(0.137, 0.274)
KNOWN_HOST = HostSpread(0.0, 0.03)
_LANES = {
    "vllm": MeasuredSpread(0.032, 6.0),
    "trtllm": MeasuredSpread(0.235, 252.0),
    "sglang": MeasuredSpread(0.290, 100.0),
}
_UNKNOWN_LINK = MeasuredSpread(0.211, 5.0)
_SELECTIVE = MeasuredSpread(0.244, 394.0)


def spread_of(engine: str, gpu: Gpu, gpus: int, *, link_known: bool, selective: bool) -> MeasuredSpread:
    """The spread of an engine's lane on so many of these GPUs.

    `selective`: layers don't attend to all of the context, but keep a state or choose tokens.
    """
    if selective and engine == "vllm":
        return _SELECTIVE
    if engine == "vllm" and gpus > 1 and gpu.link == "PCIe" and not link_known:
        return _UNKNOWN_LINK
    return _LANES[engine]
