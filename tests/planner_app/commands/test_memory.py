"""`pagecast memory`: one table for people, one object for programs, one line for mistakes."""

import json

import pytest
import typer
from pagecast.planner_app.commands.memory import memory_command
from pagecast.sim.core.errors import BadInput
from typer.testing import CliRunner, Result

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(memory_command)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "140"})


def test_json_is_one_object_whose_items_add_up() -> None:
    result = run("--model", "Qwen/Qwen3-8B", "--gpu", "H200", "--json")
    assert result.exit_code == 0 and result.stdout.count("\n") == 1
    body = json.loads(result.stdout)
    assert sum(item["bytes"] for item in body["items"]) == body["total_bytes"]
    assert body["kv_tokens"] == body["num_gpu_blocks"] * body["block_size"]
    assert body["bytes_per_token"]["theoretical"] == 147_456
    assert body["sequences"]["2048"] == body["num_gpu_blocks"] // 128
    assert body["limit"] == "gpu_memory_utilization 0.92"
    assert (body["engine"], body["defaults"]["max_num_seqs"]) == ("vllm@0.33", 1024)


def test_the_table_shows_every_item_the_blocks_and_what_fits() -> None:
    body = json.loads(run("--model", "qwen3-8b", "--gpu", "h200", "--json").stdout)
    text = run("--model", "qwen3-8b", "--gpu", "h200", "--explain").stdout
    for item in body["items"]:
        assert item["name"] in text
    assert f"{body['num_gpu_blocks']:,} of 16 tokens" in text
    assert "theoretical" in text and "allocated" in text and "admissible" in text
    assert f"{body['sequences']['131072']} of 128k tokens" in text


def test_an_engine_that_does_not_start_is_no_success() -> None:
    small = ("--model", "Qwen/Qwen3-8B", "--gpu", "H100", "--gpu-memory-utilization", "1.0")
    result = run(*small)
    assert result.exit_code == 2
    assert "does not start" in result.stdout.splitlines()[0] and "Lower it." in result.stdout
    assert "missing" in result.stdout and "sequences at once" not in result.stdout
    assert "sequences  " not in run(*small, "--explain").stdout
    assert json.loads(run(*small, "--json").stdout)["starts"] is False


def test_no_number_of_tokens_is_told_where_windows_keep_few_of_a_long_sequence() -> None:
    first, then = run("--model", "openai/gpt-oss-20b", "--gpu", "H100").stdout.splitlines()[:2]
    assert first.endswith(": starts") and then.startswith("sequences at once: ")


def test_windows_are_noted() -> None:
    text = run("--model", "google/gemma-3-27b-it", "--gpu", "H200").stdout
    assert "7 block tables per sequence" in text


def test_options_reach_the_budget() -> None:
    def blocks(*extra: str) -> int:
        result = run("--model", "Qwen/Qwen3-8B", "--gpu", "H200", "--json", *extra)
        return json.loads(result.stdout)["num_gpu_blocks"]

    assert blocks("--kv-tokens", "1600") == 100
    assert blocks("--block-size", "32") < blocks() < blocks("--kv-cache-dtype", "fp8")
    assert blocks("--free-gpu-memory-fraction", "0.1") < blocks("--gpu-memory-utilization", "0.5") < blocks()
    assert blocks("--tensor-parallel-size", "2") > 2 * blocks()
    assert blocks("--enforce-eager") > blocks() > blocks("--model-runner", "v1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "qwen9", "--gpu", "H200"), "unknown model 'qwen9'"),
        (("--model", "Qwen/Qwen3-8B", "--gpu", "H900"), "unknown GPU 'H900'"),
        (("--model", "Qwen/Qwen3-8B", "--gpu", "H200", "--block-size", "0"), "block_size is 0"),
        (("--model", "meta-llama/Llama-3.1-70B", "--gpu", "L4"), "leaves no room for a KV cache"),
    ],
)
def test_mistakes_are_one_line_of_bad_input(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, BadInput)
    assert message in str(result.exception) and "\n" not in str(result.exception)
