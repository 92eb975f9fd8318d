"""Forecasts beside recordings: within the bounds we claim, with intervals that hold."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from pagecast.planner_app.wording.accuracy import expected_error
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.draw import Drawn, scaled
from pagecast.sim.costs.calibration.file import load
from pagecast.sim.replay import replay
from pagecast.sim.replay.replicates import ReplicateJob, Spread, Study
from pagecast.sim.runs.forecast import Forecast, ForecastRow, figures_of, forecast, scenario_of
from pagecast.sim.runs.in_sample import in_sample
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.run_figures import measured

RUNS = "groundtruth/vllm-0.24.0-h200-qwen3-8b"
VLLM = "vllm-0.24-h200-qwen3-8b"
WITH_DRAWS = {"azure_conv": 12, "mooncake_conv": 12}  # how many
NOT_FITTED = ("azure_conv", "azure_conv_repeat3", "mooncake_conv", "azure_priority_tight")


@pytest.fixture(scope="module")
def runs(shared) -> dict[str, RecordedRun]:
    names = (*NOT_FITTED, "sweep", "azure_conv_repeat2", "azure_conv_async")
    return {name: RecordedRun.load(shared / RUNS / name) for name in names}


@pytest.fixture(scope="module")
def forecasts(runs) -> Callable[[str, int], Forecast]:
    """The forecast of a run with so many draws, made once."""
    return cache(lambda name, draws: forecast(runs[name], VLLM, replicates=draws, workers=1))


@pytest.mark.parametrize("name", NOT_FITTED)
def test_runs_not_fitted_are_forecast_within_the_bounds(runs, forecasts, name):
    result = forecasts(name, WITH_DRAWS.get(name, 0))  # draws do not change the forecast
    assert not result.in_sample and "was fitted to" not in expected_error(result)
    rows = {row.name: row for row in result.rows}
    for latency in ("tpot_s", "e2e_s"):
        for statistic in ("mean", "p50", "p90"):
            assert abs(rows[f"{latency}.{statistic}"].error_percent) < 5
        assert abs(rows[f"{latency}.p99"].error_percent) < 10
    assert abs(rows["makespan_s"].error_percent) < 5

    # TTFT likewise, or within what 1% of step time makes of it (near saturation it makes much).
    @cache
    def around() -> list[dict[str, float]]:
        run = runs[name]
        study = Study(run.trace("arrival"), scenario_of(run, VLLM), figures=figures_of)
        return [study.run(ReplicateJob(0, factor)) for factor in (0.99, 0.995, 1.0, 1.005, 1.01)]

    for statistic, bound in (("mean", 5), ("p50", 5), ("p90", 5), ("p99", 10)):
        row = rows[f"ttft_s.{statistic}"]
        if abs(row.error_percent) >= bound:
            reach = [figures[row.name] for figures in around()]
            assert min(reach) <= row.measured <= max(reach), row


@pytest.mark.parametrize(
    ("name", "replicates"),
    [
        *WITH_DRAWS.items(),
        pytest.param("azure_priority_tight", 80, marks=pytest.mark.slow),
    ],
)
def test_most_measurements_lie_in_intervals_that_are_narrow(forecasts, name, replicates):
    result = forecasts(name, replicates)
    coverage = result.coverage()
    certain = [row for row in result.rows if row.covered is None]
    assert all(row.low == row.high == row.measured for row in certain)
    assert coverage["figures"] == 25 - len(certain) >= 20
    assert coverage["covered"] >= 0.8
    assert coverage["median_half_width_percent"] <= 10
    assert all(row.low <= row.predicted <= row.high for row in result.rows)


def test_a_run_that_the_costs_were_fitted_to_is_said_to_prove_nothing(runs):
    fitted = forecast(runs["azure_conv_repeat2"], "auto", replicates=0)
    assert fitted.in_sample and fitted.as_dict()["in_sample"] is True
    assert expected_error(fitted).startswith(f"{VLLM} was fitted to this run (azure_conv_r2)")
    half = in_sample(load(VLLM), runs["azure_conv_async"])
    assert half is not None and half.figures["part"] == 0.5
    assert "was fitted to the first 50% of this run" in sentence(half)
    assert not forecast(runs["azure_conv_repeat2"], "roofline", replicates=0).in_sample


def test_a_run_beyond_what_was_fitted_is_said_to_be(forecasts):
    text = expected_error(forecasts("mooncake_conv", 12))
    assert "Outside the range that the step costs were fitted to" in text
    assert "(fitted: 16,406 in decode" in text


@pytest.mark.parametrize(("count", "words"), [(1, "from 1 draw are rough"), (3, "from 3 draws are rough")])
def test_few_draws_make_rough_intervals_that_are_said_to_be(count, words):
    run = RecordedRun.load(Path(__file__).parent / "recorded" / "vllm-h200-qwen3-32b-tp2-azure-third")
    result = forecast(run, "auto", replicates=count, workers=1)
    assert words in expected_error(result)
    assert all(row.low <= row.predicted <= row.high for row in result.rows)
    assert result.coverage()["figures"] >= 20
    assert 0 < result.coverage()["inside"] <= 25


def test_planned_ahead_the_forecast_stays_near_though_half_of_it_is_not_fitted(forecasts):
    result = forecasts("azure_conv_async", 0)
    assert "was fitted to the first 50% of this run" in sentence(result.notes[0])
    rows = {row.name: row for row in result.rows}
    assert abs(rows["tpot_s.mean"].error_percent) < 4
    assert abs(rows["makespan_s"].error_percent) < 1


def test_json_has_every_statistic_with_its_error_and_interval(forecasts):
    result = forecasts("mooncake_conv", 12)
    body = json.loads(json.dumps(result.as_dict()))
    for name in ("ttft_s", "tpot_s", "e2e_s", "queue_s"):
        assert set(body[name]) == {"mean", "p50", "p90", "p95", "p99"}
    keys = {"predicted", "measured", "error_percent", "low", "high", "covered"}
    keys |= {"percent_per_percent_of_step_time", "within_one_percent_of_step_time"}
    assert body["makespan_s"]["within_one_percent_of_step_time"] == pytest.approx([-1, 1], abs=0.1)
    for name in ("makespan_s", "output_tokens_per_s", "steps", "preemptions", "reused_prefix_tokens"):
        assert keys <= set(body[name])
    assert body["preemptions"]["predicted"] == body["preemptions"]["measured"] == 4
    assert body["reused_prefix_tokens"]["error_percent"] == 0


def test_measured_figures_are_the_recordings_own(runs):
    run = runs["azure_conv"]
    figures = measured(run).figures()
    table = run.requests
    ttft = (table["first_token_s"] - table["arrival_s"]).to_numpy()
    assert figures["ttft_s.p90"] == pytest.approx(np.percentile(ttft, 90))
    assert 0 < figures["queue_s.mean"] < figures["ttft_s.mean"]
    assert figures["steps"] == len(run.steps)


def test_a_sweep_has_nothing_to_forecast(runs):
    with pytest.raises(BadInput, match=r"has no requests\.csv\.gz"):
        forecast(runs["sweep"], VLLM)


@pytest.mark.slow
def test_replicates_do_not_depend_on_how_many_work_on_them(runs):
    run = runs["mooncake_conv"]
    study = Study(run.trace("arrival"), scenario_of(run, VLLM), seed=3)
    point = figures_of(replay(study.trace, study.scenario))
    alone, together = study.spread(20, point=point, workers=1), study.spread(20, point=point, workers=2)
    assert alone == together
    assert 0.9 < alone.sensitivity["makespan_s"] < 1.1
    assert alone.reach["makespan_s"] == pytest.approx((-1, 1), abs=0.1)
    assert study.spread(0, workers=1) == Spread()
    assert alone.low["makespan_s"] < alone.high["makespan_s"]


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_made_longer_are_so_in_all_their_parts(depth):
    costs = CalibratedCosts(load(VLLM), pipeline_depth=depth)
    longer = scaled(costs, 1.01)
    for n in (1, 4, 60, 250):
        line, more = costs.decode_line(n), longer.decode_line(n)
        assert more.ns(n * 1000, 1500) / line.ns(n * 1000, 1500) == pytest.approx(1.01, abs=1e-4)
        assert longer.host_ns(n) / costs.host_ns(n) == pytest.approx(1.01, abs=1e-4)
    batch = Batch(8, 8000, 2000, ((512, 0),))
    assert longer.device_ns(batch) / costs.device_ns(batch) == pytest.approx(1.01, abs=1e-4)
    assert longer.arrival_ns(4000) / costs.arrival_ns(4000) == pytest.approx(1.01, abs=1e-4)


def test_draws_are_repeatable_and_differ():
    calibration = load(VLLM)
    batch = Batch(0, 0, 0, ((4096, 0),))

    def spread(source):
        return np.std([np.log(Drawn(source, i).decode_line(8).ns(8000, 2000)) for i in range(60)])

    assert Drawn(calibration, 1).device_ns(batch) == Drawn(calibration, 1).device_ns(batch)
    assert Drawn(calibration, 1).device_ns(batch) != Drawn(calibration, 2).device_ns(batch)
    assert Drawn(calibration, 1, seed=1).device_ns(batch) != Drawn(calibration, 1).device_ns(batch)
    assert 0.006 < spread(calibration) < 0.02


def test_errors_are_signed_and_nothing_against_nothing_is_none():
    assert ForecastRow("x", 1.1, 1.0).error_percent == pytest.approx(10)
    assert ForecastRow("x", 0.0, 0.0).error_percent == 0
    assert math.isinf(ForecastRow("x", 1.0, 0.0).error_percent)
    assert ForecastRow("x", 1.0, 1.0).covered is None
    assert ForecastRow("x", 1.0, 1.0, 0.9, 1.1).covered is True
    assert ForecastRow("x", 1.0, 2.0, 0.9, 1.1).covered is False
    assert ForecastRow("x", 4, 4, 4, 4).covered is None
    assert ForecastRow("x", 4, 5, 4, 4).covered is False
