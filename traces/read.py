"""Reading of trace files in any known format, which is recognised by content, not by name.

A file's format is told by its content, never its name; samples are read by their names. Times are in seconds,
lengths in tokens. Whatever is wrong ends in `BadInput` that names file, line and field.

    >>> from pagecast.traces.read import read
    >>> trace = read("chat", limit=50)
    >>> trace.name, len(trace)
    ('chat', 50)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

from pagecast.sim.core.errors import BadInput
from pagecast.traces.bundled import resolve
from pagecast.traces.head import Head, Recogniser
from pagecast.traces.parallel import expand
from pagecast.traces.readers import (
    agents,
    aiperf,
    azure,
    bailian,
    bench,
    burstgpt,
    columns,
    guidellm,
    inference_perf,
    llmperf,
    mooncake,
    otel,
    own,
    parquet,
    plain,
    sharegpt,
)
from pagecast.traces.schema import Trace
from pagecast.traces.source import MAX_BYTES, Source, open_source
from pagecast.traces.wrong_files import wrong_file

_SORTED = ("limit", "sort")


@dataclass(frozen=True)
class Format:
    """A format: its name, its reader, how many marks of it the beginning of a file has, and what it takes.

    `takes`: the keywords of `read` that it has a use for. `contents`: prompts may be told apart in it.
    """

    name: str
    read: Callable[..., Trace]
    recognise: Recogniser
    takes: tuple[str, ...] = _SORTED
    contents: bool = False


_RUNS = (*_SORTED, "run")
# The one with most marks in a file wins, the first of equals; any table only where no other has one.
FORMATS = (
    Format("pagecast JSON lines", own.read, own.recognise, contents=True),
    Format("Mooncake", mooncake.read, mooncake.recognise, (*_SORTED, "block_tokens"), contents=True),
    Format(
        "agent sessions",
        agents.read,
        agents.recognise,
        ("limit", "session_rate", "seed", "block_tokens"),
        contents=True,
    ),
    Format("Bailian", bailian.read, bailian.recognise, (*_SORTED, "block_tokens"), contents=True),
    Format("vLLM or SGLang benchmark", bench.read, bench.recognise, (*_RUNS, "seed")),
    Format("AIPerf", aiperf.read, aiperf.recognise),
    Format("guidellm", guidellm.read, guidellm.recognise, _RUNS),
    Format("inference-perf", inference_perf.read, inference_perf.recognise),
    Format("llmperf", llmperf.read, llmperf.recognise, ("limit", "session_rate", "seed")),
    Format("OpenTelemetry spans", otel.read, otel.recognise),
    Format(
        "ShareGPT",
        sharegpt.read,
        sharegpt.recognise,
        ("limit", "session_rate", "seed", "think_s", "tokenizer"),
        contents=True,
    ),
    Format("plain CSV", plain.read, plain.recognise),
    Format("Azure", azure.read, azure.recognise),
    Format("BurstGPT", burstgpt.read, burstgpt.recognise),
)
PARQUET = Format("parquet", parquet.read, parquet.recognise, (*_SORTED, "columns"), contents=True)
TABLE = Format("a table of requests", columns.read, columns.recognise, (*_SORTED, "columns"))
_ALL = ", ".join(
    [one.name for one in FORMATS] + ["parquet", "and CSV or JSON with arrivals and token counts"]
)
_TAR_MAGIC = slice(257, 262)
LENGTHS_ONLY = (
    "the file tells lengths and no contents of prompts: reuse is unknown, and counted as none. What shares "
    "prefixes is served faster, and with less memory, than this says"
)


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
    run: int | None
    columns: Sequence[str] | None


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
        run: of a file with several runs of a benchmark, the one to read, counted from 1 (all, in order).
        columns: what columns of a table are called, as `arrival=timestamp`, `input=prompt_tokens`,
            `output=completion_tokens`; a unit of time may follow (`arrival=ts:ms`). Usual names are found.

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
    recorded = path.is_dir()
    if recorded:
        path = _recorded(path)
    source = open_source(path, options.get("max_bytes", MAX_BYTES))
    kind = recognise(source, by_columns=options.get("columns"))
    source = replace(source, format=kind.name, progress=progress)
    taken = {name: value for name, value in options.items() if name in kind.takes}
    trace = expand(kind.read(source, **taken))
    notes = [
        f"{name} was not used: {why}"
        for name, why in _UNUSED.items()
        if options.get(name) is not None and name not in kind.takes
    ]
    told = trace.spans is not None or trace.token_ids is not None or trace.recipe is not None
    if not (told or (recorded and kind.contents)):
        trace = replace(trace, lengths_only=True)
        notes += [LENGTHS_ONLY] if LENGTHS_ONLY not in trace.notes else []
    return replace(trace, notes=(*trace.notes, *notes)) if notes else trace


# Options that not every format has a use for, and why: a trace of the others says so.
_UNUSED = {
    "session_rate": "the trace has arrival times (--speedup or pagecast trace convert --scale moves them)",
    "think_s": "the format has think times of its own, or no sessions",
    "tokenizer": "the file holds no texts",
    "block_tokens": "the file holds no hash ids, or says itself what they name",
    "run": "the file is no result of a benchmark that holds several runs",
    "columns": "the file is no table",
}


def recognise(source: Source, by_columns: Sequence[str] | None = None) -> Format:
    """The format of a file by its first bytes: a table, where its columns are told by name.

    Errors: BadInput with what the file is, or the formats that there are.
    """
    head = Head(source.head)
    if PARQUET.recognise(head):
        return PARQUET
    if head.data[_TAR_MAGIC] == b"ustar":
        raise source.fail(
            "an archive; if it holds ServeGen's clients, `pagecast trace generate --servegen` reads it"
        )
    if by_columns:
        return TABLE
    if (words := wrong_file(head)) is not None:
        raise source.fail(f"this is {words}")
    best = max(FORMATS, key=lambda one: one.recognise(head))
    if best.recognise(head):
        return best
    if TABLE.recognise(head):
        return TABLE
    seems = " (no text: there are zero bytes in it)" if b"\0" in head.data else ""
    raise source.fail(f"of no known format{seems}; pagecast reads {_ALL}{_other_columns(head.columns)}")


def _other_columns(names: list[str]) -> str:
    """Of what may be a table: which columns it has, and how to say what they are."""
    if len(names) < 2:
        return ""
    listed = ", ".join(names)
    listed = f"{listed[:97]}..." if len(listed) > 100 else listed
    needed = " ".join(f"--column {name}=NAME" for name in ("arrival", "input", "output"))
    return f". Its first line is {listed!r}; if these are columns of requests, say which: {needed}"


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
