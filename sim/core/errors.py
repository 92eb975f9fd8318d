"""Errors a user can act on: each carries one line that says what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Container
from typing import Any


class PagecastError(Exception):
    """Something the user can fix. The command line prints it as one line, without a traceback."""

    exit_code = 2


class BadInput(PagecastError):
    """A file, field, flag or name that can't be used (exit code 2)."""


class CannotRunHere(PagecastError):
    """This machine lacks something: a GPU, an extra, memory (exit code 3)."""

    exit_code = 3


class Unfinished(KeyboardInterrupt):
    """An interrupt of a search, with the best `answer` so far, of the kind that the search returns."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer


def check_given_once(
    name: str,
    before: Container[str],
    what: str,
    remedy: str = "keep one",
    error: type[Exception] = BadInput,
) -> None:
    """Refuses a name or field that was given before.

    `before`: those given so far. `what`: the name in words, and where it is. Errors: `error`, "WHAT is given
    twice; REMEDY".
    """
    if name in before:
        raise error(f"{what} is given twice; {remedy}")
