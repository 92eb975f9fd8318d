"""Decisions of SGLang's scheduler as numbers, and the compressed file they are kept in.

A file holds a line for each seed: the checksum of its specification, a column for each field of its turns,
and one for each figure of its requests. A list of decoding or waiting requests that is the same as in the
turn before is written as 0, and numbers as the difference to the turn before.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """What one turn of the scheduler decided, of those that compute; times in microseconds.

    `prefill` are the chunks in the batch's order: (request, tokens already there, tokens). `decodes` are the
    requests that compute one token each, over `context` tokens together. `retracted` lost their KV in this
    turn or in one before it that computed nothing. `waiting` is the queue in its order. All pages are free,
    evictable or in use; `evicted_tokens` were evicted since the beginning.
    """

    start_us: int
    end_us: int
    prefill: tuple[tuple[int, int, int], ...]
    decodes: tuple[int, ...]
    context: int
    retracted: tuple[int, ...]
    waiting: tuple[int, ...]
    free_pages: int
    evictable_pages: int
    evicted_tokens: int
    ratio: float


class Served(NamedTuple):
    """One request's story; times in microseconds."""

    submitted_us: int
    first_token_us: int
    finish_us: int
    cached_tokens: int
    tokens_out: int
    retractions: int


class Decisions(NamedTuple):
    """All that was decided for one specification."""

    seed: int
    checksum: str
    turns: list[Turn]
    served: list[Served]


LISTS = ("decodes", "waiting")
NUMBERS = ("start_us", "end_us", "context", "free_pages", "evictable_pages", "evicted_tokens")
NOTHING = Turn(0, 0, (), (), 0, (), (), 0, 0, 0, 0.0)


def write(path: Path, runs: Iterable[Decisions]) -> None:
    """Writes a file of decisions; the same runs give the same bytes."""
    text = "".join(to_line(run) + "\n" for run in runs)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def read(path: Path) -> Iterator[Decisions]:
    """The runs of a file."""
    for line in lzma.decompress(path.read_bytes()).splitlines():
        yield from_line(line.decode())


def to_line(run: Decisions) -> str:
    """One run as a line of text."""
    columns: dict[str, list[Any]] = {name: [] for name in Turn._fields}
    before = NOTHING
    for turn in run.turns:
        for name, column in columns.items():
            value, earlier = getattr(turn, name), getattr(before, name)
            if name in NUMBERS:
                column.append(value - earlier)
            elif name in LISTS or name == "ratio":
                column.append(0 if value == earlier else value)
            else:
                column.append(value)
        before = turn
    served = [list(column) for column in zip(*run.served, strict=True)]
    packed = {"seed": run.seed, "checksum": run.checksum, "turns": columns, "served": served}
    return json.dumps(packed, separators=(",", ":"))


def from_line(line: str) -> Decisions:
    """The run of a line of text."""
    packed = json.loads(line)
    columns = packed["turns"]
    turns: list[Turn] = []
    before = NOTHING
    for row in zip(*columns.values(), strict=True):
        fields = dict(zip(columns, row, strict=True))
        for name in NUMBERS:
            fields[name] += getattr(before, name)
        for name in LISTS:
            fields[name] = getattr(before, name) if fields[name] == 0 else tuple(fields[name])
        if fields["ratio"] == 0:
            fields["ratio"] = before.ratio
        fields["prefill"] = tuple((number, there, tokens) for number, there, tokens in fields["prefill"])
        fields["retracted"] = tuple(fields["retracted"])
        before = Turn(**fields)
        turns.append(before)
    served = [Served(*row) for row in zip(*packed["served"], strict=True)]
    return Decisions(packed["seed"], packed["checksum"], turns, served)


def main() -> None:
    """Packs the lines on standard input into the file named: `python sglang_decisions.py FILE < lines`."""
    write(Path(sys.argv[1]), [from_line(line) for line in sys.stdin])


if __name__ == "__main__":
    main()
