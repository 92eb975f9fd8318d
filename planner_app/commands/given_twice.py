"""Options that are given two values under two names: a parser would take the last without a word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import wraps
from typing import Any

from pagecast.sim.core.errors import BadInput


def refuse_twice(command: Any) -> Any:
    """The click command, or group of commands, that refuses an option with two values under two names.

    These are `--num-gpu-blocks` and `--num-gpu-blocks-override`, or `--x` and `--no-x`. Under one name the
    last wins, as in any command that is made of a fixed part and changes to it.
    """
    for part in getattr(command, "commands", {}).values():
        refuse_twice(part)
    if not getattr(command, "commands", {}):
        parse = command.parse_args

        @wraps(parse)
        def checked(context: Any, arguments: list[str]) -> Any:
            _check(command.params, arguments)
            return parse(context, arguments)

        command.parse_args = checked
    return command


def _check(parameters: Sequence[Any], arguments: Sequence[str]) -> None:
    """Errors: BadInput naming both, as they are written."""
    options = {
        name: each
        for each in parameters
        for name in (*each.opts, *each.secondary_opts)
        if name.startswith("-") and not each.multiple and each.nargs == 1
    }
    last: dict[str, dict[str, str]] = {}  # of each parameter, the values by the names given
    for name, value in _given(options, arguments):
        last.setdefault(options[name].name, {})[name] = value
    for names in last.values():
        meant = {value or str(name in options[name].opts) for name, value in names.items()}
        if len(meant) > 1:
            written = " and ".join(f"{name} {value}".rstrip() for name, value in names.items())
            raise BadInput(f"{written} set the same option: leave one of them out")


def _given(options: dict[str, Any], arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options by the names given, with their values; a flag has none."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return
        name, equals, value = argument.partition("=")
        if name in options:
            flag = getattr(options[name], "is_flag", False)
            yield name, "" if flag else value if equals else next(rest, "")
