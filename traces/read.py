"""Reading of trace files in any known format, which is recognised by content, not by name.

A file's format is told by its content, never its name; samples are read by their names. Times are in seconds,
lengths in tokens. Whatever is wrong ends in `BadInput` that names file, line and field.

    >>> from pagecast.traces.read import read
    >>> trace = read("chat", limit=50)
    >>> trace.name, len(trace)
    ('chat', 50)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack

from pagecast.sim.core.errors import BadInput
from pagecast.traces.bundled import resolve
from pagecast.traces.parallel import expand
from pagecast.traces.readers import (
    agents,
    aiperf,
    azure,
    bailian,
    burstgpt,
    mooncake,
    own,
    parquet,
    plain,
    sharegpt,
    vllm_bench,
)
from pagecast.traces.schema import COLUMNS, REQUIRED, Trace
from pagecast.traces.source import MAX_BYTES, Source, open_source
from pagecast.traces.tabular import header

# What a format's first object or header holds. The one with most fields in a file wins, the first of equals.
JSON_FORMATS: dict[str, set[str]] = {
    "pagecast JSON lines": {"arrival_s", "input_tokens", "output_tokens", *own.FORMS},
    "Mooncake": {"timestamp", "input_length", "output_length", "hash_ids"},
    "agent sessions": {"session", "agent", "t", "input_length", "output_length", "hash_ids", "think_time"},
    "Bailian": {"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids"},
    "vLLM benchmark": {
        "input_lens",
        "output_lens",
        "start_times",
        "ttfts",
        "itls",
        "request_throughput",
        "total_token_throughput",
        "num_prompts",
        "total_input_tokens",
    },
    "AIPerf": {"metadata", "metrics", "request_start_ns", "input_sequence_length", "output_sequence_length"},
    "ShareGPT": {"conversations", "messages", "from", "value", "role", "content"},
}
CSV_FORMATS: dict[str, set[str]] = {
    "plain CSV": set(COLUMNS),
    "Azure": set(azure.COLUMNS),
    "BurstGPT": {*burstgpt.COLUMNS, *burstgpt.OPTIONAL},
}
_ALL = ", ".join([*JSON_FORMATS, *CSV_FORMATS, "parquet with the schema's columns"])
_TAR_MAGIC = slice(257, 262)


class ReadOptions(TypedDict, total=False):
    """The keywords of `read`, which says what they are."""

    tokenizer: Callable[[str], Sequence[int]] | str | Path | None
    session_rate: float | None
    think_s: float | None
    seed: int
    limit: int | None
    sort: bool
    block_tokens: int | None
    max_bytes: int


def read(
    path: str | Path,
    *,
    progress: Callable[[int], object] | None = None,
    **options: Unpack[ReadOptions],
) -> Trace:
    """Reads a trace; .gz and .zst are unpacked on the way.

    Args:
        path: the file, the folder of a recorded run or of `replay --out`, or the name of a bundled sample.
        progress: called now and then with the number of bytes read from the file.
        tokenizer: for texts (ShareGPT): a function from text to token ids, or a transformers folder.
        session_rate: sessions per second, where a format has no absolute times (agents 0.01, ShareGPT 1).
        think_s: seconds from an answer to the next turn, where a format has none (ShareGPT 10).
        seed: for what is drawn at random, the starts of such sessions.
        limit: read at most this many requests.
        sort: put requests out of order in order of arrival, instead of refusing them.
        block_tokens: tokens that a hash id names, where it is not the format's usual number.
        max_bytes: refuse files larger than this when decompressed (2 GiB).

    Raises:
        BadInput: the file is missing, of no known format, or wrong somewhere; names file, line, field.
        CannotRunHere: the tokenizer folder needs transformers, which is not installed.
    """
    if unknown := options.keys() - ReadOptions.__annotations__:
        raise TypeError(
            f"read() has no keyword {min(unknown)}; it has {', '.join(ReadOptions.__annotations__)}"
        )
    _check(options)
    path = resolve(path)
    if path.is_dir():
        path = _recorded(path)
    source = open_source(path, options.get("max_bytes", MAX_BYTES))
    kind = recognise(source)
    source = replace(source, format=kind, progress=progress)
    reader, takes = _READERS[kind]
    trace = expand(reader(source, **{name: value for name, value in options.items() if name in takes}))
    unused = [
        f"{name} was not used: {why}"
        for name, why in _UNUSED.items()
        if options.get(name) is not None and name not in takes
    ]
    return replace(trace, notes=(*trace.notes, *unused)) if unused else trace


# Options that not every format has a use for, and why: a trace of the others says so.
_UNUSED = {
    "session_rate": "the trace has arrival times (--speedup or pagecast trace convert --scale moves them)",
    "think_s": "the format has think times of its own, or no sessions",
    "tokenizer": "the file holds no texts",
    "block_tokens": "the file holds no hash ids, or says itself what they name",
}
_SORTED = ("limit", "sort")
_READERS: dict[str, tuple[Callable[..., Trace], tuple[str, ...]]] = {  # and the options that each takes
    "agent sessions": (agents.read, ("limit", "session_rate", "seed", "block_tokens")),
    "ShareGPT": (sharegpt.read, ("limit", "session_rate", "seed", "think_s", "tokenizer")),
    "Mooncake": (mooncake.read, (*_SORTED, "block_tokens")),
    "Bailian": (bailian.read, (*_SORTED, "block_tokens")),
    "parquet": (parquet.read, _SORTED),
    "pagecast JSON lines": (own.read, _SORTED),
    "vLLM benchmark": (vllm_bench.read, _SORTED),
    "AIPerf": (aiperf.read, _SORTED),
    "plain CSV": (plain.read, _SORTED),
    "Azure": (azure.read, _SORTED),
    "BurstGPT": (burstgpt.read, _SORTED),
}


def recognise(source: Source) -> str:
    """The format of a file by its first bytes. Raises BadInput, listing the formats, if it has none."""
    head = source.head
    if head.startswith(parquet.MAGIC):
        return "parquet"
    if head[_TAR_MAGIC] == b"ustar":
        raise source.fail(
            "an archive; if it holds ServeGen's clients, `pagecast trace generate --servegen` reads it"
        )
    keys = json_keys(head)
    if keys is None:
        names = set(header(head)[0])
        kind, fields = _best(CSV_FORMATS, names)
        if fields:
            return kind
    else:
        kind, fields = _best(JSON_FORMATS, keys)
        if fields >= 2:
            return kind
    seems = " (no text: there are zero bytes in it)" if b"\0" in head else ""
    columns = [] if keys is not None or seems else header(head)[0]
    raise source.fail(f"of no known format{seems}; pagecast reads {_ALL}{_other_columns(columns)}")


def _other_columns(names: list[str]) -> str:
    """Of what may be a table: which columns it has, and which it needs."""
    if len(names) < 2:
        return ""
    columns = ", ".join(names)
    columns = f"{columns[:97]}..." if len(columns) > 100 else columns
    return f". Its first line is {columns!r}; a plain CSV needs the columns {', '.join(REQUIRED)}"


def json_keys(head: bytes) -> set[str] | None:
    """The keys in the first line of a JSON file (in its head if that line has none); None for other files."""
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if not text.startswith(("{", "[")):
        return None
    first = set(re.findall(r'"([^"\\]{1,64})"\s*:', text.split("\n", 1)[0]))
    return first or set(re.findall(r'"([^"\\]{1,64})"\s*:', text))


def _best(formats: dict[str, set[str]], names: set[str]) -> tuple[str, int]:
    kind = max(formats, key=lambda name: len(formats[name] & names))
    return kind, len(formats[kind] & names)


def _recorded(folder: Path) -> Path:
    for name in ("inputs.jsonl.gz", "trace.parquet"):  # as `record` and `replay --out` write them
        if (folder / name).is_file():
            return folder / name
    raise BadInput(
        f"{folder}: a folder without inputs.jsonl.gz or trace.parquet; give a trace file, a recorded run or "
        "a folder of replay --out"
    )


def _check(options: ReadOptions) -> None:
    limit, block_tokens = options.get("limit"), options.get("block_tokens")
    session_rate, think_s = options.get("session_rate"), options.get("think_s")
    if limit is not None and limit < 1:
        raise BadInput(f"limit {limit}: must be at least 1 request")
    if block_tokens is not None and block_tokens < 1:
        raise BadInput(f"block_tokens {block_tokens}: a hash id names at least one token")
    if session_rate is not None and not 0 < session_rate < float("inf"):
        raise BadInput(f"session_rate {session_rate:g}: give a positive number of sessions per second")
    if think_s is not None and not 0 <= think_s < float("inf"):
        raise BadInput(f"think_s {think_s:g}: give seconds, 0 or more")
