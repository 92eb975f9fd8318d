"""Reads any trace file this package knows, told apart by its content, never its name."""

from __future__ import annotations

import re
from pathlib import Path

from pagecast.sim.core.errors import BadInput
from pagecast.traces.bundled import resolve
from pagecast.traces.readers import azure, mooncake, own, parquet
from pagecast.traces.schema import Trace
from pagecast.traces.source import MAX_BYTES, open_source
from pagecast.traces.tabular import header

FORMATS = "Mooncake, Azure or our own parquet"


def read(
    path: str | Path,
    *,
    limit: int | None = None,
    sort: bool = False,
    block_tokens: int | None = None,
    max_bytes: int = MAX_BYTES,
) -> Trace:
    """Reads a trace; .gz and .zst are unpacked on the way.

    Args:
        path: the file, the folder of a recorded run, or the name of a bundled sample.
        limit: read at most this many requests.
        sort: put requests out of order in order of arrival, instead of refusing them.
        block_tokens: tokens that a hash id names, where it is not the format's usual number.
        max_bytes: refuse files larger than this when decompressed.

    Raises:
        BadInput: the file is missing, of no known format, or wrong somewhere; names file, line, field.
    """
    if limit is not None and limit < 1:
        raise BadInput(f"limit {limit}: read at least one request")
    path = resolve(path)
    if path.is_dir():
        path /= "inputs.jsonl.gz"
    source = open_source(path, max_bytes)
    if source.head.startswith(b"PAR1"):
        return parquet.read(source, limit=limit, sort=sort)
    keys = json_keys(source.head)
    if {"input_tokens", "output_tokens"} <= keys:
        return own.read(source, limit=limit, sort=sort)
    if {"timestamp", "input_length"} <= keys:
        return mooncake.read(source, limit=limit, sort=sort, block_tokens=block_tokens)
    if not keys and set(azure.COLUMNS) & set(header(source.head)[0]):
        return azure.read(source, limit=limit, sort=sort)
    raise source.fail(f"of no known format; pagecast reads {FORMATS}")


def json_keys(head: bytes) -> set[str]:
    """The keys in the first JSON object of a file; empty where it does not begin with one."""
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if not text.startswith(("{", "[")):
        return set()
    line = text.split("\n", 1)[0]
    return set(re.findall(r'"([^"\\]{1,64})"\s*:', line if len(line) > 2 else text))
