"""`--launch` on the commands: the start's options, under those that are given."""

import json

import pytest
from pagecast.planner_app.cli import run
from pagecast.sim.scenario import Scenario

LAUNCH = "vllm serve Qwen/Qwen3-0.6B --max-num-seqs 64 --max-num-batched-tokens 4096 --enforce-eager"


def test_options_given_win_over_the_launch_and_that_over_the_file(tmp_path, capsys):
    own = tmp_path / "own.yaml"
    own.write_text("gpu: L4\nmax_num_seqs: 8\nblock_size: 32\n")
    command = ["replay", "chat", "--limit", "3", "--scenario", str(own), "--launch", LAUNCH, "--json"]
    assert run([*command, "--out", str(tmp_path / "out"), "--max-num-batched-tokens", "2048"]) == 0
    kept = Scenario.load(tmp_path / "out" / "scenario.yaml")
    assert (kept.model, kept.gpu, kept.block_size) == ("Qwen/Qwen3-0.6B", "L4", 32)
    assert (kept.max_num_seqs, kept.max_num_batched_tokens) == (64, 2048)
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert notes[0] == "--launch line 1: not as it is started: --max-num-batched-tokens 4096 (here 2048)"
    assert notes[1].startswith("--launch line 1: vllm is read: vLLM Qwen/Qwen3-0.6B")
    assert notes[2] == "--launch line 1: not modelled, though a forecast may depend on it: --enforce-eager"


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "chat", "--limit", "20", "--slo", "ttft_p90<1us", "--gpu", "L4", "--replicates", "0"],
        ["sweep", "chat", "--limit", "3", "--gpu", "L4", "--set", "block_size=16,32"],
        ["tune", "block-size", "chat", "--limit", "3", "--gpu", "L4", "--static"],
        ["memory", "--gpu", "L4"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_with_a_scenario_takes_a_launch(command, capsys):
    code = run([*command, "--launch", LAUNCH])
    shown = capsys.readouterr()
    assert code in (0, 1), shown.err
    assert "--enforce-eager" in (shown.out + shown.err).replace("\n", " ")


def test_a_gate_checks_the_launch(tmp_path, capsys):
    gate = tmp_path / "gate.yaml"
    gate.write_text("gpu: L4\ncheck:\n  trace: chat\n  limits: {kv_blocks: {min: 1}}\n")
    assert run(["check", "--scenario", str(gate), "--launch", "vllm serve"]) == 2
    assert "the engine is given no model" in capsys.readouterr().err


def test_memory_needs_a_model_of_its_own_or_of_a_launch(capsys):
    assert run(["memory", "--gpu", "L4"]) == 2
    assert "name a --model, or give the --launch or the --log of one" in capsys.readouterr().err


def test_an_option_of_the_engine_that_is_not_known_is_one_line(capsys):
    assert run(["replay", "chat", "--launch", "vllm serve M --max-num-sequences 3"]) == 2
    assert "vLLM has no option --max-num-sequences; nearest: --max-num-seqs" in capsys.readouterr().err
