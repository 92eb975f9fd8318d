"""Files that hold several runs of a benchmark: which of them is read, and what a note says of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagecast.traces.source import Source

_MOST_NAMED = 8


def chosen(source: Source, runs: Sequence[Any], number: int | None) -> list[Any]:
    """All runs, or number `number` (from 1) alone. Errors: BadInput."""
    if number is None:
        return list(runs)
    if not 1 <= number <= len(runs):
        raise source.fail(f"run {number} is asked for (--run), and there are {len(runs)} in it")
    return [runs[number - 1]]


def several(runs: Sequence[Any], picked: Sequence[Any], name: Callable[[Any], str]) -> list[str]:
    """A note that tells the runs of a file with more than one."""
    if len(runs) < 2:
        return []
    listed = "; ".join(f"{at}: {name(one)}" for at, one in enumerate(runs[:_MOST_NAMED], 1))
    more = "; ..." if len(runs) > _MOST_NAMED else ""
    read = "one is read" if len(picked) == 1 else "read one after another (--run N reads one)"
    return [f"{len(runs)} runs in the file, {read}: {listed}{more}"]
