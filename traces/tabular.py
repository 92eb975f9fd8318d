"""Columns of text, of a CSV file read with pyarrow or of other tables; errors name the first bad line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pagecast.traces.arrays import Flags, Floats, Ints
from pagecast.traces.building import NO_REQUESTS, apart, finish, trace_name
from pagecast.traces.schema import Trace, table
from pagecast.traces.source import HEAD_BYTES, MIB, Source
from pyarrow import csv

_DELIMITERS = (",", ";", "\t", "|")  # of those that are equally frequent the first
# Well within what nanoseconds in 64 bits can hold.
_FIRST, _LAST = pd.Timestamp("1700-01-01", tz="UTC"), pd.Timestamp("2200-12-31", tz="UTC")
_BLOCK_BYTES = 16 * MIB  # also the longest line


@dataclass(frozen=True, slots=True)
class TextTable:
    """Text columns of a file, by name; getters convert and check a whole column at once.

    `rows` are the places of its rows in the file (0 follows the header), None for all of them. `header_lines`
    stand above the rows; None: the file has rows, not lines.
    """

    source: Source
    columns: dict[str, pa.ChunkedArray]
    rows: Ints | None = None
    header_lines: int | None = 1

    def fail(self, row: int, field: str, problem: str) -> Exception:
        """The error for one value."""
        if self.header_lines is None:
            return self.source.fail(f"row {self._place(row)}: {problem}", field=field)
        return self.source.fail(problem, self.line(row), field)

    def _place(self, row: int) -> int:
        return row if self.rows is None else int(self.rows[row])

    def line(self, row: int) -> int:
        """The line of a row: found by going through the file again, for blank lines hold no row."""
        row_number = (self.header_lines or 0) + self._place(row)
        for number, line in self.source.lines():
            if line.strip():
                if not row_number:
                    return number
                row_number -= 1
        return 0

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def texts(self, field: str) -> list[str]:
        """A column as it stands."""
        return list(self.columns[field].to_pylist())

    def optional_texts(self, field: str) -> list[str | None]:
        """A column of texts, None where the field is empty."""
        return [text or None for text in self.columns[field].to_pylist()]

    def numbers(self, field: str, default: float | None = None, least: float | None = None) -> Floats:
        """Finite numbers; an empty field is `default`. Raises BadInput for anything else, or none given."""
        column = pc.utf8_trim_whitespace(self.columns[field])
        empty = np.asarray(pc.equal(column, "").to_numpy(), dtype=bool)
        if empty.any() and default is None:
            raise self.fail(int(np.flatnonzero(empty)[0]), field, "empty; every row needs it")
        column = pc.if_else(pc.equal(column, ""), "0", column)
        values = self._cast(field, column)
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise self.fail(int(bad[0]), field, f"{values[bad[0]]} is not finite; correct or remove the row")
        if least is not None and len(bad := np.flatnonzero(values < least)):
            raise self.fail(
                int(bad[0]), field, f"{values[bad[0]]:g} is less than {least:g}; correct or remove the row"
            )
        if empty.any():
            values[empty] = default
        return values

    def whole(self, field: str, least: int = 1, default: int | None = None) -> Ints:
        """Whole numbers of at least `least`; an empty field is `default`."""
        self._check_thousands(field)
        values = self.numbers(field, default, None)
        bad = np.flatnonzero((values != np.floor(values)) | (np.abs(values) >= 2.0**53))
        if len(bad):
            raise self.fail(int(bad[0]), field, f"{values[bad[0]]:g} is no whole number; correct the row")
        low = values < least
        if default is not None:
            low &= values != default
        if low.any():
            row = int(np.flatnonzero(low)[0])
            raise self.fail(row, field, f"{values[row]:g} is less than {least}; correct or remove the row")
        return values.astype(np.int64)

    def dates(self, field: str) -> Floats:
        """Dates and times, with or without a zone (UTC), as seconds from the first. Errors: BadInput."""
        texts = self.texts(field)
        times = pd.to_datetime(pd.Series(texts), format="ISO8601", errors="coerce", utc=True)
        # pandas takes "now" and "today" too: the answer would depend on the clock.
        undated = ~pd.Series(texts).str.match(r"\s*\d").to_numpy(bool)
        bad = np.flatnonzero((times.isna() | (times < _FIRST) | (times > _LAST)).to_numpy() | undated)
        if len(bad):
            problem = f"{texts[bad[0]][:40]!r} is no date and time from {_FIRST.year} to {_LAST.year}"
            raise self.fail(int(bad[0]), field, problem)
        ticks = times.astype("datetime64[ns, UTC]").astype("int64").to_numpy()
        return np.asarray((ticks - ticks.min()) / 1e9, dtype=np.float64)

    def _check_thousands(self, field: str) -> None:
        """Where fields are not separated by commas, "1.000" is a thousand to some. Errors: BadInput."""
        if self.header_lines != 1 or header(self.source.head)[1] == ",":
            return
        column = pc.utf8_trim_whitespace(self.columns[field])
        grouped = pc.match_substring_regex(column, r"^[0-9]{1,3}(\.[0-9]{3})+$")
        rows = np.flatnonzero(np.asarray(grouped.to_numpy(), dtype=bool))
        if len(rows):
            row = int(rows[0])
            text = column[row].as_py()
            raise self.fail(row, field, f"{text[:40]!r} may be a thousand or one; write it without the point")

    def _cast(self, field: str, column: pa.ChunkedArray) -> Floats:
        try:
            return np.array(pc.cast(column, pa.float64()).to_numpy(), dtype=np.float64)
        except pa.ArrowInvalid:
            for row, text in enumerate(column.to_pylist()):
                try:
                    pc.cast(pa.scalar(text), pa.float64())
                except pa.ArrowInvalid:
                    remedy = (
                        "write it without commas, decimals with a point"
                        if "," in text
                        else "correct or remove the row"
                    )
                    problem = f"{text[:40]!r} is no number; {remedy}"
                    raise self.fail(row, field, problem) from None
            raise

    def finish(
        self,
        columns: dict[str, Any],
        *,
        sort: bool = False,
        time_field: str = "arrival_s",
        notes: Sequence[str] = (),
    ) -> Trace:
        """The trace of these columns. Raises BadInput where it breaks the schema's rules."""
        own, measured = apart(columns)
        trace = Trace(trace_name(self.source), table(own), notes=tuple(notes), measured=measured)
        line = None if self.header_lines is None else self.line
        return finish(self.source, trace, line, sort=sort, time_field=time_field)

    def served(self, columns: dict[str, Any], *, sort: bool, time_field: str) -> Trace:
        """The trace without the requests that generated nothing (failed ones); a note counts them."""
        keep = np.asarray(columns["output_tokens"]) > 0
        if keep.all():
            return self.finish(columns, sort=sort, time_field=time_field)
        if not keep.any():
            raise self.source.fail(f"all of its {len(keep):,} requests generated nothing; {NO_REQUESTS}")
        columns_left = {name: np.asarray(column)[keep] for name, column in columns.items()}
        note = f"left out, for they generated nothing: {int((~keep).sum()):,} of {len(keep):,} requests"
        return self.only(keep).finish(columns_left, sort=sort, time_field=time_field, notes=[note])

    def only(self, keep: Flags) -> TextTable:
        """The rows that `keep` names."""
        rows = np.flatnonzero(keep)
        places = rows if self.rows is None else self.rows[rows]
        return replace(
            self, columns={name: column.take(rows) for name, column in self.columns.items()}, rows=places
        )


