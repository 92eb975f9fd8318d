"""What each recorded run is used for: to fit costs, to set the spread of intervals, or to judge both.

No run has two roles. Only runs that judge are counted in the coverage of intervals:
`tests/benchmarks/coverage.py` prints the table, `test_coverage.py` asserts it.

Times are judged on the kernels that were fitted (`of_fitted_kernels`). Runs of earlier kernels replay the
engine's decisions (`tests/engine/test_recorded.py`), and judge no times.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from pagecast.sim.costs.calibration.file import Calibration, load, shipped
from pagecast.sim.costs.calibration.shape import identity, model_of
from pagecast.sim.runs.other_kernels import other_kernels

TESTS = Path(__file__).resolve().parents[2]
OWN, MODELS = TESTS / "engine" / "recorded", TESTS / "sim" / "runs" / "recorded"
FLEET = TESTS / "engine" / "recorded_fleet" / "h200x2-qwen3-8b-chat-least-loaded"
PUBLIC = Path("groundtruth") / "vllm-0.24.0-h200-qwen3-8b"  # below the shared folder

# Archives: `tests/engine/sweeps/unpack.py`. H and I are two GPUs of which no other run is known.
SWEEPS = TESTS / "engine" / "sweeps"
FIT = (
    SWEEPS / "h200n-qwen3-8b.tar.xz",
    SWEEPS / "h200o-qwen3-8b.tar.xz",
    SWEEPS / "h200h-qwen3-0.6b.tar.xz",
    SWEEPS / "h200i-qwen3-0.6b.tar.xz",
    PUBLIC / "sweep",
    PUBLIC / "azure_conv_repeat2",
    PUBLIC / "azure_conv_async",
    MODELS / "vllm-h200-qwen3-30b-a3b-sweep",
    MODELS / "vllm-h200-qwen3-30b-a3b-azure",
    MODELS / "vllm-h200-qwen3-30b-a3b-azure-async",
    MODELS / "vllm-h200-qwen3-32b-tp2-sweep",
    MODELS / "vllm-h200-qwen3-32b-tp2-sweep-second",
    MODELS / "vllm-h200-qwen3-32b-tp2-azure-second",
    SWEEPS / "h100t-qwen3-8b.tar.xz",
    SWEEPS / "h100u-qwen3-8b.tar.xz",
    MODELS / "vllm-h100-qwen3-8b-sweep",
    MODELS / "vllm-h100-qwen3-8b-azure",
    MODELS / "vllm-h100-qwen3-8b-azure-second",
    MODELS / "vllm-h100-qwen3-8b-azure-async",
)
# How far a load repeated strays (`azure_conv`), and how far one GPU strays from another (B, C and those of a
# fleet of two engines).
SPREAD = (
    PUBLIC / "azure_conv",
    PUBLIC / "azure_conv_repeat3",
    FLEET / "engine-0",
    FLEET / "engine-1",
    OWN / "h200b-qwen3-8b-chat-async",
    OWN / "h200c-qwen3-8b-chat-async",
    OWN / "h200c-qwen3-8b-chat-sync",
    OWN / "h200c-qwen3-8b-mooncake-load",
    OWN / "h200c-qwen3-8b-mooncake-overload",
    OWN / "h200c-qwen3-8b-agents-overload",
)
_JUDGE = (
    PUBLIC / "mooncake_conv",
    PUBLIC / "azure_priority_tight",
    MODELS / "vllm-h200-qwen3-30b-a3b-mooncake",
    MODELS / "vllm-h200-qwen3-32b-tp2-azure",
    MODELS / "vllm-h200-qwen3-32b-tp2-azure-third",
    MODELS / "vllm-h100-qwen3-8b-azure-async-second",
    OWN / "h100t-qwen3-8b-azure-sync",
    OWN / "h100t-qwen3-8b-azure-async",
    OWN / "h100t-qwen3-8b-chat-async",
    OWN / "h100t-qwen3-8b-mooncake-load",
    OWN / "h100t-qwen3-8b-rag-async",
    OWN / "h100u-qwen3-8b-azure-sync",
    OWN / "h100u-qwen3-8b-azure-async",
    OWN / "h100u-qwen3-8b-chat-async",
    OWN / "h100u-qwen3-8b-mooncake-load",
    OWN / "h100u-qwen3-8b-rag-async",
    OWN / "h200a-qwen3-8b-mooncake-load",
    OWN / "h200a-qwen3-8b-mooncake-overload",
    OWN / "h200a-qwen3-8b-agents-load",
    OWN / "h200a-qwen3-8b-agents-overload",
    OWN / "h200d-qwen3-8b-agents-load",
    OWN / "h200e-qwen3-8b-agents-load",
    OWN / "h200c-qwen3-0.6b-mooncake",
    OWN / "h200k-qwen3-8b-mooncake-overload",
    OWN / "h200n-qwen3-8b-mooncake-overload",
    OWN / "h200n-qwen3-8b-azure-sync",
    OWN / "h200n-qwen3-8b-azure-async",
    OWN / "h200o-qwen3-8b-mooncake-load",
    OWN / "h200o-qwen3-8b-rag-async",
    OWN / "h200o-qwen3-8b-chat-async",
    OWN / "h200o-qwen3-8b-chat-sync",
    OWN / "h200o-qwen3-0.6b-mooncake",
)
# Of the hosts that runs of measured operations are from: `measured_operations.py --host-factor SWEEP`.
# None: not known, for the sweep tells what a request takes there, but not why each step takes 0.7 ms longer.
HOST_TIME_FACTORS = {
    "qwen3-30b-a3b": 1.73,
    **dict.fromkeys(("vllm-h100", "vllm-h200-llama", "vllm-h200-qwen3-0.6b", "vllm-h200-qwen3-1.7b")),
}
# Of measured operations: what the host's constants and the spread of steps with prompts come from, beside a
# warm-up run. The spread of step time comes from public runs.
FIT_MEASURED = (
    PUBLIC / "sweep",
    PUBLIC / "azure_conv",
    PUBLIC / "azure_conv_async",
    MODELS / "vllm-h200-qwen3-30b-a3b-sweep",
    MODELS / "vllm-h200-qwen3-32b-tp2-sweep",
    MODELS / "vllm-h200-qwen3-32b-tp2-sweep-second",
    MODELS / "vllm-h100-llama-3.2-3b-azure",
    MODELS / "vllm-h100-qwen2.5-7b-azure",
    MODELS / "vllm-h100-phi-4-azure",
    MODELS / "vllm-h100-mistral-small-24b-azure",
)
JUDGE_MEASURED = (
    PUBLIC / "azure_conv_repeat2",
    PUBLIC / "azure_conv_repeat3",
    PUBLIC / "mooncake_conv",
    PUBLIC / "azure_priority_tight",
    MODELS / "vllm-h200-qwen3-30b-a3b-azure",
    MODELS / "vllm-h200-qwen3-30b-a3b-azure-async",
    MODELS / "vllm-h200-qwen3-30b-a3b-mooncake",
    MODELS / "vllm-h200-qwen3-32b-tp2-azure",
    MODELS / "vllm-h200-qwen3-32b-tp2-azure-second",
    MODELS / "vllm-h200-qwen3-32b-tp2-azure-third",
    MODELS / "vllm-h100-qwen3-8b-azure",
    MODELS / "vllm-h100-qwen3-8b-azure-second",
    MODELS / "vllm-h100-qwen3-8b-azure-async",
    MODELS / "vllm-h100-qwen3-8b-azure-async-second",
    MODELS / "vllm-h100-llama-3.2-3b-mooncake",
    MODELS / "vllm-h100-qwen2.5-7b-mooncake",
    MODELS / "vllm-h100-phi-4-mooncake",
    MODELS / "vllm-h100-mistral-small-24b-mooncake",
    MODELS / "vllm-h100-qwen3-1.7b-azure",
    MODELS / "vllm-h100-qwen3-1.7b-mooncake",
    MODELS / "vllm-h200-qwen3-1.7b-azure",
    MODELS / "vllm-h200-llama-3.2-1b-azure",
    MODELS / "vllm-h200-llama-3.2-1b-mooncake",
    MODELS / "vllm-h200-qwen3-0.6b-azure",
    MODELS / "vllm-h200-qwen3-0.6b-mooncake",
)


@cache
def calibrations() -> tuple[Calibration, ...]:
    """Those that are shipped."""
    return tuple(map(load, shipped()))


def of_fitted_kernels(run: Path) -> bool:
    """Whether a calibration of the run's engine, GPU and model was fitted to the kernels that the run has."""
    folder = folder_of(run)
    if folder is None:
        return True
    meta = json.loads((folder / "meta.json").read_text())
    set_up = meta["engine"], meta["gpu"], identity(model_of(meta, str(folder)))
    return any(
        tuple(calibration.made_for[key] for key in ("engine", "gpu", "model_shape")) == set_up
        and other_kernels(calibration, meta) is None
        for calibration in calibrations()
    )


def host_time_factor(run: Path) -> float | None:
    """The host's factor of a run of vLLM, from another run on that host; None where it is not known."""
    return next((factor for name, factor in HOST_TIME_FACTORS.items() if name in run.name), 1.0)


def shared_folder() -> Path | None:
    """The folder of public recordings beside the project; None where it is absent."""
    return next((p / "shared" for p in TESTS.parents if (p / "shared" / "groundtruth").is_dir()), None)


def folder_of(run: Path) -> Path | None:
    """Where a run of the lists above lies; None where it is absent."""
    if run.is_absolute():
        return run
    shared = shared_folder()
    return shared / run if shared and (shared / run).is_dir() else None


JUDGE = tuple(filter(of_fitted_kernels, _JUDGE))
