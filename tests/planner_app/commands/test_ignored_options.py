"""Options that have no effect beside others are refused before anything is read or written."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.commands import serve

PLAN = ["plan", "nowhere", "--slo", "ttft_p99<2s"]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--think-time", "2"),
        ("--replicas-for", "30"),
        ("--max-preemption-rate", "0.01"),
        ("--most-users", "9"),
        ("--most-requests", "4000"),
        ("--replicates", "5"),
        ("--fixed-workload", None),
        ("--report", "x.html"),
    ],
)
@pytest.mark.parametrize("fleet", ["--router=least-loaded", "--against=cost", "--emit=vllm"])
def test_a_plan_of_fleets_refuses_options_of_one_replica(
    fleet: str, option: str, value: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [option] if value is None else [option, value]
    assert refused([*PLAN, fleet, *given], capsys).startswith(f"pagecast: {option} is for one replica")


def test_a_plan_of_fleets_refuses_the_number_it_looks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--replicas is what plan finds" in refused([*PLAN, "--replicas", "4"], capsys)


def test_a_plan_of_one_replica_refuses_a_fleets_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--most-replicas is for a fleet" in refused([*PLAN, "--most-replicas", "64"], capsys)


@pytest.mark.parametrize("command", [["replay", "nowhere"], [*PLAN, "--replicates", "0"]])
def test_a_fixed_workload_without_draws_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused([*command, "--fixed-workload"], capsys) == (
        "pagecast: --fixed-workload is for the draws behind intervals: give --replicates N as well\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [*PLAN, "--out"],
        [*PLAN, "--router", "cost", "--out"],
        ["sweep", "nowhere", "--set", "block_size=16,32", "--emit-to"],
    ],
)
def test_a_file_for_what_is_not_emitted_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{arguments[-1]} is the file for --emit" in refused([*arguments, "x.sh"], capsys)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--profile", "vllm"),
        ("--host-time-factor", "1.5"),
        ("--report", "x.html"),
    ],
)
def test_results_of_a_benchmark_are_validated_without_options_of_recorded_runs(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.json"
    results.write_text("{}")
    message = refused(["validate", str(results), "--scenario", "setup.yaml", option, value], capsys)
    assert message.startswith(f"pagecast: {option} is for a recorded run")


@pytest.mark.parametrize(
    "option",
    [
        "--scenario=/nosuch.yaml",
        "--eviction=lfu",
        "--costs=roofline",
        "--gpu=H100",
        "--time-scale=3",
        "--time-scale=0",
        "--mode=echo",
        "--mean-output-tokens=5",
        "--max-loras=2",
        "--lora-modules=sql=/sql",
    ],
)
def test_a_server_of_the_engine_refuses_what_only_a_simulated_one_has(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(["serve", "--model", "nowhere", option], capsys)
    name = option.partition("=")[0]
    assert message.startswith(f"pagecast: {name} needs --simulate")


@pytest.mark.parametrize(
    "option",
    [
        "--device=cpu",
        "--dtype=bfloat16",
        "--enforce-eager",
        "--random-weights",
        "--attention=torch",
    ],
)
def test_a_simulated_server_refuses_what_only_the_engine_has(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_simulated_replicas", None)
    message = refused(["serve", "--simulate", option], capsys)
    assert message.startswith(f"pagecast: {option.partition('=')[0]} is for the engine")


@pytest.mark.parametrize("served", ["--simulate", "--model=nowhere"])
@pytest.mark.parametrize(
    "option", ["--kv-events-replay-endpoint=tcp://*:5558", "--event-batch-size=4", "--kv-events-topic=kv"]
)
def test_options_of_kv_events_that_nobody_gets_are_refused(
    option: str, served: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_simulated_replicas", None)
    message = refused(["serve", served, option], capsys)
    assert message.startswith(f"pagecast: {option.partition('=')[0]} is for KV events")


@pytest.mark.parametrize(
    ("setting", "option"),
    [
        ("max_num_seqs=8,16", "--max-num-seqs=3"),
        ("max-num-seqs=8,16", "--max-num-seqs=3"),
        ("replicas=1,2", "--replicas=3"),
        ("router=random,session", "--router=random"),
    ],
)
def test_a_sweep_refuses_a_value_for_what_it_varies(
    setting: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(["sweep", "nowhere", "--set", setting, option], capsys)
    name = option.partition("=")[0]
    assert message.startswith(f"pagecast: {name} is what --set {setting} varies")


def test_a_grid_has_no_generations(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(["sweep", "nowhere", "--set", "max_num_seqs=8,16", "--generation", "3"], capsys)
    assert message.startswith("pagecast: --generation is for a search")


@pytest.mark.parametrize(
    ("knob", "option"),
    [("block-size", "--block-size=8"), ("hbm-budget", "--gpu-memory-utilization=0.8")],
)
def test_tune_refuses_a_value_for_what_it_varies(
    knob: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(["tune", knob, "chat", "--limit", "9", option], capsys)
    name = option.partition("=")[0]
    assert message.startswith(f"pagecast: {name} is what tune {knob} varies")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--system-prompt=100"], "--system-prompt is for conversations"),
        (["--message=fixed:3"], "--message is for conversations"),
        (["--think=fixed:3"], "--think is for conversations"),
        (["--most-tokens=50"], "--most-tokens is for conversations"),
        (["--cv=3"], "--cv is for --arrivals gamma and weibull, not poisson"),
        (["--cv=3", "--arrivals=even"], "--cv is for --arrivals gamma and weibull, not even"),
        (["--like=chat", "--input=fixed:10"], "--input is what --like draws"),
        (["--like=chat", "--output=fixed:10"], "--output is what --like draws"),
        (["--like=chat", "--turns=fixed:3"], "--like is for single requests"),
        (["--start=5"], "--start is for ServeGen's clients"),
        (["--servegen=nowhere", "--arrivals=even"], "--arrivals is for drawn requests"),
        (["--servegen=nowhere", "--turns=fixed:3"], "--turns is for drawn requests"),
        (["--servegen=nowhere", "--think=fixed:3"], "--think is for drawn requests"),
    ],
)
def test_a_generated_trace_follows_from_every_option(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.jsonl"
    assert words in refused(["trace", "generate", str(out), *arguments], capsys)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "chat", "OUT", "--scale-think"], "--scale-think goes with --scale"),
        (["sample", "--out", "OUT"], "--out is a file for a sample"),
        (["sample", "chat", "--lossy"], "--lossy is for a file"),
    ],
)
def test_other_commands_of_traces_refuse_what_they_would_drop(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.jsonl"
    given = [str(out) if argument == "OUT" else argument for argument in arguments]
    assert words in refused(["trace", *given], capsys)
    assert not out.exists()


@pytest.mark.parametrize(
    "option",
    [
        "--device=cpu",
        "--num-gpu-blocks=3",
        "--speculative-config=ngram:3",
        "--random-weights",
    ],
)
@pytest.mark.parametrize("source", ["--from-run", "--from-bench"])
def test_a_calibration_of_what_was_recorded_refuses_options_of_an_engine(
    source: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["calibrate", source, "nowhere", "--out", str(tmp_path / "x.json"), option]
    message = refused(given, capsys)
    assert message.startswith(f"pagecast: {option.partition('=')[0]} is for the engine that records a sweep")
