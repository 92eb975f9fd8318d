"""One line on stderr for an error. Imports nothing heavy: the console script needs it first of all."""

from __future__ import annotations

import sys
from contextlib import suppress


def complain(text: str) -> None:
    """One line on stderr, whatever characters a file's name may hold."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"pagecast: {printable(text)}\n")


def printable(text: str) -> str:
    """`text` with line ends and control characters spelt out."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
