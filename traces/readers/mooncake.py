"""Mooncake's JSON lines: `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.

Each hash id names 512 tokens (the last one of a prompt what is left of it) and, by how they are made,
everything before them. Format: github.com/kvcache-ai/Mooncake. Two fields that later tools add are
understood: `session_id` with `delay` (ms), by which a turn follows the last one of its session.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pagecast.traces.building import BlockSpans, RequestRows
from pagecast.traces.head import json_fields
from pagecast.traces.records import Record, records
from pagecast.traces.schema import Trace
from pagecast.traces.source import Source

BLOCK_TOKENS = 512
recognise = json_fields("timestamp", "input_length", "output_length", "hash_ids")
TRACE_COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "priority", "session", "after", "gap_s")
"""Columns of a trace that the format has."""

_FIELDS = {
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
    "priority",
    "session_id",
    "delay",
}


def read(
    source: Source, *, limit: int | None = None, sort: bool = False, block_tokens: int | None = None
) -> Trace:
    """Reads the file; `block_tokens` is how many tokens a hash id names (512 unless given)."""
    block_tokens = block_tokens or BLOCK_TOKENS
    rows = RequestRows(source, TRACE_COLUMNS)
    spans = BlockSpans(block_tokens)
    shared = False
    last_turn: dict[str, int] = {}
    ignored: dict[str, None] = {}
    for record in records(source, limit):
        ignored |= dict.fromkeys(record.values.keys() - _FIELDS)
        input_tokens = record.whole("input_length")
        if record.values.get("hash_ids"):
            shared = True
            spans.add(record, "hash_ids", input_tokens)
        else:
            spans.none()
        priority = record.whole("priority", -(1 << 31)) if "priority" in record.values else 0
        arrival, session, after, gap = _when(record, last_turn, len(rows))
        output_tokens = record.whole("output_length")
        rows.add(record.line, arrival, input_tokens, output_tokens, priority, session, after, gap)
    notes = [f"fields that are not part of the format are ignored: {', '.join(sorted(ignored))}"]
    trace = rows.finish(
        spans.finish() if shared else None,
        sort=sort,
        time_field="timestamp",
        notes=notes if ignored else (),
    )
    return replace(trace, block_tokens=block_tokens) if shared else trace


def _when(record: Record, last_turn: dict[str, int], row: int) -> tuple[float, str | None, int, float]:
    """Arrival, session, `after` and `gap_s`: by the clock, or by `delay` after the session's last turn."""
    values = record.values
    session = record.text("session_id") if values.get("session_id") is not None else None
    before = last_turn.get(session, -1) if session is not None else -1
    if session is not None:
        last_turn[session] = row
    if before >= 0 and values.get("timestamp") is None:
        delay = record.number("delay") / 1000 if values.get("delay") is not None else 0.0
        return math.nan, session, before, delay
    return record.number("timestamp") / 1000, session, -1, 0.0
