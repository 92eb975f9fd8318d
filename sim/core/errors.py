"""Errors a user can act on: each carries one line that says what is wrong, where, and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class PagecastError(Exception):
    """Something the user can fix. The command line prints it as one line, without a traceback."""

    exit_code = 2


class BadInput(PagecastError):
    """A file, field, flag or name that can't be used (exit code 2)."""


class CannotRunHere(PagecastError):
    """This machine lacks something: a GPU, an extra, memory (exit code 3)."""

    exit_code = 3


def unknown_field(name: str, fields: Iterable[str]) -> str:
    """The part of an error that names a field that is not known, with the nearest one and all there are."""
    names = list(fields)
    near = get_close_matches(name.rpartition(".")[2].replace("-", "_"), names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"field {name!r} is not known; {hint}fields are {', '.join(names)}"
