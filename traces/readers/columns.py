"""Any table of requests: CSV, JSON lines, a JSON array, or parquet, whose columns go by other names.

What each column of the trace is taken from is given (`arrival=timestamp`, with a unit `arrival=ts:ms`) or
found by the names that gateways and providers use; a note says which. Times are dates, with zones or
without (UTC), or numbers since 1970 in s, ms, us or ns, told by their size. Rows that failed, by a status or
for want of an output token, are left out and counted. Fields within objects are `outer.inner`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from pagecast.sim.core.errors import BadInput
from pagecast.traces.arrays import Flags, Floats
from pagecast.traces.building import NO_REQUESTS, none_left
from pagecast.traces.head import Head
from pagecast.traces.records import Record, by_line, items
from pagecast.traces.schema import Trace
from pagecast.traces.source import Source
from pagecast.traces.tabular import TextTable, check_names, read_table

# Names in order of preference, without case and separators. The last part of a dotted name counts.
NAMES: dict[str, tuple[str, ...]] = {
    "arrival": (
        *("arrivals", "arrivaltime", "arrival", "requeststarttime", "starttime", "timestamp"),
        *("attimestamp", "createdat", "created", "requesttime", "requestcreatedat", "receivedat"),
        *("start", "datetime", "time", "ts", "date"),
    ),
    "input": (
        *("inputtokens", "prompttokens", "numprompttokens", "prompttokencount", "inputtokencount"),
        *("contexttokens", "tokensprompt", "tokensin", "inputlength", "promptlength", "promptlen"),
        *("inputlen", "requesttokens"),
    ),
    "output": (
        *("outputtokens", "completiontokens", "generationtokens", "generatedtokens"),
        *("responsetokens", "candidatestokencount", "outputtokencount", "completiontokencount"),
        *("numgenerationtokens", "numgeneratedtokens", "tokenscompletion", "tokensout"),
        *("outputlength", "completionlength", "outputlen", "responselength"),
    ),
    "session": ("session", "sessionid", "conversationid", "chatid", "threadid"),
    "end": ("endtime", "requestendtime", "completedat", "finishedat", "end"),
    "first_token": ("completionstarttime", "firsttokentime", "firsttokenat"),
    "ttft": ("ttfts", "ttftms", "timetofirsttokens", "timetofirsttokenms", "timetofirsttokenseconds"),
    "e2e": (
        *("e2es", "e2ems", "latencys", "latencyms", "durationms", "durations", "e2elatencys"),
        *("e2elatencyms",),
    ),
    "status": (
        *("status", "statuscode", "httpstatus", "responsestatus", "error", "errorcode", "success"),
        *("exception",),
    ),
}
_NEEDED = ("arrival", "input", "output")
_TEXTS = ("session", "tenant", "model", "adapter", "salt")
TARGETS = (*NAMES, *_TEXTS[1:], "priority")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_UNIT_OF_NAME = re.compile(r"(?:_|\b|(?<=[a-z]))(ms|us|ns|s|millis|micros|nanos|seconds)$", re.IGNORECASE)
_WORDS = {"millis": "ms", "micros": "us", "nanos": "ns", "seconds": "s"}
# Numbers since 1970, as those of 1973 and later are: the least in each unit.
_EPOCHS = (("ns", 1e17), ("us", 1e14), ("ms", 1e11), ("s", 1e8))
_FAILED = re.compile(r"(?i)err|fail|cancel|abort|timeout|reject|false")
_FINE = ("", "0", "none", "null", "nan", "false")
_MOST_DEPTH = 3


@dataclass(frozen=True)
class _Column:
    """A column of the file for a column of the trace; `given` by the user, with or without a unit."""

    name: str
    given: bool = False
    unit: str | None = None


def recognise(head: Head) -> int:
    """1 where two of arrivals, prompt and output lengths are found by the names of columns, or of keys."""
    found = guess(head.columns if head.keys is None else sorted(head.keys))
    return int(sum(need in found for need in _NEEDED) >= 2)


def guess(names: Sequence[str]) -> dict[str, _Column]:
    """The columns by what they are usually called."""
    by_name: dict[str, str] = {}
    for name in names:
        by_name.setdefault(re.sub(r"[^a-z0-9]", "", name.rsplit(".", 1)[-1].lower()), name)
    found = {}
    for target, usual in NAMES.items():
        taken = next((by_name[one] for one in usual if one in by_name), None)
        if taken is not None:
            found[target] = _Column(taken)
    return found


def read(
    source: Source,
    *,
    limit: int | None = None,
    sort: bool = False,
    columns: Sequence[str] | None = None,
) -> Trace:
    """Reads a file of CSV or JSON; `columns` are mappings `arrival=timestamp`. Errors: BadInput."""
    head = Head(source.head)
    if head.keys is None:
        check_names(source, head.columns)
        found = _mapped(source, head.columns, columns)
        table = read_table(source, list(dict.fromkeys(one.name for one in found.values())), limit)
        return _trace(table, found, head.columns)
    rows = [dict(_flat(record)) for record in _rows(items(source, limit), limit)]
    if not rows:
        raise source.fail(NO_REQUESTS)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return of_rows(source, names, rows, columns, 0 if by_line(source) else None)


def _rows(found: Iterator[Record], limit: int | None) -> Iterator[Record]:
    """The records; where there is one, with one list of objects, as APIs answer, those of the list."""
    first = next(found, None)
    if first is None:
        return
    lists = [value for value in first.values.values() if isinstance(value, list)]
    if len(lists) == 1 and lists[0] and all(isinstance(row, dict) for row in lists[0]):
        second = next(found, None)
        if second is None:
            yield from (Record(first.source, at, row) for at, row in enumerate(lists[0][:limit], 1))
            return
        found = chain((second,), found)
    yield first
    yield from found


def of_rows(
    source: Source,
    names: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str] | None,
    header_lines: int | None,
) -> Trace:
    """The trace of rows of values; `header_lines` as in `TextTable`."""
    found = _mapped(source, names, columns)
    used = dict.fromkeys(one.name for one in found.values())
    texts = {name: pa.chunked_array([[_text(row.get(name)) for row in rows]], pa.string()) for name in used}
    return _trace(TextTable(source, texts, None, header_lines), found, names)


def _flat(record: Record, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, value in record.values.items():
        if isinstance(value, dict) and depth < _MOST_DEPTH:
            yield from _flat(record.part(name), f"{prefix}{name}.", depth + 1)
        else:
            yield prefix + name, value


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _mapped(source: Source, names: Sequence[str], columns: Sequence[str] | None) -> dict[str, _Column]:
    """What each column of the trace is taken from. Errors: BadInput for one that is needed and not found."""
    found = guess(names)
    for spec in columns or ():
        target, equals, name = spec.partition("=")
        name, unit = _apart(name, names)
        if not equals or target not in TARGETS:
            raise BadInput(f"--column {spec!r}: write TRACE=COLUMN, where TRACE is {', '.join(TARGETS)}")
        if name not in names:
            raise source.fail(f"--column {spec}: there is no column {name}; it has {', '.join(names)[:200]}")
        found[target] = _Column(name, True, unit)
    for need in _NEEDED:
        if need not in found:
            listed = ", ".join(names)
            listed = f"{listed[:197]}..." if len(listed) > 200 else listed
            raise source.fail(
                f"no column is known to hold {need} {'times' if need == 'arrival' else 'tokens'}; say which: "
                f"--column {need}=NAME. It has {listed}"
            )
    return found


def _apart(name: str, names: Sequence[str]) -> tuple[str, str | None]:
    """A column's name and its unit, where one is written behind it."""
    base, colon, unit = name.rpartition(":")
    return (base, unit) if colon and name not in names and unit in _UNITS else (name, None)


