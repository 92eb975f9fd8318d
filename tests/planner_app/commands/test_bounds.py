"""Integer options end where 64 bits do, for every command and before anything is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_args

import pytest
import typer
from pagecast.planner_app.cli import run
from pagecast.planner_app.commands.registry import COMMANDS

BEYOND = 1 << 64
# What a command can't do without; bounds are checked before any of it is used.
NEEDED = {
    "plan": ["trace", "--slo", "ttft_p99<1s"],
    "check": ["--scenario", "x.yaml"],
    "sweep": ["trace", "--set", "block_size=16"],
    "tune block-size": ["trace"],
    "tune hbm-budget": ["trace"],
    "validate": ["folder"],
    "memory": ["--model", "m", "--gpu", "g"],
    "trace convert": ["trace", "out.jsonl"],
    "trace generate": ["out.jsonl"],
    "trace from-metrics": ["answer.json", "out.jsonl"],
    "watch": ["http://localhost:8000"],
    "generate": ["text", "--model", "m"],
    "record": ["trace", "--model", "m", "--out", "folder"],
}
NEEDED |= {name: ["trace"] for name in ("replay", "hits", "trace describe")}


def callbacks() -> Iterator[tuple[str, Any]]:
    for name, place in COMMANDS.items():
        module = import_module(f"pagecast.planner_app.commands.{place.module}")
        target = getattr(module, place.attribute)
        if isinstance(target, typer.Typer):
            for command in target.registered_commands:
                yield f"{name} {command.name}", command.callback
        else:
            yield name, target


def integers() -> Iterator[tuple[str, str]]:
    for name, callback in callbacks():
        for parameter in inspect.signature(callback, eval_str=True).parameters.values():
            kind, option = get_args(parameter.annotation)[:2]
            kinds = {part for outer in (kind, *get_args(kind)) for part in (outer, *get_args(outer))}
            if int in kinds:
                given = (option.default, *(option.param_decls or ()))  # an annotation's first name is there
                spelt = [text for text in given if isinstance(text, str) and text.startswith("--")]
                yield name, spelt[0] if spelt else "--" + parameter.name.replace("_", "-")


@pytest.mark.parametrize(("command", "option"), sorted(set(integers())))
@pytest.mark.parametrize("value", [BEYOND, -BEYOND])
def test_an_integer_beyond_64_bits_is_one_line_that_names_the_option(command, option, value, capsys):
    assert run([*command.split(), *NEEDED.get(command, []), f"{option}={value}"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert option in message


@pytest.mark.parametrize("count", [10_001, 99_999_999_999_999_999_999])
def test_replicates_have_a_bound_that_ends_in_a_lifetime(count, capsys):
    assert run(["replay", "chat", "--limit", "5", "--replicates", str(count)]) == 2
    assert "--replicates" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", "folder", "--costs", "auto", "--max-error", "nan"],
        ["replay", "chat", "--speedup", "nan"],
        ["replay", "chat", "--gpu-memory-utilization", "nan"],
        ["plan", "chat", "--slo", "ttft_p99<1s", "--think-time", "nan"],
        ["trace", "convert", "chat", "out.jsonl", "--scale", "nan"],
    ],
)
def test_nan_is_no_number(arguments, capsys):
    assert run(arguments) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert arguments[-2] in message
