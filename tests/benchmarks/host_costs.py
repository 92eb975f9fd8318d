"""Host time that offloading and n-grams take, fitted to recorded runs, with intervals.

    python tests/benchmarks/host_costs.py

Steps of a synchronous run took longer than their calibrated costs say. What is left is explained by least
squares: with a host tier by a time per step and one per block submitted (the first half of the steps,
vLLM 0.24), with n-grams that found nothing by a time per step and one per request (this project's
engine), with n-grams by a time per request and one per step with prompts (four runs of vLLM 0.24). The
intervals of 95% come from 1,000 resamples of stretches of 100 steps. The calibration's own error is not in
them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.file import load
from pagecast.sim.fitting.option_fit import excess_ns, lookup_ns_of, offloading_rows
from pagecast.sim.runs.busy_steps import fitted_steps
from pagecast.sim.runs.forecast import scenario_of
from pagecast.sim.runs.recorded import RecordedRun

TESTS = Path(__file__).parents[1]
STRETCH = 100
Floats = npt.NDArray[np.float64]


def estimate(rows: list[tuple[float, float, float]], *, relative: bool) -> tuple[Floats, Floats]:
    """Least squares, of errors relative to a step's time or not, and 95% intervals.

    `rows`: units of a step, nanoseconds beyond its costs, and nanoseconds that it took.
    """
    units, more, took = np.array(rows).T
    scale = took if relative else np.ones_like(took)
    table = np.stack([1 / scale, units / scale, more / scale], axis=1)
    draw = np.random.default_rng(0)
    starts = draw.integers(0, len(table) - STRETCH + 1, size=(1000, len(table) // STRETCH))
    fits = [_solve(table[(some[:, None] + np.arange(STRETCH)).ravel()]) for some in starts]
    return _solve(table), np.percentile(np.array(fits), [2.5, 97.5], axis=0)


def _solve(table: Floats) -> Floats:
    fitted: Floats = np.linalg.lstsq(table[:, :2], table[:, 2], rcond=None)[0]
    return fitted


def show(what: str, unit: str, rows: list[tuple[float, float, float]], *, relative: bool) -> None:
    """Prints the two costs of one fit."""
    (step, each), ((low, low_each), (high, high_each)) = estimate(rows, relative=relative)
    print(f"{what}: {len(rows):,} steps")
    print(f"  per step  {step / 1e3:8.1f} us  ({low / 1e3:.1f} to {high / 1e3:.1f})")
    print(f"  per {unit:<6}{each / 1e3:8.1f} us  ({low_each / 1e3:.1f} to {high_each / 1e3:.1f})")


def main() -> None:
    """Prints both fits."""
    run = RecordedRun.load(TESTS / "sim/runs/recorded/vllm-h200-qwen3-8b-offload-mooncake")
    costs = scenario_of(run).step_costs()
    rows = offloading_rows(run, costs, 0.5)
    show("vLLM with a host tier", "block", rows, relative=False)
    costs = CalibratedCosts(load("pagecast-h200-qwen3-8b"))
    run = RecordedRun.load(TESTS / "engine/recorded/h200f-qwen3-8b-ngram-chat")
    rows = []
    for number, took in zip(*(array.tolist() for array in fitted_steps(run)), strict=True):
        if not run.steps.batch(number).prefill:
            rows.append((run.steps.batch(number).decode_n, excess_ns(run, costs, number, took), took))
    show("this engine with n-grams", "request", rows, relative=True)
    vllm = CalibratedCosts(load("vllm-0.24-h200-qwen3-8b"))
    for name in ("azure", "azure-later", "azure-14", "azure-11"):
        run = RecordedRun.load(TESTS / f"sim/runs/recorded/vllm-h200-qwen3-8b-ngram-{name}")
        each, prompt, sd = lookup_ns_of([run], vllm)
        assert each is not None and prompt is not None and sd is not None
        print(f"vLLM with n-grams, {name} (within {100 * sd:.0f}%)")
        print(f"  per request {each / 1e3:6.1f} us, in a step with prompts {prompt / 1e6:.2f} ms more")


if __name__ == "__main__":
    main()
