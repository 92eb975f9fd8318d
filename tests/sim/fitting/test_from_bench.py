"""Corrections fitted to request-level results: what is put in comes out, within what such results can say."""

import math

import numpy as np
import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.measured.corrections import Corrections, read_corrections
from pagecast.sim.fitting.from_bench import REPLAYS, fit_corrections
from pagecast.sim.replay import Kept, replay
from pagecast.sim.runs.bench_results import BenchResults
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.schema import Trace, table

SETUP = Scenario(model="Qwen/Qwen3-8B", gpu="H100", costs="measured", num_gpu_blocks=20_000)
TRUE = Corrections("true", step_s=0.0004, decode=1.02, prompt=0.98)


def results(costs=None, limit=400):
    trace = read("chat", limit=limit)
    made = replay(trace, SETUP, costs=costs, kept=Kept(steps=False)).requests
    return BenchResults("served", trace, made["ttft_s"].to_numpy(float), made["e2e_s"].to_numpy(float))


@pytest.fixture(scope="module")
def fitted():
    truth = SETUP.step_costs().corrected(TRUE)
    seen = []
    made = fit_corrections([results(truth)], SETUP, "fitted", seen.append)
    assert seen == list(range(1, REPLAYS + 1))
    return truth, made


def test_a_forecast_with_fitted_corrections_meets_the_served_latencies(fitted):
    truth, made = fitted
    real, forecast = results(truth), results(SETUP.step_costs().corrected(made))
    for name in ("tpot_s", "e2e_s"):
        assert np.nanmean(getattr(forecast, name)) == pytest.approx(np.nanmean(getattr(real, name)), rel=0.01)
    assert made.sources[0]["tpot_percent_before"] < -3 < made.sources[0]["tpot_percent_after"]


def test_intervals_hold_the_truth_and_admit_what_results_do_not_say(fitted):
    _, made = fitted
    assert abs(math.log(made.decode / TRUE.decode)) < 2 * made.sd[1]
    assert abs(math.log(made.prompt / TRUE.prompt)) < 2 * made.sd[2]
    assert all(sd < prior for sd, prior in zip(made.sd, made.prior_sd, strict=True))
    assert made.sd[0] > 0.3 * made.prior_sd[0], "host time and decode factor can hardly be told apart"


def test_corrections_survive_their_file_and_hold_for_their_set_up_alone(fitted, tmp_path):
    _, made = fitted
    path = made.save(tmp_path / "mine.json")
    assert read_corrections(path) == made
    costs = SETUP.changed(costs=str(path)).step_costs()
    assert costs.name == "fitted"
    assert costs.expected_error().code == "corrected_costs"
    other = SETUP.changed(costs=str(path), gpu="H200")
    with pytest.raises(BadInput, match="are for gpu H100 SXM, not H200"):
        other.step_costs()


def test_corrected_steps_add_up_however_they_are_cut():
    line = SETUP.step_costs().corrected(TRUE).decode_line(12)
    assert line.ns(12 * 900, 950, 700) == line.ns(12 * 900, 950, 300) + line.ns(12 * 1200, 1250, 400)


def test_too_few_requests_are_refused():
    with pytest.raises(BadInput, match="requests say too little"):
        fit_corrections([results(limit=5)], SETUP, "few")


@pytest.mark.parametrize("longer", [0, 2, 19])
def test_too_few_requests_of_more_than_one_token_are_refused(longer):
    tokens = np.where(np.arange(40) < longer, 20, 1)
    columns = {"arrival_s": np.arange(40.0), "input_tokens": np.full(40, 100), "output_tokens": tokens}
    served = BenchResults(
        "short", Trace("short", table(columns)), np.full(40, 0.1), 0.1 + 0.01 * (tokens - 1)
    )
    with pytest.raises(BadInput, match=f"short: a TPOT above 0 is known of {longer} requests"):
        fit_corrections([served], SETUP, "short")


def test_a_scenario_that_serves_none_of_the_requests_is_refused():
    refusing = SETUP.changed(max_model_len=2)
    with pytest.raises(BadInput, match="give a scenario that serves these requests"):
        fit_corrections([results(limit=40)], refusing, "refused")


def test_corrections_hold_for_the_kv_dtype_whatever_it_is_called(fitted, tmp_path):
    _, made = fitted
    path = made.save(tmp_path / "mine.json")
    named = SETUP.changed(costs=str(path), kv_cache_dtype="bfloat16")
    assert named.step_costs().name == "fitted"
    other = SETUP.changed(costs=str(path), kv_cache_dtype="fp8")
    with pytest.raises(BadInput, match="are for kv_cache_dtype auto, not fp8"):
        other.step_costs()
