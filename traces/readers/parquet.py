"""Reader of parquet: files that `write` made, prompts included, or any table with the schema's columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pagecast.traces.arrays import Ints
from pagecast.traces.building import NO_REQUESTS, finish, trace_name
from pagecast.traces.head import Head
from pagecast.traces.readers.columns import of_rows
from pagecast.traces.readers.own import FORMS
from pagecast.traces.schema import (
    COLUMNS,
    CONCURRENCY,
    INTEGERS,
    RECIPE,
    REQUIRED,
    Spans,
    Trace,
    dtype,
    kept_concurrency,
    kept_recipe,
    starts,
    table,
)
from pagecast.traces.source import Source

SPAN_COLUMNS = ("span_content", "span_offset", "span_length")
IDS_COLUMN = "token_ids"
METADATA_KEY = b"pagecast"
MAGIC = b"PAR1"


def recognise(head: Head) -> int:
    """1 for a file of parquet."""
    return int(head.data.startswith(MAGIC))


def read(
    source: Source,
    *,
    limit: int | None = None,
    sort: bool = False,
    columns: Sequence[str] | None = None,
) -> Trace:
    """Reads the file. Raises BadInput for a missing column, a wrong type or an empty value.

    A table without the schema's columns, or with `columns`, is read as `readers.columns` reads others.
    """
    data, ignored = _load(source, limit, other=bool(columns))
    if columns or any(name not in data.column_names for name in REQUIRED):
        return of_rows(source, data.column_names, data.to_pylist(), columns, None)
    return _own(source, data, ignored, limit, sort)


def _own(source: Source, data: pa.Table, ignored: list[str], limit: int | None, sort: bool) -> Trace:
    """The trace of a table with the schema's columns."""
    columns = {name: _column(source, data, name) for name in COLUMNS if name in data.column_names}
    if not len(data):
        raise source.fail(NO_REQUESTS)
    metadata = _metadata(data)
    entries = metadata.get("notes")
    notes = [str(note) for note in entries] if isinstance(entries, list) else []
    if ignored:
        notes.append(f"columns that are not part of the schema are ignored: {', '.join(ignored)}")
    name = str(metadata.get("name") or trace_name(source))
    recipe = kept_recipe(metadata.get(RECIPE), limit, len(data))
    trace = Trace(name, table(columns), _spans(source, data), _ids(source, data), tuple(notes), recipe)
    trace = replace(trace, concurrency=kept_concurrency(metadata.get(CONCURRENCY)))
    return finish(source, trace, None, sort=sort)


def _metadata(data: pa.Table) -> dict[str, Any]:
    """Name, notes and recipe that `write` put in; none in other tables."""
    try:
        metadata = json.loads((data.schema.metadata or {}).get(METADATA_KEY, b"{}"))
    except ValueError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _load(source: Source, limit: int | None, other: bool) -> tuple[pa.Table, list[str]]:
    """The schema's columns, or all where `other` ones are meant or needed ones are missing; those ignored."""
    with source.path.open("rb") as raw:
        if raw.read(4) != MAGIC:
            raise source.fail("packed parquet; unpack it first (parquet is compressed inside)")
    schema_columns = {*COLUMNS, *SPAN_COLUMNS, IDS_COLUMN}
    try:
        with pq.ParquetFile(source.path) as file:
            metadata = file.metadata
            size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            if size > source.max_bytes:
                raise source.fail(
                    f"{size:,} bytes when unpacked, more than {source.max_bytes:,}; "
                    "raise the limit (pagecast trace convert --max-bytes) if it is no mistake"
                )
            names = file.schema_arrow.names
            if len(set(names)) != len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise source.fail("the column stands twice; rename one", field=twice)
            for name in FORMS:
                if name in names and name != IDS_COLUMN:
                    raise source.fail(
                        f"parquet has prompts as {', '.join(SPAN_COLUMNS)}; write them so, or as JSON lines",
                        field=name,
                    )
            other |= any(name not in names for name in REQUIRED)
            data = file.read(columns=[name for name in names if other or name in schema_columns])
    except pa.ArrowMemoryError:
        raise MemoryError from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = str(error).splitlines()[0][:120]
        raise source.fail(f"unreadable parquet ({problem}); write it again") from None
    ignored = [name for name in names if name not in schema_columns]
    return (data if limit is None else data.slice(0, limit)), ignored


def _column(source: Source, data: pa.Table, name: str) -> Any:
    column = data.column(name)
    kind = {"int64": pa.int64(), "float64": pa.float64(), "string": pa.string()}[dtype(name)]
    if column.null_count and name in INTEGERS:
        row = int(np.flatnonzero(np.asarray(column.is_null()))[0])
        raise source.fail(f"row {row} is empty; every row needs it", field=name)
    if pa.types.is_boolean(column.type):
        raise source.fail(f"holds booleans; it needs {dtype(name)}", field=name)
    try:
        column = column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        problem = f"can't be read as {dtype(name)} ({str(error)[:80]}); convert it"
        raise source.fail(problem, field=name) from None
    return column.to_pandas() if dtype(name) != "string" else column.to_pylist()


def _flat(source: Source, data: pa.Table, name: str) -> tuple[Ints, Ints]:
    """Row boundaries and values of a column of lists of whole numbers. Errors: BadInput for anything else."""
    column = data.column(name)
    inner = getattr(column.type, "value_type", None)
    if inner is None or pa.types.is_boolean(inner):
        raise source.fail("must be lists of whole numbers", field=name)
    try:
        lists = column.cast(pa.large_list(pa.int64())).combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        problem = str(error).splitlines()[0][:80]
        raise source.fail(f"must be lists of whole numbers below 2**63 ({problem})", field=name) from None
    if isinstance(lists, pa.ChunkedArray):
        lists = pa.concat_arrays(lists.chunks) if lists.num_chunks else pa.array([], column.type)
    values = lists.flatten()
    if values.null_count:
        at = int(np.flatnonzero(np.asarray(values.is_null()))[0])
        row = int(np.searchsorted(np.cumsum(np.asarray(lists.value_lengths().fill_null(0))), at, "right"))
        raise source.fail(f"row {row} has an empty place in its list; correct the row", field=name)
    return starts(np.asarray(lists.value_lengths().fill_null(0), dtype=np.int64)), np.array(
        values.to_numpy(zero_copy_only=False), dtype=np.int64
    )


def _spans(source: Source, data: pa.Table) -> Spans | None:
    if SPAN_COLUMNS[0] not in data.column_names:
        return None
    parts = {}
    for name in SPAN_COLUMNS:
        if name not in data.column_names:
            raise source.fail(f"column {name} is missing beside {SPAN_COLUMNS[0]}; write the file again")
        parts[name] = _flat(source, data, name)
    start, content = parts["span_content"]
    for name in SPAN_COLUMNS[1:]:
        if not np.array_equal(parts[name][0], start):
            raise source.fail(f"its lists differ in length from those of {SPAN_COLUMNS[0]}", field=name)
    return Spans(start, content, parts["span_offset"][1], parts["span_length"][1])


def _ids(source: Source, data: pa.Table) -> list[Ints] | None:
    if IDS_COLUMN not in data.column_names:
        return None
    start, values = _flat(source, data, IDS_COLUMN)
    if len(values) and values.min() < 0:
        raise source.fail(f"{values.min()} is no token id; ids are 0 or more", field=IDS_COLUMN)
    return np.split(values, start[1:-1])
