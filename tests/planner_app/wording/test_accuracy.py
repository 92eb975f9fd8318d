"""Sentences of a validation: errors, intervals, saturation, and block counts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pagecast.planner_app.cli import run as pagecast
from pagecast.planner_app.wording.accuracy import accuracy_sentences, blocks_sentence, expected_error
from pagecast.sim.runs.block_count import BlockCount, block_count
from pagecast.sim.runs.forecast import Forecast, ForecastRow, forecast
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.run_figures import LATENCIES, SCALARS, STATISTICS, RunFigures, Timeline

RUNS = "groundtruth/vllm-0.24.0-h200-qwen3-8b"
VLLM = "vllm-0.24-h200-qwen3-8b"
RECORDED = Path(__file__).parents[2] / "engine/recorded"
OWN = RECORDED / "h200c-qwen3-8b-chat-async"
SMALL = RECORDED / "h200c-qwen3-0.6b-mooncake"


@pytest.mark.parametrize("name", ["azure_conv", "azure_conv_async", "mooncake_conv", "sweep"])
def test_vllms_block_count_is_foretold_within_a_percent(shared, name):
    count = block_count(RecordedRun.load(shared / RUNS / name))
    assert count.measured == 49_608
    assert 0 < abs(count.error_percent) < 1


def test_our_engines_block_count_is_foretold_within_a_percent():
    count = block_count(RecordedRun.load(OWN))
    assert count.measured == 49_725
    assert 0 < abs(count.error_percent) < 1
    assert "49,725 measured (+0.2%)" in blocks_sentence(count)


def test_blocks_that_were_set_by_hand_check_nothing(shared):
    tight = block_count(RecordedRun.load(shared / RUNS / "azure_priority_tight"))
    assert tight.set_by_hand and tight.error_percent is None
    assert "the 2,999 of this run were set by hand" in blocks_sentence(tight)
    own = RecordedRun.load(OWN)
    run = replace(own, meta={**own.meta, "config": {**own.meta["config"], "num_blocks": 49_725}})
    assert block_count(run).set_by_hand
    assert block_count(replace(own, meta={**own.meta, "gpu": "CPU"})) is None


def test_a_run_of_another_model_is_refused_and_other_costs_are_named(capsys):
    assert pagecast(["validate", str(SMALL), "--costs", VLLM]) == 2
    error = capsys.readouterr().err
    assert "is for Qwen/Qwen3-8B, not Qwen/Qwen3-0.6B: calibrate this set-up, or give --costs" in error


def test_a_forecast_tells_its_intervals_its_block_count_and_of_another_engine(capsys):
    command = ["validate", str(SMALL), "--costs", "auto", "--replicates", "20"]
    assert pagecast([*command, "--explain"]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("mooncake_") and "measurements lie" in line]
    assert len(lines) == 1
    assert "The median interval is" in lines[0] and "half-width" in lines[0]
    assert "predicted from model and GPU alone, 72,554 measured" in out
    assert pagecast([*command[:-1], "0", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["num_gpu_blocks"]["error_percent"] == pytest.approx(0.0, abs=0.5)
    other = forecast(RecordedRun.load(OWN), VLLM, replicates=0)
    assert "The step costs were fitted to vllm, but this run is from pagecast" in expected_error(other)


def test_auto_never_takes_another_engines_costs():
    result = forecast(RecordedRun.load(OWN), "auto", replicates=0)
    assert result.costs != VLLM


def test_decisions_come_with_the_block_count(capsys):
    assert pagecast(["validate", str(OWN), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_gpu_blocks"]["measured"] == 49_725
    assert pagecast(["validate", str(OWN)]) == 0
    assert "KV blocks: 49,814 predicted" in capsys.readouterr().out


def made(error: float, covered: float, slope: float, blocks: BlockCount | None = None) -> Forecast:
    """A forecast in which every figure is off by `error` percent, and `covered` of the intervals hold."""
    names = [f"{name}.{key}" for name in LATENCIES for key in STATISTICS] + list(SCALARS)
    held = round(covered * len(names))
    rows = tuple(
        ForecastRow(name, 1 + error / 100, 1.0, 0.9 if i < held else 1.05, 1.1, slope, (-slope, slope / 2))
        for i, name in enumerate(names)
    )
    none = RunFigures({}, {}, Timeline(*(() for _ in range(3))))
    return Forecast("made", "costs", (), False, rows, none, none, blocks)


def test_sentences_tell_what_is_near_and_what_is_not_to_be_trusted():
    near = accuracy_sentences(made(0.4, 1.0, 2.0))
    assert near[0].startswith("Forecast and measurement differ by up to 0.4% in TPOT and E2E")
    assert near[1].startswith("made: 100% of 25 measurements lie in their 90% interval")
    assert not any("saturation" in sentence or "do not rely" in sentence for sentence in near)
    far = accuracy_sentences(made(-30.0, 0.6, 25.0))
    assert "30.0% in TTFT" in far[0]
    assert far[1].endswith("do not rely on the intervals of this run.")
    assert "a change of up to 1% in step time changes TTFT mean by -25 to +12%" in far[2]
    assert accuracy_sentences(made(1.0, 1.0, 0.0, BlockCount(99, 100, False)))[-1].endswith("(-1.0%).")
