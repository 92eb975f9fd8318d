"""Bounds of numbers among the options: one check for all commands, before a command does anything.

Python's integers have no end, and what they are given to has: arrays, databases and the C library take 64
bits. NaN passes every comparison that should refuse it. An option with a narrower range states it itself
(`Field(ge=..., le=...)`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

from pagecast.sim.core.errors import BadInput

LEAST, MOST = -(1 << 63), (1 << 63) - 1


def bound_numbers(command: Any) -> Any:
    """The click command, or group of commands, whose numbers are checked before it runs."""
    for part in getattr(command, "commands", {}).values():
        bound_numbers(part)
    if command.callback is not None:
        options = {parameter.name: parameter.opts[0] for parameter in command.params}
        command.callback = _checked(command.callback, options)
    return command


def _checked(callback: Callable[..., Any], options: dict[str, str]) -> Callable[..., Any]:
    @wraps(callback)
    def run(*arguments: Any, **values: Any) -> Any:
        for name, value in values.items():
            for item in value if isinstance(value, list | tuple) else [value]:
                check_number(options.get(name, name), item)
        return callback(*arguments, **values)

    return run


def check_number(name: str, value: object) -> None:
    """Errors: BadInput for an integer beyond 64 bits, and for NaN; anything else passes."""
    if isinstance(value, float) and math.isnan(value):
        raise BadInput(f"{name} is nan; give a number")
    if isinstance(value, int) and not LEAST <= value <= MOST:
        bound = f"at most {MOST}" if value > 0 else f"at least {LEAST}"
        raise BadInput(f"{name} is {value}; it must be {bound}")
