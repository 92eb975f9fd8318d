"""`pagecast hits`: hit ratio against capacity, as one object or a table."""

import json
from pathlib import Path

import pytest
import typer
from pagecast.planner_app.cli_hits import hits_command
from pagecast.sim.core.errors import BadInput
from typer.testing import CliRunner, Result

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(hits_command)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "140"})


def test_json_has_the_four_keys_and_the_published_ratios(shared: Path) -> None:
    trace = shared / "traces/mooncake_conversation_trace.jsonl.zst"
    result = run(trace, "--capacity", "1000,10000", "--json")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    told = json.loads(result.stdout)
    assert list(told) == ["references", "unique_blocks", "infinite", "capacity"]
    assert (told["references"], told["unique_blocks"]) == (288_500, 182_790)
    assert {blocks: round(ratio, 4) for blocks, ratio in told["capacity"].items()} == {
        "1000": 0.0445,
        "10000": 0.2112,
    }


def test_the_table_names_blocks_tokens_and_ratios() -> None:
    result = run("chat", "--capacity", "1000,20_000", "--block-size", 16)
    assert result.exit_code == 0
    assert "blocks of 16 tokens" in result.stdout
    assert "320,000" in result.stdout
    assert "infinite" in result.stdout


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
