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
_WITH_UNIT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z%]+)")


def mistake(error: Any, arguments: Sequence[str]) -> str | None:
    """A message on the mistake in `arguments` that click's `error` is about; None where there is no hint."""
    context = getattr(error, "ctx", None)
    if context is None:
        return None
    if getattr(error, "option_name", None):
        return _other_name(context, arguments)
    return _number_with_unit(getattr(error, "param", None), arguments)


def _other_name(context: Any, arguments: Sequence[str]) -> str | None:
    options = {name for parameter in context.command.params for name in parameter.opts}
    for argument in arguments:
        name = argument.partition("=")[0]
        ours = _OTHER_NAMES.get(name)
        if name not in options and ours in options:
            return f"No such option: {name}; did you mean {ours}?"
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


def _value_of(option: str, arguments: Sequence[str]) -> str:
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option:
            return value if equals else "".join(arguments[at + 1 : at + 2])
    return ""
