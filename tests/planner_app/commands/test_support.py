"""`pagecast support`: tiers by model, GPU and engine, with the reason where it is only the roofline."""

import json
import re

import numpy as np
import pytest
import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.support import support_command
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.calibration.draw import draw
from pagecast.sim.machine.models import known_models
from pagecast.sim.scenario import Scenario
from typer.testing import CliRunner

app = typer.Typer()
app.command()(support_command)
MODELS = ["--model", "Qwen/Qwen3-8B", "--model", "deepseek-ai/DeepSeek-V2-Lite"]


def printed(*arguments):
    ran = CliRunner().invoke(app, [*MODELS, *arguments])
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def test_tiers_are_those_that_auto_takes():
    rows = json.loads(printed("--gpu", "H200", "--gpu", "L4", "--gpu", "B200", "--json"))["set_ups"]
    tiers = {(row["model"], row["gpu"]): row for row in rows}
    assert tiers["Qwen/Qwen3-8B", "H200"]["tier"] == "calibrated"
    assert tiers["Qwen/Qwen3-8B", "B200"]["detail"] == "vllm 0.24.0"
    assert "not measured on L4" in tiers["Qwen/Qwen3-8B", "L4"]["detail"]
    for (model, gpu), row in tiers.items():
        name = Scenario(model=model, gpu=gpu).step_costs().name
        assert (row["tier"] if row["tier"] != "calibrated" else row["detail"]) == name


def test_a_calibration_of_synchronous_runs_is_for_synchronous_scheduling():
    sharded = ["--model", "Qwen/Qwen3-32B", "--gpu", "H200", "--tensor-parallel-size", "2", "--json"]
    for more, tier in (([], "measured"), (["--no-async-scheduling"], "calibrated")):
        rows = json.loads(printed(*sharded, *more))["set_ups"]
        assert {row["tier"] for row in rows if row["model"] == "Qwen/Qwen3-32B"} == {tier}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_the_table_has_a_mark_for_each_gpu_and_a_reason_for_each_roofline(engine):
    text = printed("--engine", engine, "--tensor-parallel-size", "2")
    line = next(line for line in text.splitlines() if line.startswith("Qwen/Qwen3-8B"))
    assert line.split()[1:] == ["M"] * 9
    assert "latent attention of these sizes was not measured (9)" in text


def times(costs):
    """A decode step, and a step with a prompt."""
    prompt = Batch(0, 0, 0, ((512, 0),))
    return np.array([costs.decode_line(32).ns(32_000, 1000), costs.device_ns(prompt)])


def test_each_tier_states_the_interval_of_its_draws():
    """Of a usual load, of whose time a fifth is in steps with prompts."""
    rows = json.loads(printed("--gpu", "B200", "--gpu", "L4", "--json"))["set_ups"]
    widths = {(row["model"], row["gpu"]): row["half_width_percent"] for row in rows}
    for gpu in ("B200", "L4"):
        costs = Scenario(model="Qwen/Qwen3-8B", gpu=gpu).step_costs()
        draws = [(0.8, 0.2) @ (times(draw(costs, index)) / times(costs)) for index in range(400)]
        low, high = np.percentile(draws, (5, 95))
        assert 50 * (high - low) == pytest.approx(widths["Qwen/Qwen3-8B", gpu], rel=0.15)
    assert "C: step times within" in printed("--gpu", "H200")


def test_all_models_and_gpus_can_be_read_at_80_columns(monkeypatch):
    monkeypatch.setattr(console.out, "_width", 80)
    ran = CliRunner().invoke(app, [])
    assert ran.exit_code == 0
    lines = ran.stdout.splitlines()
    table = [line for line in lines[lines.index("") :] if not line.startswith("r: ")]
    assert "…" not in ran.stdout and max(map(len, table)) <= 80
    assert "1 B200, 2 GB200" in ran.stdout and "H100 SXM" in ran.stdout
    names = [line.split()[0] for line in table if len(line.split()) == 10]
    assert len(names) == len(set(names)) and set(known_models()) <= set(names)


def test_one_model_is_described_in_five_lines():
    def described(name):
        text = CliRunner().invoke(app, [name, "--gpu", "H200"]).stdout
        return re.sub(r"\n {11}", " ", text).splitlines()  # lines that were folded

    lines = described("Qwen/Qwen3.5-27B")
    assert [line.split()[0] for line in lines] == ["model", "memory", "decisions", "costs", "unknown"]
    assert "27.36 B parameters" in lines[0] and "65,536 bytes of KV (bf16) a token" in lines[1]
    assert (
        "3 state in 784s, 1 full in 784s" in lines[2]
        and "measured on H200 (step times within 41%)" in lines[3]
    )
    assert "can't be timed" in described("deepseek-ai/DeepSeek-V4-Flash")[3]
    refused = CliRunner().invoke(app, ["Qwen/Qwen3-8B", "--model", "Qwen/Qwen3-8B"])
    assert isinstance(refused.exception, BadInput)
