"""Errors a user can act on: each carries one line that says what is wrong, where, and what to do."""


class PagecastError(Exception):
    """Something the user can fix. The command line prints it as one line, without a traceback."""

    exit_code = 2


class BadInput(PagecastError):
    """A file, field, flag or name that can't be used (exit code 2)."""


class CannotRunHere(PagecastError):
    """This machine lacks something: a GPU, an extra, memory (exit code 3)."""

    exit_code = 3
