"""`pagecast hits`: hit ratio against capacity, as one object or a table."""

import json
from pathlib import Path

import pytest
import typer
from pagecast.planner_app.cli import run as pagecast
from pagecast.planner_app.commands.hits import hits_command
from pagecast.sim.core.errors import BadInput
from pagecast.traces.describe import describe
from pagecast.traces.read import read
from typer.testing import CliRunner, Result

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(hits_command)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "140"})


def test_json_has_its_keys_and_the_published_ratios_at_the_traces_own_block_size(shared: Path) -> None:
    trace = shared / "traces/mooncake_conversation_trace.jsonl.zst"
    result = run(trace, "--capacity", "1000,10000", "--json")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    body = json.loads(result.stdout)
    assert list(body) == ["block_size", "references", "unique_blocks", "infinite", "capacity", "notes"]
    assert body["block_size"] == 512
    assert "generated tokens would change nothing" in body["notes"][-1]
    assert (body["references"], body["unique_blocks"]) == (288_500, 182_790)
    assert {blocks: round(ratio, 4) for blocks, ratio in body["capacity"].items()} == {
        "1000": 0.0445,
        "10000": 0.2112,
    }


def test_the_table_names_blocks_tokens_and_ratios() -> None:
    result = run("chat", "--capacity", "1000,20_000", "--block-size", 16)
    assert result.exit_code == 0
    assert "blocks of 16 tokens" in result.stdout
    assert "320,000" in result.stdout
    assert "infinite" in result.stdout


def test_without_a_block_size_blocks_are_vllms_or_what_the_file_says(tmp_path: Path) -> None:
    assert json.loads(run("chat", "--json").stdout)["block_size"] == 16
    row = {
        "arrival_s": 0,
        "input_tokens": 200,
        "output_tokens": 1,
        "block_ids": [1, 2],
        "block_ids_tokens": 128,
    }
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    assert json.loads(run(tmp_path / "t.jsonl", "--json").stdout)["block_size"] == 128
    assert json.loads(run(tmp_path / "t.jsonl", "--block-size", 64, "--json").stdout)["block_size"] == 64


def test_a_note_says_what_generated_tokens_would_add() -> None:
    share = describe(read("chat"))["sharing"]["shareable_fraction"]
    result = run("chat")
    assert "generated tokens left out" in result.stdout
    assert f"an endless cache would find {share:.1%} of prompt tokens, not" in " ".join(result.stdout.split())


def test_a_folder_of_replay_is_taken_as_replay_takes_it(tmp_path: Path) -> None:
    assert pagecast(["replay", "chat", "--limit", "60", "--out", str(tmp_path / "run")]) == 0
    for command in (["hits"], ["trace", "describe"], ["replay"]):
        assert pagecast([*command, str(tmp_path / "run"), "--json"]) == 0
    again = json.loads(run(tmp_path / "run", "--json").stdout)
    assert again["references"] == json.loads(run("chat", "--limit", 60, "--json").stdout)["references"]


def test_smaller_blocks_find_more() -> None:
    def infinite(size: int) -> float:
        return json.loads(run("chat", "--block-size", size, "--json").stdout)["infinite"]

    assert infinite(16) > infinite(128) > infinite(512)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("chat", "--capacity", "many"), "--capacity 'many'"),
        (("chat", "--capacity", "0"), "at least one block"),
        (("chat", "--capacity", ""), "at least one block"),
        (("chat", "--block-size", "0"), "block size 0"),
        (("/no/such/file",), "no such file"),
    ],
)
def test_mistakes(arguments: tuple, part: str) -> None:
    error = run(*arguments).exception
    assert isinstance(error, BadInput)
    assert part in str(error)
