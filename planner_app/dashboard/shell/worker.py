"""A process that does one long piece of work for the dashboard (`python -m` this module).

Reads a pickled `(function, arguments)` from stdin, calls `function(*arguments, progress=...)`, and writes
pickled messages to stdout: `("progress", value)` any number of times, then `("done", value)`, or
`("failed", sentence)` for an error that a user can mend. It runs at low priority, so that a slider's replay
comes first, and within bounds of memory, so that a hostile file ends it and nothing else.
"""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO

from pagecast.planner_app.garbage import collect_seldom

MEMORY_BYTES = 6 << 30
_NICE = 5
_FIRST_WORK = "pagecast.planner_app.dashboard.what_if.choice_job"  # imported before there is any


def main() -> None:
    """Does the work. What the work prints goes to stderr, for stdout is the way back."""
    back = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _restrain()
    collect_seldom()
    with suppress(ImportError):
        import_module(_FIRST_WORK)
    with suppress(BrokenPipeError):  # the server has gone: so do we
        _work(sys.stdin.buffer, back)


def _work(source: BinaryIO, back: BinaryIO) -> None:
    from pagecast.sim.core.errors import PagecastError

    def tell(kind: str, value: Any) -> None:
        pickle.dump((kind, value), back)
        back.flush()

    try:
        try:
            function, arguments = pickle.load(source)
        except EOFError:  # the server has gone, or has no work
            return
        tell("done", function(*arguments, progress=lambda value: tell("progress", value)))
    except PagecastError as error:
        tell("failed", str(error))
    except MemoryError:
        tell("failed", f"needs more than {MEMORY_BYTES >> 30} GiB of memory; use a smaller trace")


def _restrain() -> None:
    """Low priority and a bound on memory, where the system knows of them."""
    with suppress(OSError, AttributeError):
        os.nice(_NICE)
    try:
        import resource
    except ImportError:
        return
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


if __name__ == "__main__":
    main()
