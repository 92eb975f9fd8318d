"""One line on stderr for an error, and the end of stdout. Imports nothing heavy: the script needs it."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress

_LONGEST_WORD, _KEPT_OF_WORD = 300, 60  # longer than the paths that people have
_LONGEST, _KEPT = 1000, 300
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")


def complain(text: str) -> None:
    """One line on stderr, whatever characters a file's name may hold."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"pagecast: {printable(cut(text))}\n")


def cut(text: str) -> str:
    """`text` with each long word, and the middle of a long rest, replaced by how much there was.

    Errors quote what users wrote, and that may be of any length. An error begins with where it is and ends
    with what to do: both stay.
    """
    words = _LONG_WORD.sub(lambda word: _middle(word[0], _KEPT_OF_WORD), text)
    return _middle(words, _KEPT) if len(words) > _LONGEST else words


def _middle(text: str, length: int) -> str:
    return f"{text[:length]}... ({len(text):,} characters) ...{text[-length:]}"


def printable(text: str) -> str:
    """`text` with line ends and control characters spelt out."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def drop_stdout() -> None:
    """Discards the rest of the output buffer, so that Python's exit does not fail on it again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
