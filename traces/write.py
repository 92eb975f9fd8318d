"""Writes traces: parquet holds everything and comes back equal.

A file appears whole or not at all: it is written beside its place and then renamed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pagecast.sim.core.errors import BadInput
from pagecast.traces.readers.parquet import IDS_COLUMN, METADATA_KEY, SPAN_COLUMNS
from pagecast.traces.schema import Trace


def write_parquet(trace: Trace, path: str | Path) -> None:
    """Writes the requests with their prompts as lists of spans or token ids; `read` gives them back."""
    data = pa.Table.from_pandas(trace.requests, preserve_index=False)
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
    told = json.dumps({"name": trace.name, "notes": list(trace.notes)})
    data = data.replace_schema_metadata({METADATA_KEY: told.encode()})
    with replacing(path) as place:
        pq.write_table(data, place, compression="zstd")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A place to write to, renamed to `path` at the end, or removed if that is not reached.

    Raises BadInput where the folder is missing or can't be written.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise BadInput(f"{path}: can't be written ({error.strerror}); choose another place") from None
    os.close(handle)
    place = Path(name)
    try:
        yield place
        os.chmod(place, 0o666 & ~_umask())
        os.replace(place, path)
    except OSError as error:
        raise BadInput(f"{path}: can't be written ({error.strerror or error})") from None
    finally:
        place.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
