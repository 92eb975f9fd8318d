"""Builder of traces: requests are collected one by one in flat arrays.

Readers that go line by line use it: a million requests take tens of megabytes, not gigabytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from pagecast.traces.arrays import Ints
from pagecast.traces.checks import Problem, find_disorder, find_problem
from pagecast.traces.operations import sort as sort_trace
from pagecast.traces.records import Record
from pagecast.traces.schema import DEFAULTS, INTEGERS, MEASURED, SECONDS, Spans, Trace, starts, table
from pagecast.traces.source import Source

NO_REQUESTS = "no requests in it; a trace needs at least one"
_FLUSH_IDS = 1 << 20
_MAX_TOKENS = 1 << 62
_EPOCH_S = 1e8  # arrivals later than three years into a trace are dates


def none_left(source: Source, failed: int) -> Exception:
    """The error for a file that has no request to serve, where so many failed."""
    if not failed:
        return source.fail(NO_REQUESTS)
    return source.fail(f"all of its {failed:,} requests failed or generated nothing")


class BlockSpans:
    """Makes spans of hash ids: id k of a set of texts names the tokens `k * block .. (k + 1) * block`.

    Naming texts so keeps equal ids equal and lets consecutive ids merge into one span: a prompt of a
    thousand fresh blocks is one span. `content` tells apart sets whose ids mean different things.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._counts = array("q")
        self._ids = array("q")
        self._names: dict[int, int] = {}  # of ids from the upper half on, in order of their first use
        self._rows: list[tuple[int, int, int]] = []  # content, input tokens, content of the rest
        self._done: list[tuple[Ints, Ints, Ints, Ints]] = []

    def add(
        self,
        record: Record,
        field: str,
        input_tokens: int,
        *,
        last: Literal["cut", "left out", "either"] = "cut",
        content: int = 0,
        rest: int = 0,
    ) -> None:
        """A prompt whose blocks `field` names; no ids at all: a prompt of its own.

        `last` says whether an id stands for a last block that is not full: it is `cut` to what is left
        of the prompt, or such a block is `left out` and its tokens are a span of the text `rest`, or
        `either`. Raises BadInput, naming `field`, for too few or many ids and for such as are no whole
        numbers in range.
        """
        ids = record.items(field)
        whole = input_tokens // self.block_tokens
        most = whole if last == "left out" else -(-input_tokens // self.block_tokens)
        least = most if last == "cut" else whole
        if not ids and last != "left out":
            self.none()
            return
        if not least <= len(ids) <= most:
            raise record.fail(
                field,
                f"{len(ids)} ids, but {input_tokens} tokens at {self.block_tokens} a block need {least}; "
                "correct the line, or say what a block has (pagecast trace convert --block-tokens)",
            )
        self._ids += self._checked(record, field, ids)
        self._counts.append(len(ids))
        self._rows.append((content, input_tokens, rest))
        if len(self._ids) >= _FLUSH_IDS:
            self._flush()

    def _checked(self, record: Record, field: str, ids: list[Any]) -> array[int]:
        """The ids, renamed where they are too large to be counted in tokens: hashes have 64 bits."""
        if set(map(type, ids)) - {int} or (ids and not (min(ids) >= 0 and max(ids) < 1 << 64)):
            raise record.fail(field, "holds something other than whole numbers from 0 to 2**64")
        first = _MAX_TOKENS // self.block_tokens // 2
        if ids and max(ids) >= first:
            names = self._names
            ids = [id if id < first else names.setdefault(id, first + len(names)) for id in ids]
        return array("q", ids)

    def none(self) -> None:
        """A prompt of its own, shared by nobody."""
        self._counts.append(0)
        self._rows.append((0, 0, 0))

    def _flush(self) -> None:
        """Turns the collected ids into merged spans: counts per row, content, offset, length."""
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


class RequestRows:
    """The requests read so far, by column, with the lines they came from."""

    def __init__(self, source: Source, columns: Iterable[str]) -> None:
        self._source = source
        self.lines = array("q")
        self._columns: dict[str, Any] = {
            name: array("q") if name in INTEGERS else array("d") if name in (*SECONDS, *MEASURED) else []
            for name in columns
        }

    def __len__(self) -> int:
        return len(self.lines)

    def include(self, name: str) -> None:
        """One more column, the last; the requests so far have its default."""
        column = array("q") if name in INTEGERS else array("d") if name in SECONDS else []
        column.extend([DEFAULTS[name]] * len(self))
        self._columns[name] = column

    def add(self, line: int, *values: Any) -> None:
        """One request: its line, then a value for each column, in the order given to the constructor."""
        self.lines.append(line)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def count_from_first(self) -> None:
        """Lets arrivals count from the earliest so far."""
        arrivals = self._columns["arrival_s"]
        first = min(arrivals)
        self._columns["arrival_s"] = array("d", (arrival_s - first for arrival_s in arrivals))

    def finish(
        self,
        spans: Spans | None = None,
        token_ids: list[Ints] | None = None,
        *,
        sort: bool = False,
        time_field: str = "arrival_s",
        notes: Sequence[str] = (),
    ) -> Trace:
        """The trace. Raises BadInput where it breaks the schema's rules."""
        columns = {
            name: np.frombuffer(column, dtype=np.int64 if name in INTEGERS else np.float64)
            if isinstance(column, array)
            else column
            for name, column in self._columns.items()
        }
        if not len(self):
            raise self._source.fail(NO_REQUESTS)
        columns, measured = apart(columns)
        name = trace_name(self._source)
        trace = Trace(name, table(columns), spans, token_ids, tuple(notes), measured=measured)
        return finish(self._source, trace, self.lines.__getitem__, sort=sort, time_field=time_field)


def apart(columns: dict[str, Any]) -> tuple[dict[str, Any], pd.DataFrame | None]:
    """The columns of a trace, and the latencies beside them; None where no request has one."""
    latencies = {name: np.asarray(columns[name], np.float64) for name in MEASURED if name in columns}
    known = any(np.isfinite(values).any() for values in latencies.values())
    own = {name: column for name, column in columns.items() if name not in MEASURED}
    return own, pd.DataFrame(latencies, columns=list(MEASURED)) if known else None


def finish(
    source: Source,
    trace: Trace,
    line: Callable[[int], int] | None,
    *,
    sort: bool = False,
    time_field: str = "arrival_s",
) -> Trace:
    """Checks a trace that was read, sorts it if asked, and counts dates from the first of them.

    `line` tells the line that a row came from (None: the file has rows, not lines), `time_field` is the
    name that the file gives to arrivals. Raises BadInput with file, line and field.
    """
    if not len(trace):
        raise source.fail(NO_REQUESTS)
    problem = find_problem(trace)
    disorder = None if problem else find_disorder(trace)
    if problem or (disorder and not sort):
        row, field, text = problem or disorder or Problem(0, "", "")
        field = time_field if field == "arrival_s" else field
        if line is None:
            raise source.fail(f"row {row}: {text}", field=field)
        raise source.fail(text, line(row), field)
    arrival = trace.seconds("arrival_s")
    first = float(np.nanmin(arrival))
    if first >= _EPOCH_S:
        trace = replace(trace, requests=trace.requests.assign(arrival_s=arrival - first))
    return sort_trace(trace) if disorder else trace


def trace_name(source: Source) -> str:
    """A trace's name: its file's, without endings, on one line; a recorded run's is its folder's."""
    name = source.path.name.split(".")[0] or source.path.name
    name = source.path.resolve().parent.name if name == "inputs" else name
    return "".join(char if char.isprintable() else "?" for char in name)
