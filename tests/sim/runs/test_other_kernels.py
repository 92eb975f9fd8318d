"""Runs of other kernels than a calibration was fitted to are told apart, and judge no times."""

from dataclasses import replace
from pathlib import Path

import pytest
from accuracy_roles import JUDGE
from pagecast.planner_app.wording.accuracy import expected_error
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.file import load
from pagecast.sim.fitting.build import CalibrationRun, calibrate
from pagecast.sim.runs.forecast import forecast
from pagecast.sim.runs.other_kernels import other_kernels
from pagecast.sim.runs.recorded import RecordedRun

RUNS = Path(__file__).parents[2] / "engine" / "recorded"


def test_kernels_are_known_by_their_digest_and_those_of_other_engines_by_the_version():
    own, vllm = load("pagecast-h100-qwen3-8b"), load("vllm-0.24-h200-qwen3-8b")
    (digest,) = {source["kernels"] for source in own.provenance["runs"]}
    assert other_kernels(own, {"engine_version": "0.1.0", "kernels": digest}) is None
    note = other_kernels(own, {"engine_version": "0.1.0", "kernels": "another"})
    assert note is not None and note.figures == {"fitted": digest, "recorded": "another"}
    assert other_kernels(own, {"engine_version": "0.1.0"}) is not None
    assert other_kernels(vllm, {"engine_version": "0.24.0"}) is None
    assert other_kernels(vllm, {"engine_version": "0.25.0"}) is not None


def test_a_forecast_of_a_run_of_other_kernels_says_so_and_no_run_that_judges_is_one():
    run = RecordedRun.load(RUNS / "h100t-qwen3-8b-azure-async")
    assert "other kernels" not in expected_error(forecast(run, "auto", replicates=0, workers=1))
    other = replace(run, meta={**run.meta, "kernels": "another"})
    assert "fitted to other kernels (" in expected_error(forecast(other, "auto", replicates=0, workers=1))
    assert run.folder in JUDGE


def test_runs_of_different_kernels_are_not_fitted_together():
    run = RecordedRun.load(RUNS / "h200c-qwen3-8b-chat-sync")
    other = replace(run, meta={**run.meta, "kernels": "another"})
    with pytest.raises(BadInput, match="kernels is 'another'"):
        calibrate([CalibrationRun(run), CalibrationRun(other)], "mixed", replicates=0)
