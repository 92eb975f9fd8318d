"""The one form every trace takes: a table of requests, and the spans their prompts are made of.

Readers and generators make a `Trace`; `replay`, `hits` and the engine take one. Requests are rows of a
pandas table in file order; prompts lie beside it as three flat arrays (compressed rows), because a
million requests of Python lists would not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.traces.arrays import Floats, Ints

Recipe = Mapping[str, Any]  # of a generated trace; see `traces.recipe`
RECIPE = "generated"  # its name in our own files
CONCURRENCY = "concurrency"  # likewise of the limit that clients keep


@dataclass(frozen=True)
class Spans:
    """Prompts as spans: row i is `content[start[i]:start[i + 1]]` and so on; none at all: a unique prompt.

    `content` (int64) names a text, `offset` and `length` (int64, tokens) cut a piece out of it.
    The pieces of a prompt, in order, have `input_tokens` tokens together.
    """

    start: Ints
    content: Ints
    offset: Ints
    length: Ints

    def row(self, index: int) -> list[tuple[int, int, int]]:
        """The spans of one request as `(content, offset, length)`; empty for a unique prompt."""
        a, b = int(self.start[index]), int(self.start[index + 1])
        return list(
            zip(self.content[a:b].tolist(), self.offset[a:b].tolist(), self.length[a:b].tolist(), strict=True)
        )


COLUMNS: dict[str, str] = {
    # name: meaning (dtype). Only the first three are required; the rest have the default given.
    "arrival_s": "seconds from the trace's start; NaN where `after` gives it (float64)",
    "input_tokens": "prompt length, at least 1 (int64)",
    "output_tokens": "tokens generated, at least 1 (int64)",
    "max_tokens": "most tokens that the request may generate, for which engines reserve memory; 0: "
    "no more than output_tokens (int64, 0)",
    "warmup": "0: measured; else warm-up, which is in no figure of requests: those of a number are sent when "
    "all of the next higher one have ended (int64, 0)",
    "n": "answers asked for; read as so many requests that share the prompt (int64, 1)",
    "priority": "lower is more urgent (int64, 0)",
    "session": "conversation the request belongs to (string, missing)",
    "after": "row number of the request this one follows, which stands before it, -1 for none (int64, -1)",
    "gap_s": "think time: seconds from the end of `after` to this arrival (float64, 0)",
    "cancel_after_s": "seconds after arrival at which the client gives up, NaN for never (float64, NaN)",
    "retry": "1: sent only where the request `after` was cancelled or rejected (int64, 0)",
    "model": "model revision asked for: part of the scope (string, missing)",
    "adapter": "LoRA adapter: part of the scope (string, missing)",
    "tokenizer": "revision of tokenizer and chat template: part of the scope (string, missing)",
    "positional": "configuration of positions, as RoPE scaling: part of the scope (string, missing)",
    "salt": "tenant's cache salt: part of the scope (string, missing)",
    "tenant": "who asks, for shares and accounts (string, missing)",
    "namespace": "public namespace that the prompt's first tokens belong to (string, missing)",
    "public_tokens": "how many tokens that are (int64, 0)",
    "output_content": "text that the generated tokens are, so that later prompts may quote it; "
    "-1 for one of their own (int64, -1)",
    "output_offset": "where in that text they begin (int64, 0)",
    "retention": "how long blocks are to be kept: START-END:PRIORITY[:SECONDS] of prompt tokens and "
    "decode:PRIORITY[:SECONDS], with spaces between (string, missing)",
    "multimodal": "images and the like in the prompt's tokens, as IDENTIFIER@OFFSET+LENGTH with spaces "
    "between (string, missing)",
    "drafts": "draft tokens made after each step that yielded tokens, as numbers with spaces between "
    "(string, missing)",
    "accepted_drafts": "accepted draft tokens at each step that verified some, likewise (string, missing)",
}
REQUIRED = ("arrival_s", "input_tokens", "output_tokens")
INTEGERS = (
    "input_tokens",
    "output_tokens",
    "max_tokens",
    "warmup",
    "n",
    "priority",
    "after",
    "retry",
    "public_tokens",
    "output_content",
    "output_offset",
)
SECONDS = ("arrival_s", "gap_s", "cancel_after_s")
NAMES = ("session", "model", "adapter", "tokenizer", "positional", "salt", "tenant", "namespace")
# Latencies that results of a benchmark have beside the requests; the last: longest time between two tokens.
MEASURED = ("ttft_s", "e2e_s", "longest_gap_s")
TEXTS = (*NAMES, "retention", "multimodal", "drafts", "accepted_drafts")
DEFAULTS: dict[str, Any] = {
    "max_tokens": 0,
    "warmup": 0,
    "n": 1,
    "priority": 0,
    "session": None,
    "after": -1,
    "gap_s": 0.0,
    "cancel_after_s": float("nan"),
    "retry": 0,
    "model": None,
    "adapter": None,
    "tokenizer": None,
    "positional": None,
    "salt": None,
    "tenant": None,
    "namespace": None,
    "public_tokens": 0,
    "output_content": -1,
    "output_offset": 0,
    "retention": None,
    "multimodal": None,
    "drafts": None,
    "accepted_drafts": None,
}


def dtype(column: str) -> str:
    """The pandas dtype of a column of `COLUMNS`: `int64`, `float64` or `string`."""
    if column in INTEGERS:
        return "int64"
    return "float64" if column in SECONDS else "string"


@dataclass(frozen=True, slots=True)
class Concurrency:
    """A limit that clients keep: at most `most` sessions, or single requests, are under way at a time.

    The first of them comes at once and the others one by one, the last after `ramp_s` seconds. Errors:
    BadInput for less than one, or a time that is not finite.
    """

    most: int
    ramp_s: float = 0.0

    def __post_init__(self) -> None:
        if self.most < 1:
            raise BadInput(f"concurrency is {self.most}; it must be at least 1")
        if not 0 <= self.ramp_s < float("inf"):
            raise BadInput(f"concurrency is reached in {self.ramp_s} s; give seconds of 0 or more")


@dataclass(frozen=True)
class Trace:
    """Requests in arrival order, ready to be replayed.

    `requests` holds the columns of `COLUMNS` (optional ones may be absent), `spans` the prompts (or None:
    every prompt is unique), `token_ids` the prompts as token ids where a trace has them, one array a row
    (then `spans` is None). `notes` are sentences a reader wants the user to see. `recipe` says how the trace
    was generated, where it was, so that other seeds can be played (`traces.recipe`). `block_tokens` is how
    many tokens a hash id of its file names, where prompts were read as hash ids; a converted trace has spans,
    and no longer knows. `concurrency` is the limit of clients who hold requests back, as load tools do; None:
    each request is sent at its arrival. `measured` has a row per request with the
    latencies `MEASURED` in seconds, NaN where one is not known, where the file has what a benchmark measured.
    `lengths_only`: the file tells lengths and no contents, so that nothing is known of reuse.
    `assumed_reuse`: the share of such a trace's prompt tokens that was made to be found in a cache
    (`shared_prefix.assume_reuse`).
    """

    name: str
    requests: pd.DataFrame
    spans: Spans | None = None
    token_ids: list[Ints] | None = None
    notes: tuple[str, ...] = field(default=())
    recipe: Recipe | None = None
    block_tokens: int | None = None
    concurrency: Concurrency | None = None
    measured: pd.DataFrame | None = None
    lengths_only: bool = False
    assumed_reuse: float | None = None

    def __len__(self) -> int:
        return len(self.requests)

    def column(self, name: str) -> pd.Series:
        """A column of `COLUMNS`, filled with its default where the trace leaves it out."""
        if name in self.requests:
            return self.requests[name]
        return pd.Series(DEFAULTS[name], index=self.requests.index, dtype=dtype(name), name=name)

    def integers(self, name: str) -> Ints:
        """An integer column as an array, defaults filled in."""
        return np.asarray(self.column(name).to_numpy(dtype=np.int64), dtype=np.int64)

    def seconds(self, name: str) -> Floats:
        """A float column as an array, defaults filled in."""
        return np.asarray(self.column(name).to_numpy(dtype=np.float64), dtype=np.float64)


def table(columns: Mapping[str, Any]) -> pd.DataFrame:
    """A requests table of the given columns, in the order and with the dtypes of `COLUMNS`.

    Optional columns that hold nothing but their default are left out, so that equal traces have equal
    tables. Raises BadInput for a column that `COLUMNS` lacks or a required one left out.
    """
    if unknown := sorted(set(columns) - set(COLUMNS)):
        raise BadInput(f"no such trace column: {unknown[0]}; the columns are {', '.join(COLUMNS)}")
    if missing := [name for name in REQUIRED if name not in columns]:
        raise BadInput(f"a trace needs the column {missing[0]}; it has {', '.join(columns) or 'none'}")
    series_by_name = {}
    for name in COLUMNS:
        if name in columns:
            series = pd.Series(columns[name], dtype=dtype(name))
            series.index = pd.RangeIndex(len(series))
            if name in REQUIRED or not _only_default(series, DEFAULTS[name]):
                series_by_name[name] = series
    return pd.DataFrame(series_by_name)


def _only_default(series: pd.Series, default: Any) -> bool:
    if default is None:
        return bool(series.isna().all())
    values = series.to_numpy()
    return bool((np.isnan(values) if default != default else values == default).all())


def kept_recipe(recipe: object, limit: int | None, rows: int) -> Recipe | None:
    """The recipe that a file tells of, for its first `limit` requests; None where it tells of none."""
    if not isinstance(recipe, Mapping):
        return None
    cut = limit is not None and rows == limit
    return {**recipe, "limit": limit} if cut else dict(recipe)


def kept_concurrency(limit: object) -> Concurrency | None:
    """The limit of clients that a file tells of; None where it tells of none. Errors: BadInput."""
    if not isinstance(limit, Mapping):
        return None
    try:
        return Concurrency(int(limit["most"]), float(limit.get("ramp_s", 0.0)))
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{CONCURRENCY}: missing or of the wrong kind ({error})") from None


def starts(counts: Ints) -> Ints:
    """Row boundaries of compressed rows from the number of items in each: one more than rows."""
    out = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def nominal_arrival_s(trace: Trace) -> Floats:
    """When each request would arrive if serving took no time: its own arrival, or its chain's gaps summed.

    It orders and slices traces whose later turns have no arrival time of their own.
    """
    arrival, after, gap = trace.seconds("arrival_s").copy(), trace.integers("after"), trace.seconds("gap_s")
    followers = np.flatnonzero(np.isnan(arrival) & (after >= 0))
    values = arrival.tolist()
    for row, parent, wait in zip(
        followers.tolist(), after[followers].tolist(), gap[followers].tolist(), strict=True
    ):
        values[row] = values[parent] + wait
    return np.asarray(values, dtype=np.float64)
