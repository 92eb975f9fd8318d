"""Invariants of the core, and the error that one of them raises."""

from __future__ import annotations


class InvariantError(AssertionError):
    """An invariant does not hold: a bug in the core, never in its input."""


def hold(condition: bool, message: str) -> None:
    """Asserts an invariant. Errors: `InvariantError` with the message."""
    if not condition:
        raise InvariantError(message)
