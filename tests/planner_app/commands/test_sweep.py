"""`pagecast sweep --help` names objectives that the command takes."""

import re

import pytest
from pagecast.planner_app.cli import run


def test_the_objectives_that_help_gives_as_defaults_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    match = re.search(r"figures to trade off, with commas \[([^]]*)\]", help_text)
    assert match is not None
    named = [name.strip(",") for name in match[1].split() if "_" in name or name == "cost"]
    assert len(named) > 2
    given = ["sweep", "chat", "--limit", "5", "--set", "block_size=16,32", "--price", "H200=3", "--json"]
    assert run([*given, "--objective", ",".join(named)]) in (0, 1)
    assert capsys.readouterr().err == ""
