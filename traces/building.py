"""Collects requests one by one in flat arrays and finishes them as a `Trace`.

Readers that go line by line use it: a million requests take tens of megabytes, not gigabytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from pagecast.traces.operations import sort as sort_trace
from pagecast.traces.schema import INTEGERS, SECONDS, Ints, Spans, Trace, starts, table
from pagecast.traces.source import Source

_FLUSH_IDS = 1 << 20
_EPOCH_S = 1e8  # arrivals later than three years into a trace are dates


class BlockSpans:
    """Makes spans of hash ids: id k of a set of texts names the tokens `k * block .. (k + 1) * block`.

    Naming texts so keeps equal ids equal and lets consecutive ids merge into one span: a prompt of a
    thousand fresh blocks is one span. `content` tells apart sets whose ids mean different things.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._counts = array("q")
        self._ids = array("q")
        self._rows: list[tuple[int, int, int]] = []  # content, input tokens, content of the rest
        self._done: list[tuple[Ints, Ints, Ints, Ints]] = []

    def add(self, ids: Sequence[int], input_tokens: int, content: int = 0, rest: int = 0) -> None:
        """A prompt of `ids`, cut to `input_tokens`; tokens past the last id are a span of text `rest`.

        Raises OverflowError or TypeError for an id that is no integer of 64 bits.
        """
        self._ids.extend(ids)
        self._counts.append(len(ids))
        self._rows.append((content, input_tokens, rest))
        if len(self._ids) >= _FLUSH_IDS:
            self._flush()

    def _flush(self) -> None:
        """Turns the collected ids into merged spans: counts a row, content, offset, length."""
        if not self._rows:
            return
        block = self.block_tokens
        ids = np.frombuffer(self._ids, dtype=np.int64)
        counts = np.frombuffer(self._counts, dtype=np.int64)
        rows = np.array(self._rows, dtype=np.int64)
        ends = np.cumsum(counts)
        first = np.zeros(len(ids), dtype=bool)
        first[(ends - counts)[counts > 0]] = True
        first[1:] |= ids[1:] != ids[:-1] + 1
        heads = np.flatnonzero(first)
        owner = np.repeat(np.arange(len(rows)), counts)[heads]
        blocks = np.diff(np.append(heads, len(ids)))
        length = blocks * block
        last = np.append(owner[1:] != owner[:-1], True) if len(owner) else np.empty(0, dtype=bool)
        # The last id of a row stands for what is left of the prompt.
        length[last] -= np.maximum(counts * block - rows[:, 1], 0)[owner[last]]
        rest = np.maximum(rows[:, 1] - counts * block, 0)
        tails = np.flatnonzero(rest)
        owner = np.concatenate([owner, tails])
        order = np.argsort(owner, kind="stable")
        self._done.append(
            (
                np.bincount(owner, minlength=len(rows)).astype(np.int64),
                np.concatenate([rows[:, 0][owner[: len(heads)]], rows[tails, 2]])[order],
                np.concatenate([ids[heads] * block, np.zeros(len(tails), dtype=np.int64)])[order],
                np.concatenate([length, rest[tails]])[order],
            )
        )
        self._ids, self._counts, self._rows = array("q"), array("q"), []

    def finish(self) -> Spans:
        """All prompts added so far."""
        self._flush()
        parts = list(zip(*self._done, strict=True)) or [(np.empty(0, dtype=np.int64),)] * 4
        counts, content, offset, length = (np.concatenate(part) for part in parts)
        return Spans(starts(counts), content, offset, length)


class Rows:
    """The requests read so far, by column, with the lines they came from."""

    def __init__(self, source: Source, columns: Iterable[str]) -> None:
        self._source = source
        self.lines = array("q")
        self._columns: dict[str, Any] = {
            name: array("q") if name in INTEGERS else array("d") if name in SECONDS else []
            for name in columns
        }

    def __len__(self) -> int:
        return len(self.lines)

    def add(self, line: int, *values: Any) -> None:
        """One request: its line, then a value for each column, in the order given to the constructor."""
        self.lines.append(line)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def finish(
        self, spans: Spans | None = None, *, time_field: str, sort: bool = False, notes: Sequence[str] = ()
    ) -> Trace:
        """The trace. Raises BadInput when it has no rows, or times out of order (unless `sort`)."""
        columns = {
            name: np.frombuffer(column, dtype=np.int64 if name in INTEGERS else np.float64)
            if isinstance(column, array)
            else column
            for name, column in self._columns.items()
        }
        lines = np.frombuffer(self.lines, dtype=np.int64)
        return finish(self._source, columns, lines, spans, time_field=time_field, sort=sort, notes=notes)


def finish(
    source: Source,
    columns: dict[str, Any],
    lines: Ints,
    spans: Spans | None = None,
    *,
    time_field: str,
    sort: bool = False,
    notes: Sequence[str] = (),
) -> Trace:
    """A trace of whole columns: checks the order of times, sorts if asked, counts dates from the first."""
    if not len(lines):
        raise source.fail("no requests in it; a trace needs at least one")
    arrival = np.asarray(columns["arrival_s"], dtype=np.float64)
    timed = np.flatnonzero(~np.isnan(arrival))
    back = np.flatnonzero(np.diff(arrival[timed]) < 0)
    if len(back) and not sort:
        a, b = timed[back[0]], timed[back[0] + 1]
        raise source.fail(
            f"goes back in time: {arrival[b]:.9g} s comes after {arrival[a]:.9g} s; "
            "sort the file, or say sort=True (--sort)",
            int(lines[b]),
            time_field,
        )
    if len(timed) and float(np.min(arrival[timed])) >= _EPOCH_S:
        columns["arrival_s"] = arrival - float(np.min(arrival[timed]))
    trace = Trace(trace_name(source), table(columns), spans, notes=tuple(notes))
    return sort_trace(trace) if len(back) else trace


def trace_name(source: Source) -> str:
    """A trace's name: its file's, without endings."""
    return source.path.name.split(".")[0] or source.path.name
