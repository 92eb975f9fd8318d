"""Hints for mistakes in options: names that engines give them, and numbers with a unit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pagecast.sim.core.engines.registry import PROFILES

_OTHER_NAMES = {
    theirs: f"--{ours.replace('_', '-')}"
    for profile in PROFILES.values()
    for theirs, ours in profile.option_names.items()
}
# Options of load tools that say how a server is reached, or which of their data sets is sent.
_OF_LOAD_TOOLS = {
    *(
        "--backend",
        "--base-url",
        "--host",
        "--endpoint",
        "--endpoint-type",
        "--url",
        "--target",
        "--tokenizer",
    ),
    *("--dataset-name", "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm", "--streaming"),
    *("--percentile-metrics", "--metric-percentiles", "--trust-remote-code", "--result-filename"),
}
_WITH_UNIT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z%]+)")


def mistake(error: Any, arguments: Sequence[str]) -> str | None:
    """A message on the mistake in `arguments` that click's `error` is about; None where there is no hint."""
    context = getattr(error, "ctx", None)
    if context is None:
        return None
    if getattr(error, "option_name", None):
        return _other_name(context, arguments)
    parameter = getattr(error, "param", None)
    return _number_with_unit(parameter, arguments) or _no_number(parameter, arguments, error.format_message())


def _other_name(context: Any, arguments: Sequence[str]) -> str | None:
    options = {name for parameter in context.command.params for name in parameter.opts}
    for argument in arguments:
        name = argument.partition("=")[0]
        ours = _OTHER_NAMES.get(name)
        if name not in options and ours in options:
            return f"No such option: {name}; did you mean {ours}?"
        if name in _OF_LOAD_TOOLS - options and "--input-len" in options:
            return f"No such option: {name}, which load tools have: leave it out, nothing is sent"
        if name == "--dataset-path" and "--input-len" in options:
            return f"No such option: {name}; give the file as the trace"
    return None


def _number_with_unit(parameter: Any, arguments: Sequence[str]) -> str | None:
    if parameter is None:
        return None
    for option in parameter.opts:
        value = _value_of(option, arguments)
        match = _WITH_UNIT.fullmatch(value)
        if match is not None:
            number, unit = match.groups()
            about = getattr(parameter, "help", None) or ""
            hint = f"give {unit} as a number: {number}"
            if unit not in re.findall(r"\w+", about):
                hint = f"give a number without a unit ({about})"
            return f"{option} is {value}: {hint}"
    return None


def _no_number(parameter: Any, arguments: Sequence[str], problem: str) -> str | None:
    kind = next((word for word in ("integer", "number") if f"a valid {word}" in problem), None)
    for option in () if parameter is None or kind is None else parameter.opts:
        value = _value_of(option, arguments)
        if value:
            several = "--sweep-concurrency takes several" if "," in value and "concurrency" in option else ""
            needed = f"give {'a whole number' if kind == 'integer' else 'a number'}"
            return f"{option} is {value}: {needed}{'; ' + several if several else ''}"
    return None


def _value_of(option: str, arguments: Sequence[str]) -> str:
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option:
            return value if equals else "".join(arguments[at + 1 : at + 2])
    return ""
