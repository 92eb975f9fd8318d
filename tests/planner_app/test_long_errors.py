"""An error stays a line, however long what it quotes is."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.stderr import cut

LONG = "x" * 200_000
WORDS = "word " * 40_000


@pytest.mark.parametrize("value", [LONG, WORDS], ids=["one word", "many words"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", "{}"],
        ["replay", "chat", "--gpu", "{}"],
        ["replay", "chat", "--model", "{}"],
        ["replay", "chat", "--costs", "{}"],
        ["replay", "chat", "--limit", "{}"],
        ["replay", "chat", "--{}"],
        ["plan", "chat", "--slo", "{}"],
        ["sweep", "chat", "--set", "{}"],
        ["sweep", "chat", "--set", "block_size=16", "--price", "{}"],
        ["hits", "chat", "--capacity", "{}"],
        ["{}"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_an_option_of_200000_characters_is_quoted_in_a_line(
    arguments: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([argument.format(value) for argument in arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert len(message) < 1100


def test_a_field_of_200000_characters_is_quoted_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(f"block_size: {LONG}\n")
    assert run(["replay", "chat", "--scenario", str(path)]) == 2
    message = capsys.readouterr().err
    assert str(path) in message
    assert "(200,003 characters)" in message
    assert message.rstrip().endswith("give a whole number")


def test_what_is_not_long_stays_as_it_is() -> None:
    usual = "/a/b.yaml line 3: " + "word " * 100 + "/" + "p" * 250
    assert cut(usual) == usual
