"""Our own JSON lines, and the `inputs.jsonl.gz` of a recorded run: one request per line, schema names.

    {"arrival_s": 0.5, "input_tokens": 900, "output_tokens": 80, "session": "a",
     "spans": [[0, 0, 800], [7, 0, 100]], "output_content": 7, "output_offset": 100}
    {"after": 0, "gap_s": 4.2, "input_tokens": 1000, "output_tokens": 60, "session": "a",
     "spans": [[0, 0, 800], [7, 0, 200]], "output_content": 7, "output_offset": 200}

Every column of the schema may stand in it (`traces/schema.py` says what each means); `arrival_s`,
`input_tokens` and `output_tokens` must, but `after` takes the place of `arrival_s`. A prompt is `spans`
(lists of text, offset, length; here the second turn quotes the first one's output), or `block_ids` with
`block_ids_tokens` (equal id = equal tokens; the prompt is their concatenation, cut to `input_tokens`), or
`token_ids`; with none of them it is unique. A file that has `token_ids` uses no other form; one with
both of the others, blocks of several sizes or an `output_content` names a text by each block id. The
first line of a generated trace may hold its recipe as `generated` (`traces/recipe.py`), and that of one
whose clients hold requests back their limit: `"concurrency": {"most": 64}`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pagecast.traces.arrays import Ints
from pagecast.traces.building import BlockSpans, RequestRows
from pagecast.traces.head import Head
from pagecast.traces.records import Record, records
from pagecast.traces.schema import (
    COLUMNS,
    CONCURRENCY,
    DEFAULTS,
    INTEGERS,
    RECIPE,
    REQUIRED,
    TEXTS,
    Spans,
    Trace,
    kept_concurrency,
    kept_recipe,
    starts,
)
from pagecast.traces.source import Source

FORMS = ("spans", "block_ids", "token_ids")
_MARKS = {"arrival_s", "after", "input_tokens", "output_tokens", *FORMS}
_LEAST = {"input_tokens": 1, "output_tokens": 1, "output_offset": 0, "public_tokens": 0, "retry": 0}


def recognise(head: Head) -> int:
    """How many of the main fields a file has, where arrivals or prompts go by the names used here."""
    found = _MARKS & (head.keys or set())
    return len(found) if found & {"arrival_s", "after", *FORMS} and len(found) >= 2 else 0


def read(source: Source, *, limit: int | None = None, sort: bool = False) -> Trace:
    """Reads the file. Raises BadInput for fields missing, mistyped, or at odds with each other."""
    try:
        return _read(source, limit, sort, _PromptRows())
    except _Mixed:
        return _read(source, limit, sort, _PromptRows(texts=True))


def _read(source: Source, limit: int | None, sort: bool, prompts: _PromptRows) -> Trace:
    names = list(REQUIRED)
    rows = RequestRows(source, names)
    recipe = concurrency = None
    seen_names = {*names, *FORMS, "block_ids_tokens", RECIPE, CONCURRENCY}
    recorded = source.path.name == "inputs.jsonl.gz"
    for record in records(source, limit):
        for name in record.values.keys() - seen_names:
            seen_names.add(name)
            if name in COLUMNS:
                names.append(name)
                rows.include(name)
        if recorded and record.values.get("after", -1) != -1:
            record.values["arrival_s"] = None  # when it came then; a replay sends it after the turn before
        values = [_value(record, name) for name in names]
        prompts.add(record, values[1])
        rows.add(record.line, *values)
        recipe = recipe or record.values.get(RECIPE)
        concurrency = concurrency or record.values.get(CONCURRENCY)
    ignored = sorted(seen_names - {*COLUMNS, *FORMS, "block_ids_tokens", RECIPE, CONCURRENCY})
    notes = [f"fields that are not part of the schema are ignored: {', '.join(ignored)}"] if ignored else []
    trace = rows.finish(prompts.spans(), prompts.token_ids(), sort=sort, notes=notes)
    return replace(
        trace,
        recipe=kept_recipe(recipe, limit, len(trace)),
        block_tokens=prompts.block_tokens(),
        concurrency=kept_concurrency(concurrency),
    )


def _value(record: Record, name: str) -> Any:
    """A column's value, or its default where the line leaves it out."""
    value = record.values.get(name)
    if value is None:
        if name == "arrival_s" and "after" in record.values:
            return math.nan
        if name in DEFAULTS:
            return DEFAULTS[name]
    if name in INTEGERS:
        return record.whole(name, _LEAST.get(name, -(1 << 61)))
    if name in TEXTS:
        return record.text(name, numbers=name == "session")
    return record.number(name)


class _Mixed(Exception):
    """A file whose block ids are also texts: of spans, of outputs, or of blocks of another size."""