def header(head: bytes) -> tuple[list[str], str]:
    """The column names in a file's first line, and what separates them."""
    line = head.split(b"\n", 1)[0].decode("utf-8-sig", errors="replace").strip()
    delimiter = max(_DELIMITERS, key=line.count)
    return [name.strip().strip('"') for name in line.split(delimiter)], delimiter


def check_names(source: Source, names: Sequence[str]) -> None:
    """Errors: BadInput for a name that stands twice."""
    if len(set(names)) != len(names):
        raise source.fail("a column name stands twice in the header; rename one", 1)


def read_table(
    source: Source, required: Sequence[str], limit: int | None = None, optional: Iterable[str] = ()
) -> TextTable:
    """Reads the named columns as text, at most `limit` rows.

    Raises BadInput for a missing column, a row with more or fewer fields than the header, text that is
    not UTF-8, and no rows at all.
    """
    if b"\n" not in source.head and len(source.head) >= HEAD_BYTES:
        raise source.fail(
            f"the first line is longer than {HEAD_BYTES // MIB} MiB; a header names few columns", 1
        )
    names, delimiter = header(source.head)
    for name in required:
        if name not in names:
            raise source.fail(f"column {name} is missing; the header has {', '.join(names)[:200]}", 1)
    check_names(source, names)
    names_read = [*required, *(name for name in optional if name in names)]
    options = csv.ConvertOptions(
        include_columns=names_read,
        column_types={name: pa.string() for name in names_read},
        strings_can_be_null=False,
    )
    rows: list[pa.RecordBatch] = []
    count = 0
    try:
        with source.open() as stream:
            reader = csv.open_csv(
                stream,
                csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES, column_names=names, skip_rows=1),
                csv.ParseOptions(delimiter=delimiter),
                options,
            )
            for batch in reader:
                rows.append(batch)
                count += len(batch)
                if limit is not None and count >= limit:
                    break
    except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise _explain(source, names, delimiter, str(error)) from None
    table = pa.Table.from_batches(rows, pa.schema([(name, pa.string()) for name in names_read]))
    table = table if limit is None else table.slice(0, limit)
    if not len(table):
        raise source.fail(NO_REQUESTS)
    return TextTable(source, {name: table.column(name) for name in names_read})


def _explain(source: Source, names: list[str], delimiter: str, problem: str) -> Exception:
    """Turns pyarrow's message into a line number and a remedy."""
    if "straddling object" in problem:
        return source.fail(
            f"a line longer than {_BLOCK_BYTES // MIB} MiB; a trace has a request per line: write it so"
        )
    if "UTF8" in problem:
        for number, line in source.lines():
            try:
                line.decode()
            except UnicodeDecodeError:
                return source.fail("not UTF-8; convert the file to UTF-8", number)
    if "Expected" in problem:
        for number, line in source.lines():
            fields = len(next(iter(_fields(line, delimiter)), []))
            if line.strip() and fields != len(names):
                problem = f"{fields} fields where the header has {len(names)}; correct the row"
                return source.fail(problem, number)
    if "Empty CSV" in problem:
        return source.fail("no rows below the header; a trace needs at least one request")
    return source.fail(f"unreadable CSV ({problem.splitlines()[0][:120]}); correct the file")


def _fields(line: bytes, delimiter: str) -> Iterable[list[str]]:
    import csv as standard

    text = line.decode("utf-8-sig", errors="replace")
    try:
        return list(standard.reader([text], delimiter=delimiter))
    except standard.Error:  # such as a carriage return within the line
        return [text.split(delimiter)]
