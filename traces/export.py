"""Export of traces to formats that hold less than ours, with what each of them loses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from pagecast.traces.arrays import Ints
from pagecast.traces.blocks import block_ids, block_runs
from pagecast.traces.prefixes import paths
from pagecast.traces.readers.mooncake import BLOCK_TOKENS, TRACE_COLUMNS
from pagecast.traces.schema import COLUMNS, DEFAULTS, Spans, Trace

# What is lost of these is reported in other words.
_REPORTED_APART = ("n", "output_content", "output_offset")


def csv_lines(trace: Trace) -> tuple[Iterator[bytes], list[str]]:
    """CSV of all columns, and what it loses: what prompts are made of."""
    losses = []
    if trace.spans is not None or trace.token_ids is not None:
        losses.append("what prompts are made of and share")
    text = trace.requests.to_csv(index=False, lineterminator="\n")
    return iter([text.encode()]), losses


def mooncake_lines(trace: Trace) -> tuple[Iterator[bytes], list[str]]:
    """Mooncake's JSON lines, and what they lose; later turns have a `session_id` and a `delay` (ms)."""
    ids, begins = block_ids(block_runs(paths(trace), BLOCK_TOKENS), len(trace))
    return _mooncake_rows(trace, ids, begins), _mooncake_losses(trace, ids, begins)


def _mooncake_rows(trace: Trace, ids: Ints, begins: Ints) -> Iterator[bytes]:
    chained = _follow_their_sessions(trace)
    has_session = "session" in trace.requests
    columns = {
        name: trace.column(name).tolist() for name in ("arrival_s", "input_tokens", "output_tokens", "gap_s")
    }
    sessions, priorities = (
        trace.column("session").astype(object).tolist(),
        trace.integers("priority").tolist(),
    )
    shared = trace.spans is not None or trace.token_ids is not None
    for row, (arrival_s, inputs, outputs, gap_s) in enumerate(zip(*columns.values(), strict=True)):
        fields: dict[str, Any] = {"input_length": inputs, "output_length": outputs}
        if not math.isnan(arrival_s):
            fields = {"timestamp": _milliseconds(arrival_s), **fields}
        if has_session and chained and isinstance(sessions[row], str):
            fields["session_id"] = sessions[row]
        if math.isnan(arrival_s):
            fields["delay"] = _milliseconds(gap_s)
        if priorities[row]:
            fields["priority"] = priorities[row]
        if shared:
            fields["hash_ids"] = ids[begins[row] : begins[row + 1]].tolist()
        yield json.dumps(fields).encode() + b"\n"


def _mooncake_losses(trace: Trace, ids: Ints, begins: Ints) -> list[str]:
    kept = (*TRACE_COLUMNS, *_REPORTED_APART)
    losses = [f"the column {name}" for name in COLUMNS if name not in kept and _is_used(trace, name)]
    if "after" in trace.requests and not _follow_their_sessions(trace):
        losses.append("turns that follow another than their session's last one")
    if trace.token_ids is not None:
        losses.append("token ids")
    if "output_content" in trace.requests:
        losses.append("which answers later turns quote")
    counts = np.diff(begins)
    length = np.full(len(ids), BLOCK_TOKENS)
    length[begins[1:] - 1] = trace.integers("input_tokens") - BLOCK_TOKENS * (counts - 1)
    exported = replace(trace, spans=Spans(begins, ids, np.zeros_like(ids), length), token_ids=None)
    finer = int(paths(trace).matched.sum() - paths(exported).matched.sum())
    if finer:
        losses.append(f"sharing finer than {BLOCK_TOKENS} tokens ({finer:,} shared tokens)")
    return losses


def _is_used(trace: Trace, name: str) -> bool:
    """Whether a column says of any request what its default does not."""
    if name not in trace.requests:
        return False
    values, default = trace.requests[name], DEFAULTS[name]
    stated = values[values.notna()]
    if pd.isna(default):
        return len(stated) > 0
    return bool((stated != default).any())


def _follow_their_sessions(trace: Trace) -> bool:
    """Whether every `after` is the last turn of the same session, which is all that a session id says."""
    last: dict[Any, int] = {}
    follows = trace.integers("after").tolist()
    for row, session in enumerate(trace.column("session").astype(object).tolist()):
        if follows[row] >= 0 and (not isinstance(session, str) or last.get(session) != follows[row]):
            return False
        last[session] = row
    return True


def _milliseconds(seconds: float) -> float:
    """Milliseconds that divide back to exactly these seconds, where there are any."""
    near = seconds * 1000
    for value in (float(round(near)), near, math.nextafter(near, 0), math.nextafter(near, math.inf)):
        if value / 1000 == seconds:
            return int(value) if value.is_integer() else value
    return near