class _PromptRows:
    """The prompts so far. `texts`: each block id names a text of its own, so that spans may stand beside."""

    def __init__(self, texts: bool = False) -> None:
        self._texts = texts
        self._unique = 0  # prompts before the first that is given in some form
        self._form = ""
        self._rows: _Spans | _Blocks | _Ids | None = None

    def add(self, record: Record, input_tokens: int) -> None:
        """Adds a line's prompt; without one of the forms it is unique."""
        filled = [name for name in FORMS if record.values.get(name) is not None]
        if len(filled) > 1:
            raise record.fail(filled[1], f"stands beside {filled[0]}; a prompt has one of them")
        form = next((name for name in (*filled, *FORMS) if name in record.values), None)
        if form is None:
            self._unique += self._rows is None
            if self._rows is not None:
                self._rows.none()
            return
        if form == "block_ids" and (self._texts or "output_content" in record.values):
            if not self._texts:
                raise _Mixed
            form = "spans"
        if self._rows is None:
            self._form, self._rows = form, _MAKERS[form](record)
            for _ in range(self._unique):
                self._rows.none()
        if {form, self._form} == {"spans", "block_ids"}:
            raise _Mixed
        if form != self._form:
            raise record.fail(form, f"the lines above give prompts as {self._form}; use one of them")
        self._rows.add(record, input_tokens)

    def spans(self) -> Spans | None:
        """Prompts as spans, where they were given as spans or blocks."""
        return self._rows.finish() if isinstance(self._rows, _Spans | _Blocks) else None

    def block_tokens(self) -> int | None:
        """The content of a block id, where prompts are given as block ids."""
        return self._rows.block_tokens if isinstance(self._rows, _Blocks) else None

    def token_ids(self) -> list[Ints] | None:
        """Prompts as token ids, where they were given so."""
        return self._rows.rows if isinstance(self._rows, _Ids) else None


def _whole_numbers(values: Sequence[Any]) -> Sequence[int]:
    """The same, for an array that takes booleans too. Errors: TypeError for anything but integers."""
    if set(map(type, values)) - {int}:
        raise TypeError("not whole numbers")
    return values


class _Spans:
    """Prompts given as `spans`, or as `block_ids` of which each names a text."""

    def __init__(self, record: Record) -> None:
        self._counts, self._flat = array("q"), array("q")

    def none(self) -> None:
        self._counts.append(0)

    def add(self, record: Record, input_tokens: int) -> None:
        if record.values.get("block_ids") is not None:
            spans = _texts(record, input_tokens)
        else:
            spans = record.items("spans")
        try:
            for content, offset, length in spans:
                self._flat.extend(_whole_numbers((content, offset, length)))
        except (TypeError, ValueError, OverflowError):
            raise record.fail("spans", "must be lists of three whole numbers: text, offset, length") from None
        self._counts.append(len(spans))

    def finish(self) -> Spans:
        flat = np.frombuffer(self._flat, dtype=np.int64).reshape(-1, 3)
        columns = (np.ascontiguousarray(flat[:, i]) for i in range(3))
        return Spans(starts(np.frombuffer(self._counts, dtype=np.int64)), *columns)


def _texts(record: Record, input_tokens: int) -> list[tuple[Any, int, int]]:
    """Block ids as spans: the first tokens of the text that each names, the last one cut."""
    ids, size = record.items("block_ids"), record.whole("block_ids_tokens")
    if ids and len(ids) != -(-input_tokens // size):
        needed = -(-input_tokens // size)
        raise record.fail(
            "block_ids", f"{len(ids)} ids, but {input_tokens} tokens at {size} a block need {needed}"
        )
    return [(id, 0, min(size, input_tokens - i * size)) for i, id in enumerate(ids)]


class _Blocks:
    """Prompts given as `block_ids`."""

    def __init__(self, record: Record) -> None:
        self.block_tokens = record.whole("block_ids_tokens")
        self._spans = BlockSpans(self.block_tokens)

    def none(self) -> None:
        self._spans.none()

    def add(self, record: Record, input_tokens: int) -> None:
        if record.whole("block_ids_tokens") != self.block_tokens:
            raise _Mixed
        self._spans.add(record, "block_ids", input_tokens)

    def finish(self) -> Spans:
        return self._spans.finish()


class _Ids:
    """Prompts given as `token_ids`."""

    def __init__(self, record: Record) -> None:
        self.rows: list[Ints] = []

    def none(self) -> None:
        self.rows.append(np.empty(0, dtype=np.int64))

    def add(self, record: Record, input_tokens: int) -> None:
        try:
            ids = array("q", _whole_numbers(record.items("token_ids")))
        except (TypeError, OverflowError):
            raise record.fail("token_ids", "holds something other than whole numbers") from None
        if ids and min(ids) < 0:
            raise record.fail("token_ids", f"{min(ids)} is no token id; ids are 0 or more")
        self.rows.append(np.frombuffer(ids, dtype=np.int64))


_MAKERS: dict[str, Callable[[Record], _Spans | _Blocks | _Ids]] = {
    "spans": _Spans,
    "block_ids": _Blocks,
    "token_ids": _Ids,
}
