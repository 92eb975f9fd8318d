"""CPU time beside the device's work, which no table of operations holds.

Synchronous scheduling adds it to every step; asynchronous scheduling hides it behind the device, but for the
launches of a step without CUDA graphs, which bound it from below.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostTimes:
    """Seconds of host time.

    `step`, `request`: of a synchronous step, and of each request in it. `prompt_step`: more of a step with
    prompt chunks; `ungraphed_layer`: more of each layer where no CUDA graph has so many tokens.
    `launch_layer`: launching a layer kernel by kernel. `arrival`, `arriving_token`: of an arriving request.
    `hot`: no host time, but in no table either: the share by which the rows of a step with prompts take
    longer right after another such step, for as many tokens as that had (a GPU at its power limit).

    Sources: `step`, `request`, `prompt_step`, `ungraphed_layer` and `hot` are a robust fit to what the steps
    of one sweep of steady shapes took longer than their operations (Qwen3-8B, vLLM 0.24, one H200,
    synchronous; `tests/benchmarks/measured_operations.py --host` repeats it). `launch_layer` is the
    roofline's. Arrivals were fitted to a recording of the same set-up (`azure_conv`).
    """

    step: float = 0.48e-3
    request: float = 13.6e-6
    prompt_step: float = 0.98e-3
    ungraphed_layer: float = 26e-6
    launch_layer: float = 180e-6
    arrival: float = 0.20e-3
    arriving_token: float = 0.1e-6
    hot: float = 0.022


HOST = HostTimes()