def _trace(table: TextTable, found: dict[str, _Column], names: Sequence[str]) -> Trace:
    said = {target: column.name for target, column in found.items()}
    total = len(table)
    empty = np.array([not text.strip() for text in table.texts(said["arrival"])])
    failed = _failures(table, found)
    outputs = table.whole(said["output"], least=0, default=0)
    failed |= (outputs == 0) | empty
    if failed.all():
        raise none_left(table.source, total)
    table = table.only(~failed)
    arrival, how = _times(table, found["arrival"])
    columns: dict[str, Any] = {
        "arrival_s": arrival - arrival.min(),
        "input_tokens": table.whole(said["input"]),
        "output_tokens": outputs[~failed],
        **{name: table.optional_texts(said[name]) for name in _TEXTS if name in said},
        **_latencies(table, found),
    }
    if "priority" in said:
        columns["priority"] = table.whole(said["priority"], -(1 << 31), 0)
    taken = ", ".join(
        f"{target} from {column.name}{how if target == 'arrival' else ''}" for target, column in found.items()
    )
    guessed = "" if all(column.given for column in found.values()) else " (--column says otherwise)"
    notes = [f"columns: {taken}{guessed}"]
    if unused := [name for name in names if name not in said.values()]:
        listed = ", ".join(unused[:8]) + (", ..." if len(unused) > 8 else "")
        notes.append(f"columns that are not used: {listed}")
    if failed.any():
        notes.append(
            f"left out, for they failed or generated nothing: {int(failed.sum()):,} of {total:,} requests"
        )
    disorder = int((np.diff(arrival) < 0).sum())
    if disorder:
        notes.append(f"put in order of arrival: {disorder:,} rows stood after a later one")
    return table.finish(columns, sort=True, time_field=said["arrival"], notes=notes)


