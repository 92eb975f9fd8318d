"""Recorded runs of a real engine are the golden answers for every decision."""

import json

import pytest
from pagecast.sim.core.engines.nano_vllm.profile import NANO_VLLM
from pagecast.sim.core.errors import BadInput
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import compare_decisions, limits_of

RUNS = (
    "azure_conv",
    "azure_conv_repeat2",
    "azure_conv_repeat3",
    "azure_conv_async",
    "azure_priority_tight",
    "mooncake_conv",
)


@pytest.mark.parametrize("name", RUNS)
def test_every_decision_of_a_recorded_vllm_run_is_the_same(shared, name):
    run = RecordedRun.load(shared / "groundtruth" / "vllm-0.24.0-h200-qwen3-8b" / name)
    report = compare_decisions(run)
    assert report.first_mismatch is None
    assert report.steps_matched == report.steps_recorded == len(run.steps)
    assert report.cached_tokens_matched == report.requests == len(run.requests)


def test_another_engines_rules_do_not_pass(shared):
    run = RecordedRun.load(shared / "groundtruth" / "vllm-0.24.0-h200-qwen3-8b" / "mooncake_conv")
    report = compare_decisions(run, NANO_VLLM)
    assert not report.ok
    assert report.steps_matched < report.steps_recorded
    assert report.first_mismatch.startswith("step 0 ")


def test_a_step_that_differs_is_named(shared, tmp_path):
    run = RecordedRun.load(shared / "groundtruth" / "vllm-0.24.0-h200-qwen3-8b" / "azure_priority_tight")
    run.meta["usable_blocks"] -= 40
    run.write(tmp_path / "tampered")
    report = compare_decisions(RecordedRun.load(tmp_path / "tampered"))
    assert not report.ok
    assert "step 0" in report.first_mismatch
    assert "used blocks" in report.first_mismatch
    assert json.loads((tmp_path / "tampered" / "meta.json").read_text())["format"] == 1


@pytest.mark.parametrize("value", ["abc", 0, None, True, [16]])
def test_a_configuration_that_makes_no_sense_is_named(shared, value):
    run = RecordedRun.load(shared / "groundtruth" / "vllm-0.24.0-h200-qwen3-8b" / "azure_priority_tight")
    run.meta["config"]["block_size"] = value
    with pytest.raises(BadInput, match=r"meta\.json: config: 'block_size' is .* must be a whole number"):
        limits_of(run)
