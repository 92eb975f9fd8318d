"""`pagecast support`: tiers by model, GPU and engine, with the reason where it is only the roofline."""

import json

import pytest
import typer
from pagecast.planner_app.commands.support import support_command
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


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_the_table_has_a_mark_for_each_gpu_and_a_reason_for_each_roofline(engine):
    text = printed("--engine", engine, "--tensor-parallel-size", "2")
    line = next(line for line in text.splitlines() if line.startswith("Qwen/Qwen3-8B"))
    assert line.split()[1:] == ["M"] * 9
    assert "latent attention of these sizes was not measured (9)" in text
