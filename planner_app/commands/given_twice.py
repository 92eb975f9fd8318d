"""Options that are given two values: refused, where a parser would take the last without a word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import wraps
from typing import Any

from pagecast.sim.core.errors import BadInput


def refuse_twice(command: Any) -> Any:
    """The click command, or group of commands, that refuses an option with two values.

    An option may be given twice where it takes several values, or where the values are equal: by one of its
    names (`--num-gpu-blocks`, `--num-gpu-blocks-override`), two of them, or as `--x` and `--no-x`.
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
    first: dict[str, tuple[str, str]] = {}  # written and value, by parameter
    for name, value in _given(options, arguments):
        written = f"{name} {value}" if value else name
        meant = value or str(name in options[name].opts)
        before, was = first.setdefault(options[name].name, (written, meant))
        if was != meant:
            raise BadInput(f"{before} and {written} set the same option: leave one of them out")


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
