"""`pagecast calibrate` and `validate --costs`: files, exit codes and one-line errors."""

import json
import shutil
from pathlib import Path

import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.commands.calibrate import show_answer
from pagecast.sim.costs.calibration.file import load

RUNS = "groundtruth/vllm-0.24.0-h200-qwen3-8b"


def test_a_calibration_made_from_runs_can_be_validated_with(shared, tmp_path, capsys):
    out = tmp_path / "mine.json"
    folders = [str(shared / RUNS / name) for name in ("sweep", "azure_conv_repeat2", "azure_conv_async")]
    arguments = ["calibrate", "--out", str(out), "--replicates", "4", "--json"]
    for folder in (folders[0], folders[1], f"{folders[2]}:0.5"):
        arguments += ["--from-run", folder]
    assert run(arguments) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["name"] == "mine"
    assert body["made_for"]["model"] == "Qwen/Qwen3-8B"
    assert [row["asynchronous"] for row in body["provenance"]["runs"]] == [False, False, True]

    report = tmp_path / "report.html"
    check = ["validate", str(shared / RUNS / "mooncake_conv"), "--costs", str(out), "--replicates", "2"]
    assert run([*check, "--json", "--report", str(report), "--max-error", "50"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert abs(figures["tpot_s"]["p50"]["error_percent"]) < 3
    assert report.read_text().startswith("<!doctype html>")
    assert run([*check[:-1], "0", "--max-error", "0.001"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("TTFT p99 ") for line in lines)
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["calibrate"], "give at least one --from-run"),
        (["calibrate", "--from-run", "nowhere"], "give --out"),
        (["calibrate", "--from-run", "nowhere", "--out", "x.json"], "nowhere: no meta.json"),
        (["calibrate", "--from-run", "nowhere:2", "--out", "x.json"], "a share of the run's steps"),
        (["calibrate", "--from-bench", "nowhere.csv", "--out", "x.json"], "give --scenario"),
        (["calibrate", "--from-run", "nowhere", "--out", "x.json", "--scenario", "s"], "needs --from-bench"),
        (["validate", __file__, "--costs", "auto"], "--scenario"),
        (["validate", "nowhere", "--costs", "auto"], "nowhere: no meta.json"),
        (["replay", "chat", "--limit", "9", "--replicates", "-1"], "--replicates"),
        (["replay", "chat", "--costs", "vllm-9"], "no costs 'vllm-9'"),
        (["replay", "chat", "--costs", "vllm-0.24-h200-qwen3-8b", "--gpu", "H100"], "not H100"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(arguments, words, capsys):
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_run_with_few_steps_is_named_as_such(shared, tmp_path, capsys):
    source = str(shared / RUNS / "azure_conv")
    assert run(["calibrate", "--from-run", f"{source}:0.01", "--out", str(tmp_path / "x.json")]) == 2
    assert "steps are too few for" in capsys.readouterr().err


def test_a_benchmarks_results_correct_measured_operations_and_are_validated(tmp_path, capsys):
    rows = ["arrival_s,input_tokens,output_tokens,ttft_s,e2e_s"]
    rows += [f"{number / 10},{200 + number},20,0.03,{0.03 + 19 * 0.011}" for number in range(30)]
    (tmp_path / "bench.csv").write_text("\n".join(rows))
    (tmp_path / "setup.yaml").write_text("model: Qwen/Qwen3-8B\ngpu: H100\n")
    given = [str(tmp_path / "bench.csv"), "--scenario", str(tmp_path / "setup.yaml")]
    out = str(tmp_path / "mine.json")
    assert run(["calibrate", "--from-bench", *given, "--out", out]) == 0
    text = capsys.readouterr().out
    assert "bench, 30 requests, mean error: TPOT" in text
    assert "steps with prompts: x " in text and "these results say" in text
    assert run(["validate", *given, "--costs", out, "--replicates", "0", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["costs"] == "mine"
    assert abs(body["tpot_s.mean"]["error_percent"]) < 10
    assert "6.2 ms" in body["expected_error"]
    ttft = body["ttft_s.mean"]["predicted"]
    assert run(["validate", *given, "--costs", out, "--client-ms", "2", "--replicates", "0", "--json"]) == 0
    shorter = json.loads(capsys.readouterr().out)["ttft_s.mean"]["predicted"]
    assert ttft - shorter == pytest.approx(0.0042 + 1.9e-6 * 214.5)


def test_a_calibration_of_a_cpu_is_said_to_plan_nothing(tmp_path, capsys, monkeypatch):
    from pagecast.planner_app.commands import calibrate

    runs = Path(__file__).parents[2] / "sim" / "runs" / "recorded"
    folder = tmp_path / "sweep"
    shutil.copytree(runs / "vllm-h200-qwen3-30b-a3b-sweep", folder)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "gpu": "CPU"}))
    monkeypatch.setattr(calibrate, "_sweep", lambda *_: folder)
    given = ["calibrate", "--model", "m", "--device", "cpu", "--out", str(tmp_path / "x.json")]
    assert run([*given, "--replicates", "4"]) == 0
    printed = capsys.readouterr()
    note = "note: these costs are for trying the command out: no GPU to plan for is a CPU"
    assert printed.err == f"{note}\n"
    assert note in printed.out.splitlines()


@pytest.mark.parametrize("command", ["calibrate", "validate"])
def test_a_clients_share_is_for_results_of_a_benchmark(tmp_path, capsys, command):
    source = Path(__file__).parents[2] / "sim" / "runs" / "recorded" / "vllm-h200-qwen3-30b-a3b-sweep"
    given = ["--from-run", str(source), "--out", str(tmp_path / "x.json")]
    assert run([command, *(given if command == "calibrate" else [str(source)]), "--client-ms", "2"]) == 2
    assert "--client-ms" in capsys.readouterr().err


def test_replay_takes_what_fits_and_says_so(capsys):
    assert run(["replay", "chat", "--limit", "100", "--json", "--replicates", "20"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["costs"] == "vllm-0.24-h200-qwen3-8b"
    assert body["tpot_s"]["low"]["mean"] <= body["tpot_s"]["high"]["mean"]
    assert run(["replay", "chat", "--limit", "100", "--gpu", "B200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["costs"] == "measured"


def test_steps_that_only_tell_of_planning_ahead_are_counted_apart(capsys):
    calibration = load("pagecast-h100-qwen3-8b")
    show_answer(calibration, None)
    first = " ".join(capsys.readouterr().out.split())
    fitted = next(row["steps"] for row in calibration.regions if row["region"] == "all steps")
    assert f"fitted to {fitted:,} steps of 2 runs; what planning ahead hides, to" in first
