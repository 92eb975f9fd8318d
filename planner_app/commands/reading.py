"""The options of reading a trace, and reading with a bar that shows how far it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagecast.planner_app import console
from pagecast.planner_app.options import Options
from pagecast.traces.bundled import resolve
from pagecast.traces.read import read
from pagecast.traces.schema import Trace
from pagecast.traces.source import MAX_BYTES
from pydantic import Field


class ReadOptions(Options):
    """How any command reads a trace; named as `traces.read.read` does."""

    limit: int | None = Field(default=None, description="read only the first N requests")
    sort: bool = Field(default=False, description="put requests out of order in order of arrival")
    tokenizer: Path | None = Field(
        default=None, description="transformers folder, for formats that hold texts (ShareGPT)"
    )
    session_rate: float | None = Field(
        default=None, description="sessions per second, where a format has no absolute times"
    )
    run: int | None = Field(
        default=None,
        description="of a file with several runs of a benchmark, the one to read [all, in order]",
    )
    column: tuple[str, ...] = Field(
        default=(),
        description="what a column of a table of requests is called, as arrival=timestamp, "
        "input=prompt_tokens, output=completion_tokens; once for each [usual names are found]",
    )

    def arguments(self) -> dict[str, Any]:
        """The arguments of `read`."""
        given = {name: getattr(self, name) for name in ReadOptions.model_fields if name != "column"}
        return {**given, "columns": self.column or None}


class LoadOptions(ReadOptions):
    """How a trace is read that a scenario serves, and how fast its requests come."""

    speedup: float = Field(
        default=1.0, description="divide arrival times by this: 2 doubles the load; think times stay"
    )
    rate: float | None = Field(
        default=None,
        description="scale arrival times to this many requests per second: all requests of the sessions that "
        "start in a second, as plan counts the trace's own; think times stay; not with --speedup",
    )
    assume_reuse: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="of a trace of lengths alone, the share of prompt tokens found in the cache; replay and "
        "plan say what comes without it too",
    )


class BlockReadOptions(ReadOptions):
    """How a trace is read whose blocks are looked at."""

    seed: int = Field(default=0, description="seed of all random draws")
    block_tokens: int | None = Field(
        default=None, description="tokens a hash id names, if not the format's own number"
    )

    def arguments(self) -> dict[str, Any]:
        """The arguments of `read`."""
        return {**super().arguments(), "seed": self.seed, "block_tokens": self.block_tokens}


class AnyReadOptions(BlockReadOptions):
    """All that reading can be told."""

    think: float | None = Field(
        default=None, description="seconds before the next turn, where a format has none (ShareGPT)"
    )
    max_bytes: int = Field(
        default=MAX_BYTES, description="refuse files that are larger than this when unpacked"
    )

    def arguments(self) -> dict[str, Any]:
        """The arguments of `read`."""
        return {**super().arguments(), "think_s": self.think, "max_bytes": self.max_bytes}


def read_with_progress(name: str, options: ReadOptions, **more: Any) -> Trace:
    """Reads a trace with a progress bar on stderr, if it takes a while. `more`: of `read`."""
    path = resolve(name)
    size = path.stat().st_size if path.is_file() else 1
    with console.progress("reading", size) as update:
        return read(name, progress=update, **options.arguments(), **more)
