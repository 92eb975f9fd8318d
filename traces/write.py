"""Writing of traces: parquet and our JSON lines keep everything, other formats what they can hold.

A file appears whole or not at all: it is written beside its place and then renamed.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from pagecast.sim.core.errors import BadInput
from pagecast.traces.export import csv_lines, mooncake_lines
from pagecast.traces.readers.parquet import IDS_COLUMN, METADATA_KEY, SPAN_COLUMNS
from pagecast.traces.schema import COLUMNS, CONCURRENCY, DEFAULTS, RECIPE, REQUIRED, TEXTS, Trace

FORMS = ("parquet", "jsonl", "mooncake", "csv")


def write(trace: Trace, path: str | Path, form: str | None = None, *, lossy: bool = False) -> None:
    """Writes a trace in the form its file name asks for: .parquet, .jsonl or .csv (these with .gz or .zst).

    `form` names one instead; `mooncake` is only to be had so. Raises BadInput for an unknown form, and
    where the form can't hold all of the trace, saying what would be lost; with `lossy` it is dropped.
    """
    form = form or _form_of(path)
    if form not in FORMS:
        raise BadInput(f"form {form!r}: unknown; choose {', '.join(FORMS)}")
    if form == "parquet":
        write_parquet(trace, path)
    elif form == "jsonl":
        write_jsonl(trace, path)
    else:
        lines, losses = (mooncake_lines if form == "mooncake" else csv_lines)(trace)
        if trace.concurrency is not None:
            losses.append("how many requests its clients send at a time")
        if losses and not lossy:
            raise BadInput(
                f"{path}: {form} can't hold {'; '.join(losses)}; write parquet or jsonl, or drop it (--lossy)"
            )
        _write_lines(lines, path)


def _form_of(path: str | Path) -> str:
    name = str(path).removesuffix(".gz").removesuffix(".zst")
    for form in ("parquet", "jsonl", "csv"):
        if name.endswith(f".{form}"):
            return form
    raise BadInput(f"{path}: no form is known by this ending; end it in .parquet, .jsonl(.gz, .zst) or .csv")


def write_parquet(trace: Trace, path: str | Path) -> None:
    """Writes the requests with their prompts as lists of spans or token ids; `read` gives them back."""
    data = pa.table({name: _arrow(trace, name) for name in COLUMNS if name in trace.requests})
    if trace.spans is not None:
        offsets = pa.array(trace.spans.start, pa.int64())
        arrays = (trace.spans.content, trace.spans.offset, trace.spans.length)
        for name, values in zip(SPAN_COLUMNS, arrays, strict=True):
            lists = pa.LargeListArray.from_arrays(offsets, pa.array(values, pa.int64()))
            data = data.append_column(name, lists)
    if trace.token_ids is not None:
        lengths = np.cumsum([0, *(len(ids) for ids in trace.token_ids)])
        flat = np.concatenate([*trace.token_ids, np.empty(0, dtype=np.int64)])
        ids = pa.LargeListArray.from_arrays(pa.array(lengths, pa.int64()), pa.array(flat, pa.int64()))
        data = data.append_column(IDS_COLUMN, ids)
    metadata: dict[str, Any] = {"name": trace.name, "notes": list(trace.notes)}
    if trace.recipe is not None:
        metadata[RECIPE] = dict(trace.recipe)
    if trace.concurrency is not None:
        metadata[CONCURRENCY] = asdict(trace.concurrency)
    data = data.replace_schema_metadata({METADATA_KEY: json.dumps(metadata).encode()})
    with replacing(path) as place:
        pq.write_table(data, place, compression="zstd")


def write_jsonl(trace: Trace, path: str | Path) -> None:
    """Writes our own JSON lines (`readers/own.py` describes them), packed if the name ends in .gz or .zst.

    They hold what parquet does, but for the trace's name and notes; a generated trace's recipe and
    the limit of clients stand in the first line. Times are written in full.
    """
    _write_lines(jsonl_lines(trace), path)


def _write_lines(lines: Iterable[bytes], path: str | Path) -> None:
    with replacing(path) as place, _packed(place, path) as out:
        for line in lines:
            out.write(line)


def jsonl_lines(trace: Trace) -> Iterator[bytes]:
    """The lines of our own JSON form, columns at their default left out."""
    names = [name for name in COLUMNS if name in trace.requests]
    columns = [trace.requests[name].astype(object).tolist() for name in names]
    for row, values in enumerate(zip(*columns, strict=True)):
        fields = {
            name: value
            for name, value in zip(names, values, strict=True)
            if value is not pd.NA and value == value and (name in REQUIRED or value != DEFAULTS[name])
        }
        if row == 0 and trace.recipe is not None:
            fields[RECIPE] = dict(trace.recipe)
        if row == 0 and trace.concurrency is not None:
            fields[CONCURRENCY] = asdict(trace.concurrency)
        if trace.spans is not None and (spans := trace.spans.row(row)):
            fields["spans"] = spans
        if trace.token_ids is not None:
            fields["token_ids"] = trace.token_ids[row].tolist()
        yield json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _arrow(trace: Trace, name: str) -> pa.Array:
    if name in TEXTS:
        return pa.array(trace.requests[name], pa.string(), from_pandas=True)
    # Missing times stay NaN, so that they come back as they were.
    return pa.array(trace.requests[name].to_numpy(), from_pandas=False)


@contextmanager
def _packed(place: Path, path: str | Path) -> Iterator[IO[bytes]]:
    """Opens `place` for writing, packed as the name `path` asks for."""
    if str(path).endswith(".gz"):
        # No time and no name inside: equal traces make equal files.
        with place.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
            yield cast(IO[bytes], packed)
    elif str(path).endswith(".zst"):
        with place.open("wb") as raw, zstandard.ZstdCompressor(10).stream_writer(raw) as packed:
            yield packed
    else:
        with place.open("wb") as raw:
            yield raw


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A place to write to, renamed to `path` at the end, or removed if that is not reached.

    What is no file (a device, a pipe) is written to and stays what it is. Raises BadInput where the folder is
    missing or can't be written, and where the disk is full.
    """
    path = Path(path)
    special = path.exists() and not path.is_file() and not path.is_dir()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=None if special else path.parent)
    except OSError as error:
        raise BadInput(f"{path}: can't be written ({error.strerror}); choose another place") from None
    os.close(handle)
    place = Path(name)
    try:
        yield place
        if special:
            with place.open("rb") as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
        else:
            _flush(place)
            os.chmod(place, 0o666 & ~_umask())
            os.replace(place, path)
    except OSError as error:
        raise BadInput(f"{path}: can't be written ({error.strerror or error})") from None
    finally:
        place.unlink(missing_ok=True)


def _flush(place: Path) -> None:
    """Brings a file to its disk, which may turn out to be full only now."""
    handle = os.open(place, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
