"""Sweeps of fleets: each trial is the fleet's replay, its cost is of all GPUs, and no role is left empty."""

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.planner.execution.executor import executor
from pagecast.planner_app.planner.execution.options import Many
from pagecast.planner_app.planner.fleet.knobs import fleet_at
from pagecast.planner_app.planner.sweep.options import SweepOptions
from pagecast.planner_app.planner.sweep.question import SweepQuestion
from pagecast.planner_app.planner.sweep.space import parse_space
from pagecast.planner_app.planner.sweep.study import sweep
from pagecast.planner_app.planner.sweep.study_view import answer
from pagecast.planner_app.planner.sweep.trial_costs import used
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.file import load as load_calibration
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

SCENARIO = Scenario(gpu="L40S", costs="roofline")
DRAFT_MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 32_768,
}


def swept(many, *arguments, **options):
    """A sweep whose replays run where `many` says."""
    with executor(many) as run:
        return sweep(*arguments, run=run, **options)


def asked(settings, fleet=None, scenario=SCENARIO, **options):
    space = settings
    trace = read("chat", limit=120)
    return SweepQuestion(
        trace, scenario, SweepOptions(settings=space, **options), fleet=fleet or FleetSettings()
    )


def test_each_trial_is_the_replay_of_its_fleet_and_costs_what_its_gpus_do():
    question = asked(["replicas=2,3", "router=round-robin,cost", "prefill_replicas=0,2"], price={"L40S": 2.0})
    table = sweep(question).table
    assert len(table) == 8
    row = table[(table["replicas"] == 3) & (table["router"] == "cost") & (table["prefill_replicas"] == 2)]
    fleet = fleet_at(FleetSettings(), {"replicas": 3, "router": "cost", "prefill_replicas": 2})
    assert [(group.role, group.replicas) for group in fleet.groups] == [("prefill", 2), ("decode", 1)]
    summary = replay_fleet(question.trace, SCENARIO, fleet).summary
    assert row["ttft_p99_s"].item() == summary["ttft_s"]["p99"]
    assert row["gpus"].item() == 3
    assert row["gpu_hours"].item() == summary["fleet"]["gpu_hours"]
    assert row["usd_per_hour"].item() == pytest.approx(3 * 2.0)
    empty = table[(table["replicas"] == 2) & (table["prefill_replicas"] == 2)]
    assert empty["reason"].str.contains("none is left to decode").all()


@pytest.mark.slow
def test_a_dask_cluster_gives_the_same_table_of_fleets_and_the_same_plan(capsys):
    distributed = pytest.importorskip("distributed")
    question = asked(["replicas=1,2,3", "router=round-robin,cost", "prefill_replicas=0,1"])
    plan = [
        "plan",
        "chat",
        "--gpu",
        "L4",
        "--max-model-len",
        "16384",
        "--costs",
        "roofline",
        "--limit",
        "200",
        "--slo",
        "ttft_p90<2s",
    ]
    plan += ["--router", "cost", "--against", "round-robin", "--json"]
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        table = swept(Many(cluster=cluster.scheduler_address), question).table
        assert run([*plan, "--cluster", cluster.scheduler_address]) == 0
        there = json.loads(capsys.readouterr().out)
    pd.testing.assert_frame_equal(table, sweep(question).table)
    assert run([*plan, "--workers", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == there


def test_the_cheapest_fleet_has_the_fewest_gpus_that_meet_the_slo():
    slow = Scenario(gpu="L4", costs="roofline", max_model_len=16_384, max_num_batched_tokens=8192)
    result = sweep(asked(["replicas=1:4:1"], scenario=slow, slo="ttft_p90<1s"))
    meets = result.table[result.table["meets"]]
    assert 0 < len(meets) < 4
    assert result.cheapest["replicas"] == meets["replicas"].min()
    assert answer(result).startswith("best fleet that meets ttft_p90<1s: replicas=")


@pytest.mark.parametrize("shed", [None, 60.0])
def test_a_fleet_that_lost_its_replica_is_not_said_to_have_too_high_a_load(shed):
    """Shedding is named only where it is a reason of rejections."""
    fleet = FleetSettings.make({"incidents": [{"at_s": 5.0, "replica": "replica-0"}], "retries": {"most": 0}})
    scenario = Scenario(gpu="L40S", costs="roofline", shed_ttft_s=shed)
    text = answer(sweep(asked(["max_num_seqs=8,16"], fleet, scenario=scenario)))
    assert text.startswith("no scenario of the space serves every request: max_num_seqs=")
    assert "the load is too high" not in text
    assert "--shed-ttft-s" not in text
    assert 'as "its replica was lost, 0 retries"' in text or 'as "no replica was left"' in text
    assert "More retries of the fleet (`retries.most`) would serve more." in text


def test_a_fleet_that_sheds_is_said_to_have_too_high_a_load_also_by_a_study_that_goes_on(tmp_path):
    scenario = Scenario(
        gpu="L4", costs="roofline", shed_ttft_s=0.1, max_model_len=16_384, max_num_batched_tokens=8192
    )
    question = asked(["replicas=1,2"], scenario=scenario)
    for replayed in (2, 0):
        result = sweep(question, out=tmp_path / "study")
        assert result.replayed == replayed
        text = answer(result)
        assert "the load is too high, and replicas=" in text
        assert 'as "predicted TTFT is above 0.1 s")' in text
        assert text.endswith("a longer --shed-ttft-s would serve more.")
    assert "retries" not in text


def test_a_study_of_an_earlier_version_does_not_tell_why_requests_were_rejected(tmp_path):
    scenario = Scenario(
        gpu="L4", costs="roofline", shed_ttft_s=0.1, max_model_len=16_384, max_num_batched_tokens=8192
    )
    question = asked(["replicas=1,2"], scenario=scenario)
    sweep(question, out=tmp_path / "study")
    with sqlite3.connect(tmp_path / "study" / "study.sqlite") as database:
        database.execute("ALTER TABLE trials DROP COLUMN rejections")
    database.close()
    again = sweep(question, out=tmp_path / "study")
    assert again.replayed == 0
    assert answer(again).endswith("A `pagecast replay` of it tells the reasons.")


def test_a_fleet_over_time_goes_by_the_gpus_it_held():
    scaling = {"metric": "queue", "target": 1.0, "most": 3, "every_s": 1.0, "down_after_s": 5.0}
    startup = {"engine_s": 0.1, "disk_bytes_per_s": 1e12}
    fleet = FleetSettings.make({"scaling": scaling, "startup": startup})
    result = sweep(asked(["max_num_seqs=4,64"], fleet, price={"L40S": 2.0}))
    for _, row in result.table.iterrows():
        assert 1 <= row["gpus"] <= 3
        assert 2.0 <= row["usd_per_hour"] <= 2.0 * row["gpus"] + 1e-9
    assert result.table["gpus"].max() > 1


def test_a_fleet_is_priced_with_the_gpus_of_its_rollout_too():
    fields = {"rollout": {"at_s": 5, "scenario": {"gpu": "H100"}}}
    fleet = FleetSettings.make({**fields, "startup": {"engine_s": 0.1, "disk_bytes_per_s": 1e12}})
    with pytest.raises(BadInput, match="H100"):
        asked(["max_num_seqs=8"], fleet, price={"L40S": 2.0})
    question = asked(["max_num_seqs=8"], fleet, price={"L40S": 2.0, "H100": 4.0})
    assert question.gpus == ("L40S", "H100 SXM")
    [hourly] = sweep(question).table["usd_per_hour"]
    assert 2.0 < hourly < 2.0 + 4.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("replicas=0", "at least 1"),
        ("prefill_replicas=-1", "whole number"),
        ("router=fastest", "not known"),
    ],
)
def test_knobs_that_cannot_be_are_refused(text, words):
    with pytest.raises(BadInput, match=words):
        parse_space([text], SCENARIO, fleet=True)


