"""vLLM 0.24 serving models of several kinds: every recorded decision is the core's.

The runs were recorded with random weights, most on H200s: a mixture of experts, a model split over two GPUs,
a model whose layers keep different tokens (Gemma 3), n-gram speculation, KV offloading to host memory, and
Qwen3-8B on an H100.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.file import load
from pagecast.sim.costs.calibration.option_costs import OptionCosts
from pagecast.sim.fitting.option_fit import lookup_ns_of
from pagecast.sim.replay import Kept, replay
from pagecast.sim.runs.block_count import block_count
from pagecast.sim.runs.forecast import forecast, scenario_of
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.run_figures import measured
from pagecast.sim.runs.validate import DecisionReplay, compare_decisions
from pagecast.sim.scenario import Scenario

RUNS = Path(__file__).parent / "recorded"
NAMES = (
    "h200-qwen3-30b-a3b-azure",
    "h200-qwen3-30b-a3b-azure-async",
    "h200-qwen3-30b-a3b-mooncake",
    "h200-qwen3-32b-tp2-azure",
    "h200-gemma-3-4b-azure",
    "h200-gemma-3-4b-mooncake",
    "h200-qwen3-8b-ngram-azure",
    "h200-qwen3-8b-ngram-azure-later",
    "h200-qwen3-8b-ngram-azure-14",
    "h200-qwen3-8b-ngram-azure-11",
    "h200-qwen3-32b-tp2-azure-second",
    "h200-qwen3-32b-tp2-azure-third",
    "h100-qwen3-8b-azure",
    "h100-qwen3-8b-azure-second",
    "h100-qwen3-8b-azure-async",
    "h100-qwen3-8b-azure-async-second",
    "h100-qwen3-1.7b-azure",
    "h100-qwen3-1.7b-mooncake",
    "h100-llama-3.2-3b-azure",
    "h100-llama-3.2-3b-mooncake",
    "h100-qwen2.5-7b-azure",
    "h100-qwen2.5-7b-mooncake",
    "h100-phi-4-azure",
    "h100-phi-4-mooncake",
    "h100-mistral-small-24b-azure",
    "h100-mistral-small-24b-mooncake",
    "h200-qwen3-1.7b-azure",
    "h200-llama-3.2-1b-azure",
    "h200-llama-3.2-1b-mooncake",
    "h200-qwen3-0.6b-azure",
    "h200-qwen3-0.6b-mooncake",
)


@pytest.mark.parametrize("name", NAMES)
def test_every_step_and_prefix_hit_is_the_engines(name: str) -> None:
    run = RecordedRun.load(RUNS / f"vllm-{name}")
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


@pytest.mark.parametrize("name", ["qwen3-30b-a3b-azure", "gemma-3-4b-azure"])
def test_the_block_count_is_predicted_within_half_a_percent(name: str) -> None:
    count = block_count(RecordedRun.load(RUNS / f"vllm-h200-{name}"))
    assert count is not None
    assert abs(count.predicted / count.measured - 1) < 0.005


def test_a_model_without_a_name_is_forecast_from_the_runs_description() -> None:
    run = RecordedRun.load(RUNS / "vllm-h200-gemma-3-4b-mooncake")
    layout = scenario_of(run).layout()
    assert {spec.window for spec in layout.specs} == {0, 1024}  # of full layers and of windowed ones
    result = replay(run.trace("arrival"), scenario_of(run, "roofline"), kept=Kept(steps=False))
    assert result.summary["makespan_s"] == pytest.approx(measured(run).figures()["makespan_s"], rel=0.25)


def test_a_forecast_speculates_as_the_recorded_run_did() -> None:
    run = RecordedRun.load(RUNS / "vllm-h200-qwen3-8b-ngram-azure-11")
    scenario = scenario_of(run, "auto")
    result = replay(run.trace("arrival"), scenario, kept=Kept(steps=False))
    assert result.summary["tpot_s"]["mean"] < 0.005  # a step yields several tokens
    assert scenario.step_costs().name == "vllm-0.24-h200-qwen3-8b"


def with_lookups(run: RecordedRun, folder: Path, upto: float = 1.0) -> str:
    """The shipped calibration with the host's time for n-grams of a run's first part; its file."""
    shipped = load("vllm-0.24-h200-qwen3-8b")
    request, prompt, sd = lookup_ns_of([run], CalibratedCosts(shipped), upto)
    options = OptionCosts(lookup_ns=request, lookup_prompt_ns=prompt, lookup_sd=sd)
    return str(replace(shipped, options=options).save(folder / "with-lookups.json"))


def test_n_grams_are_forecast_with_the_hosts_time_for_them(tmp_path: Path) -> None:
    """The host's time is fitted to the first half of the steps; requests that came later judge it."""
    run = RecordedRun.load(RUNS / "vllm-h200-qwen3-8b-ngram-azure")
    costs = with_lookups(run, tmp_path, 0.5)
    real, ours = run.requests, replay(run.trace("arrival"), scenario_of(run, costs)).requests
    later = (real["arrival_s"] > run.steps.end_ns[len(run.steps) // 2] / 1e9).to_numpy()
    assert 300 < later.sum() < len(real)
    several = later & (real["tokens_out"] > 1).to_numpy()
    tokens = real["tokens_out"][several] - 1
    tpot = ((real["finish_s"] - real["first_token_s"])[several] / tokens).mean()
    e2e = (real["finish_s"] - real["arrival_s"])[later].mean()
    assert abs(ours["tpot_s"][several].mean() / tpot - 1) < 0.05
    assert abs(ours["e2e_s"][later].mean() / e2e - 1) < 0.05


def test_n_grams_are_forecast_by_another_run_on_the_same_host(tmp_path: Path) -> None:
    """Other requests at another rate judge; the run that was fitted came just before, in one process."""
    costs = with_lookups(RecordedRun.load(RUNS / "vllm-h200-qwen3-8b-ngram-azure-14"), tmp_path)
    judge = RecordedRun.load(RUNS / "vllm-h200-qwen3-8b-ngram-azure-11")
    rows = {row.name: row for row in forecast(judge, costs, replicates=8, workers=1).rows}
    assert abs(rows["tpot_s.mean"].error_percent) < 5
    assert abs(rows["e2e_s.mean"].error_percent) < 5
    assert rows["ttft_s.mean"].covered


@pytest.mark.slow
def test_hosts_differ_in_n_grams_and_intervals_say_so() -> None:
    """Nothing is known of the host: the mean of three runs on other hosts, or earlier, is charged."""
    run = RecordedRun.load(RUNS / "vllm-h200-qwen3-8b-ngram-azure-11")
    rows = {row.name: row for row in forecast(run, "auto", replicates=20, workers=1).rows}
    for name in ("tpot_s.mean", "e2e_s.mean", "ttft_s.mean"):
        assert rows[name].covered, rows[name]
        assert abs(rows[name].error_percent) < 10


def test_two_gpus_are_forecast_within_five_percent_on_a_run_that_fitted_nothing() -> None:
    """The calibration was fitted to two sweeps and one Azure recording; later requests judge it."""
    run = RecordedRun.load(RUNS / "vllm-h200-qwen3-32b-tp2-azure-third")
    result = forecast(run, "auto", replicates=20, workers=1)
    assert result.costs == "vllm-0.24-h200-qwen3-32b-tp2" and not result.in_sample
    errors = {row.name: abs(row.error_percent) for row in result.rows}
    assert max(errors[f"{name}.mean"] for name in ("tpot_s", "e2e_s", "ttft_s")) < 5
    coverage = result.coverage()["covered"]
    assert coverage is not None and coverage >= 0.8


def test_two_gpus_that_plan_ahead_are_not_forecast_by_synchronous_runs() -> None:
    """What planning ahead hides at TP 2 was not recorded."""
    scenario = Scenario(model="Qwen/Qwen3-32B", gpu="H200", tensor_parallel_size=2)
    assert scenario.step_costs().name == "measured"
    plain = scenario.changed(async_scheduling=False)
    assert plain.step_costs().name == "vllm-0.24-h200-qwen3-32b-tp2"


def test_a_mixture_of_experts_is_forecast_within_three_percent_on_a_run_that_fitted_nothing() -> None:
    """The calibration was fitted to a sweep and two Azure recordings; Mooncake judges it."""
    run = RecordedRun.load(RUNS / "vllm-h200-qwen3-30b-a3b-mooncake")
    result = forecast(run, "auto", replicates=20, workers=1)
    assert result.costs == "vllm-0.24-h200-qwen3-30b-a3b" and not result.in_sample
    errors = {row.name: abs(row.error_percent) for row in result.rows}
    assert errors["tpot_s.mean"] < 3
    assert errors["e2e_s.mean"] < 3
    assert errors["ttft_s.mean"] < 3
    coverage = result.coverage()["covered"]
    assert coverage is not None and coverage >= 0.8


def test_vllm_on_an_h100_is_forecast_within_six_percent_on_a_run_that_fitted_nothing() -> None:
    """A sweep, two synchronous runs and an asynchronous one fitted it; later requests judge."""
    run = RecordedRun.load(RUNS / "vllm-h100-qwen3-8b-azure-async-second")
    result = forecast(run, "auto", replicates=0, workers=1)
    assert result.costs == "vllm-0.24-h100-qwen3-8b" and not result.in_sample
    errors = {row.name: abs(row.error_percent) for row in result.rows}
    assert errors["tpot_s.mean"] < 3
    assert errors["e2e_s.mean"] < 3
    assert errors["ttft_s.mean"] < 6


def test_every_decision_with_a_host_tier_is_the_engines() -> None:
    """The ends of loads are recorded; stores end as at 45 GB/s, and any rate from 15 GB/s on does too."""
    run = RecordedRun.load(RUNS / "vllm-h200-qwen3-8b-offload-mooncake")
    replay = DecisionReplay(run)
    assert compare_decisions(run).ok
    for number in range(len(run.steps)):
        replay.step(number)
    offloading = replay.scheduler.offloading
    assert offloading is not None
    assert offloading.loaded_blocks > 0
    assert offloading.host.evicted_blocks > 50_000


def test_a_host_tier_is_forecast_with_the_hosts_time_for_offloading() -> None:
    """The two costs were fitted to the first half of the steps; requests that finish later judge them."""
    run = RecordedRun.load(RUNS / "vllm-h200-qwen3-8b-offload-mooncake")
    fitted = {"offloading_step_ms": 0.992, "offloading_block_us": 17.1}
    result = replay(run.trace("arrival"), scenario_of(run).changed(**fitted))
    assert result.summary["steps"] == len(run.steps)
    real, ours = run.requests, result.requests
    later = (real["finish_s"] > run.steps.end_ns[len(run.steps) // 2] / 1e9).to_numpy()
    assert 40 < later.sum() < len(real)
    e2e = (real["finish_s"] - real["arrival_s"])[later].mean()
    ttft = (real["first_token_s"] - real["arrival_s"])[later].mean()
    assert abs(ours["e2e_s"][later].mean() / e2e - 1) < 0.03
    assert abs(ours["ttft_s"][later].mean() / ttft - 1) < 0.03


def test_without_the_host_tier_the_first_load_is_computed_anew() -> None:
    run = RecordedRun.load(RUNS / "vllm-h200-qwen3-8b-offload-mooncake")
    config = {name: value for name, value in run.meta["config"].items() if name != "kv_offloading"}
    report = compare_decisions(replace(run, meta={**run.meta, "config": config}, transfers=()))
    assert report.first_mismatch is not None
    assert report.first_mismatch.startswith("step 1481 ")
