"""CPU time beside the device's work, which no table of operations holds.

Synchronous scheduling adds it to every step; asynchronous scheduling hides it behind the device. But a step
with prompts ends no sooner than its launches, and steps that are planned ahead follow no faster than the host
plans, launches and hands out: small models wait for that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_STEPS = ("step", "request", "worker_request", "request_group", "prompt_step", "ahead")
_LAUNCHES = ("launch_layer", "launch_experts", "launch_sharded", "graphed_layer", "ahead_layer")


@dataclass(frozen=True)
class HostTimes:
    """Seconds of host time.

    `step`, `request`: of a synchronous step, and of each request in it; `workers` and `worker_request` are
    more of a step, and of a request in it, where each GPU has a process of its own; `request_group` is more
    of a request for each group of KV blocks beyond the first (models with windows). `prompt_step`: more of a
    step with prompt chunks; `ungraphed_layer`: more of each layer where no CUDA graph has so many tokens.
    Launching such a layer kernel by kernel takes `launch_layer`, with routed experts `launch_experts` and
    with tensor parallelism `launch_sharded` more; TensorRT-LLM takes the share `launch_trtllm` of that.
    `graphed_layer`: of launching such a layer where CUDA graphs hold all but its attention. `ahead`: the
    least time of a step of vLLM on one GPU that is planned ahead, beside `request` and, with prompts,
    launches; without CUDA graphs `ahead_layer` replaces `launch_layer` there, but for models with routed
    experts, whose launches hold `ahead`.
    `arrival`, `arriving_token`: of an arriving request. No host time, but in no table either, are two shares:
    `hot`, by which the rows of a step with prompts take longer right after another such step, for as many
    tokens as that had (a GPU at its power limit); `busy`, by which the arithmetic of a step with prompts
    takes longer where steps are planned ahead and the GPU never rests. Reading weights and contexts does not.
    Published times of many rows were measured at the power limit, and what they hold of `busy` is not added.

    Sources, all of vLLM 0.24 on H200s but for the last two: `step`, `request`, `prompt_step`,
    `ungraphed_layer` and `hot` are a robust fit to what the steps of one sweep of steady shapes took longer
    than their operations (Qwen3-8B, synchronous; `tests/benchmarks/measured_operations.py --host` repeats
    it). `workers` and `launch_sharded` follow from a sweep of Qwen3-32B on two GPUs, `worker_request` from
    two of them on machines of their own, where a request takes 17.8 and 17.7 us, `launch_experts` from the
    warm-up run of Qwen3-30B-A3B, `launch_layer` and `busy` from `azure_conv_async`, arrivals from
    `azure_conv`, `request_group` from decode steps of Gemma 3 4B on an H100 with its seven groups and with
    one, `launch_trtllm` (of 1, 0.6 and 0.4) from the teaching half of `tests/benchmarks/public_truth.py`,
    `graphed_layer`, `ahead` and `ahead_layer` from steady steps of five models of 16 to 28 layers (0.6B to
    3B, docs/measured-operations.md), in the phases in which their host was fast.
    Hosts differ: that of the warm-up run took about 1.1 ms for a synchronous step and 24 us for each request.
    """

    step: float = 0.65e-3
    request: float = 13.9e-6
    workers: float = 1.4e-3
    worker_request: float = 3.85e-6
    request_group: float = 3.0e-6
    prompt_step: float = 1.13e-3
    ungraphed_layer: float = 30e-6
    launch_layer: float = 0.42e-3
    launch_experts: float = 0.62e-3
    launch_sharded: float = 0.52e-3
    launch_trtllm: float = 0.6
    graphed_layer: float = 0.15e-3
    ahead: float = 1.32e-3
    ahead_layer: float = 0.38e-3
    arrival: float = 0.20e-3
    arriving_token: float = 0.1e-6
    hot: float = 0.028
    busy: float = 0.148

    def step_s(self, gpus: int) -> float:
        """Of a synchronous step on so many GPUs."""
        return self.step + (self.workers if gpus > 1 else 0.0)

    def request_s(self, gpus: int, kv_groups: int) -> float:
        """Of a request in a synchronous step on so many GPUs, whose KV is in so many groups of blocks."""
        more = self.worker_request if gpus > 1 else 0.0
        return self.request + more + (kv_groups - 1) * self.request_group

    def slower(self, factor: float) -> HostTimes:
        """The same where a synchronous step takes the host `factor` times as long."""
        return self._times(factor, _STEPS)

    def launching(self, factor: float) -> HostTimes:
        """The same where launches take `factor` times as long: time for requests does not tell that."""
        return self._times(factor, _LAUNCHES)

    def _times(self, factor: float, names: tuple[str, ...]) -> HostTimes:
        return replace(self, **{name: getattr(self, name) * factor for name in names})

    def launch_s(self, engine: str, layers: int, sparse: int, gpus: int, *, least: bool) -> float:
        """Launching a step kernel by kernel: `sparse` of its `layers` have routed experts.

        `least`: `ahead` is counted beside it.
        """
        each = self.ahead_layer if least else self.launch_layer
        each += self.launch_sharded if gpus > 1 else 0.0
        share = self.launch_trtllm if engine == "trtllm" else 1.0
        return share * (layers * each + sparse * self.launch_experts)


HOST = HostTimes()