def test_knobs_of_a_fleet_are_no_fields_of_a_scenario():
    with pytest.raises(BadInput, match="replicas"):
        parse_space(["replicas=1,2"], SCENARIO)


def test_gpu_hours_are_an_objective_of_fleets_alone():
    trace = read("chat", limit=10)
    space = ["block_size=16,32"]
    with pytest.raises(BadInput, match="of fleets"):
        SweepQuestion(trace, SCENARIO, SweepOptions(settings=space, objective=("gpu_hours",)))
    table = sweep(asked(["replicas=1,2"], objective=("gpu_hours", "ttft_p99_s"))).table
    assert table["gpu_hours"].is_monotonic_increasing


def calibration(folder: Path, factor: float) -> str:
    """A calibration's file, with times `factor` as long."""
    made = load_calibration("vllm-0.24-h200-qwen3-8b")
    times = {"curve_ns": tuple(value * factor for value in made.curve_ns)}
    return str(replace(made, **times).save(folder / "own.json"))


def draft_model(folder: Path, layers: int) -> str:
    """A draft model's folder."""
    where = folder / "draft"
    where.mkdir(exist_ok=True)
    (where / "config.json").write_text(json.dumps({**DRAFT_MODEL, "num_hidden_layers": layers}))
    return str(where)


@pytest.mark.parametrize("part", ["group", "rollout", "draft model"])
def test_trials_are_not_reused_once_a_file_of_a_fleets_scenario_has_changed(part, tmp_path):
    def question(change: int) -> SweepQuestion:
        costs = calibration(tmp_path, change)
        config = {"method": "draft_model", "num_speculative_tokens": 2, "acceptance": 0.5}
        config["model"] = draft_model(tmp_path, change)
        fields = {
            "group": {"groups": [{"replicas": 1, "scenario": {"costs": costs}}]},
            "rollout": {"rollout": {"at_s": 5, "scenario": {"costs": costs}}},
            "draft model": {"groups": [{"replicas": 1, "scenario": {"speculative_config": config}}]},
        }
        scenario = Scenario(costs="roofline", async_scheduling=False)
        return asked(["max_num_seqs=8,16"], FleetSettings.make(fields[part]), scenario)

    assert sweep(question(1), out=tmp_path / "study").replayed == 2
    assert sweep(question(1), out=tmp_path / "study").replayed == 0
    with pytest.raises(BadInput, match="holds a study of another files"):
        sweep(question(2), out=tmp_path / "study")


@pytest.mark.parametrize("mixed", [False, True])
def test_the_error_to_expect_is_that_of_the_fleets_own_step_costs(mixed, tmp_path):
    own = {"scenario": {"costs": calibration(tmp_path, 1)}}
    fleet = FleetSettings.make({"groups": [own, {}] if mixed else [own]})
    result = sweep(asked(["max_num_seqs=8"], fleet, Scenario(costs="roofline")))
    [use] = used(result)
    assert "Step costs fitted to" in use.expected_error
    assert ("Roofline costs" in use.expected_error) is mixed
