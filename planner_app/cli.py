"""The console script: runs a command, and ends it in one line and an exit code whatever happens.

Exit codes: 0 good, 1 a check failed, 2 bad input or output, 3 this machine cannot, 130 interrupted. Nothing
heavy is imported before `run` is ready to catch an interrupt.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; an error a user can mend is one line on stderr."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """The same, returning the exit code."""
    if sys.stdout is None:  # Python's word for a closed one
        complain("stdout is closed; send it to a file or to /dev/null")
        return 2
    # The arrays here are small: more threads only spin, and take the cores that other processes need.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from pagecast.planner_app.commands import execute

        code = execute(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output has gone (`| head`): nothing left to say
        _drop_stdout()
        return 0
    except OSError as error:
        _drop_stdout()
        where = f"{error.filename}: " if error.filename else "can't write the output: "
        complain(f"{where}{error.strerror or error}")
        return 2


def complain(text: str) -> None:
    """One line on stderr, whatever characters a file's name may hold."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"pagecast: {printable(text)}\n")


def printable(text: str) -> str:
    """`text` with line ends and control characters spelt out."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _drop_stdout() -> None:
    """What is left in the buffer goes nowhere, so that Python's exit does not stumble over it again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