def _failures(table: TextTable, found: dict[str, _Column]) -> Flags:
    """Rows whose status is an error: a code of 400 or more, a word for it, or an error that is not empty."""
    if "status" not in found:
        return np.zeros(len(table), dtype=bool)
    name = found["status"].name
    of_error = any(word in name.lower() for word in ("error", "exception"))

    def failed(text: str) -> bool:
        text = text.strip()
        if of_error:
            return text.lower() not in _FINE
        return int(text) >= 400 if text.isdecimal() else bool(_FAILED.search(text))

    return np.array([failed(text) for text in table.texts(name)])


def _times(table: TextTable, column: _Column) -> tuple[Floats, str]:
    """Times in seconds, and in words what they were taken for."""
    texts = [text.strip() for text in table.texts(column.name)]
    if column.unit is None and re.match(r"\d{4}-\d", texts[0]):
        return table.dates(column.name), " (dates)"
    try:  # whole numbers, for nanoseconds since 1970 don't fit a float
        ticks = np.array([int(text) for text in texts], dtype=np.int64)
        least = int(ticks.min())
        values = (ticks - least).astype(np.float64)
    except (ValueError, OverflowError):
        _check_dates(table, column.name, texts[0])
        values = table.numbers(column.name)
        least = 0
    unit, why = _unit(column, float(np.median(values)) + least)
    return values * _UNITS[unit], f" ({unit}{why})"


def _check_dates(table: TextTable, field: str, text: str) -> None:
    """Errors: BadInput for a date that is written in another way than those that are read."""
    if re.search(r"[/ :].*:\d", text):
        raise table.fail(0, field, f"{text[:40]!r} is no date as 2026-11-01T10:00:00Z; write dates so")


def _unit(column: _Column, middle: float) -> tuple[str, str]:
    if column.unit is not None:
        return column.unit, ""
    for unit, least in _EPOCHS:
        if middle >= least:
            return unit, " since 1970"
    named = _UNIT_OF_NAME.search(column.name)
    if named is not None:
        word = named[1].lower()
        return _WORDS.get(word, word), ""
    return "s", f", for want of a unit: --column arrival={column.name}:ms says another"


def _latencies(table: TextTable, found: dict[str, _Column]) -> dict[str, Floats]:
    """TTFT and E2E in seconds: columns of their own, or times beside the arrivals'."""
    latencies: dict[str, Floats] = {}
    for target, at, into in (("ttft", "first_token", "ttft_s"), ("e2e", "end", "e2e_s")):
        if target in found:
            column = found[target]
            unit = column.unit or _unit_of(column.name)
            latencies[into] = table.numbers(column.name, float("nan")) * _UNITS[unit]
        elif at in found and found["arrival"].name != found[at].name:
            latencies[into] = _after_arrival(table, found["arrival"], found[at])
    return latencies


def _unit_of(name: str) -> str:
    named = _UNIT_OF_NAME.search(name)
    return "s" if named is None else _WORDS.get(named[1].lower(), named[1].lower())


def _after_arrival(table: TextTable, arrival: _Column, at: _Column) -> Floats:
    """Seconds from the arrival to another time of the row; NaN where that is not given."""
    given = np.array([bool(text.strip()) for text in table.texts(at.name)])
    seconds = np.full(len(table), np.nan)
    if given.any():
        rows = table.only(given)
        both = pa.chunked_array([[*rows.texts(arrival.name), *rows.texts(at.name)]], pa.string())
        times, _ = _times(TextTable(table.source, {at.name: both}, None, None), at)
        seconds[given] = times[len(rows) :] - times[: len(rows)]
    return seconds
