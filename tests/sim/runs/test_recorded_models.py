"""vLLM 0.24 serving a mixture of experts and a model on two GPUs: every recorded decision is the core's.

The runs were recorded on H200s with random weights. `qwen3-30b-a3b` is a mixture of experts on one GPU,
`qwen3-32b-tp2` is split over two GPUs.
"""

from pathlib import Path

import pytest
from pagecast.sim.runs.block_count import block_count
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import compare_decisions

RUNS = Path(__file__).parent / "recorded"
NAMES = ("30b-a3b-azure", "30b-a3b-azure-async", "30b-a3b-mooncake", "32b-tp2-azure")


@pytest.mark.parametrize("name", NAMES)
def test_every_step_and_prefix_hit_is_the_engines(name: str) -> None:
    run = RecordedRun.load(RUNS / f"vllm-h200-qwen3-{name}")
    report = compare_decisions(run)
    assert report.first_mismatch is None
    assert report.ok


def test_an_asynchronous_plan_may_compute_nothing_without_a_preemption() -> None:
    """vLLM plans ahead while all tokens of its running requests are planned already."""
    run = RecordedRun.load(RUNS / "vllm-h200-qwen3-30b-a3b-azure-async")
    assert run.idle is not None
    assert run.idle.waiting.tolist() == [0, 0]
    report = compare_decisions(run)
    assert report.steps_recorded == len(run.steps) + 2
    assert report.ok


def test_the_block_count_of_a_mixture_of_experts_is_predicted_within_half_a_percent() -> None:
    count = block_count(RecordedRun.load(RUNS / "vllm-h200-qwen3-30b-a3b-azure"))
    assert count is not None
    assert abs(count.predicted / count.measured - 1) < 0.005
