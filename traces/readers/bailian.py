"""Alibaba Bailian's usage traces: JSON lines of chats with `hash_ids` of 16 tokens.

`timestamp` is in seconds and kept: turns arrive when they did, whatever serving takes. `parent_chat_id`
(-1 for none) joins the turns of a session. Source: github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from dataclasses import replace

from pagecast.sim.core.identity.content import own_prompt
from pagecast.traces.building import BlockSpans, RequestRows
from pagecast.traces.head import json_fields
from pagecast.traces.records import Record, records
from pagecast.traces.schema import Trace
from pagecast.traces.source import Source

BLOCK_TOKENS = 16
recognise = json_fields("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")
_ROOT = "-1"


def read(
    source: Source, *, limit: int | None = None, sort: bool = False, block_tokens: int | None = None
) -> Trace:
    """Reads the file; a session is named after its first chat."""
    rows = RequestRows(source, ("arrival_s", "input_tokens", "output_tokens", "session"))
    spans = BlockSpans(block_tokens or BLOCK_TOKENS)
    session_of: dict[str, str] = {}
    shared = False
    for record in records(source, limit):
        input_tokens = record.whole("input_length")
        if record.values.get("hash_ids"):
            shared = True
            spans.add(record, "hash_ids", input_tokens, last="either", rest=own_prompt(len(rows)))
        else:
            spans.none()
        session = _session(record, session_of)
        rows.add(
            record.line, record.number("timestamp"), input_tokens, record.whole("output_length"), session
        )
    notes = ["turns arrive at their recorded times, not a think time after the answer before them"]
    linked = len(set(session_of.values())) < len(session_of)
    prompts = spans.finish() if shared else None
    trace = rows.finish(prompts, sort=sort, time_field="timestamp", notes=notes if linked else ())
    return replace(trace, block_tokens=spans.block_tokens) if shared else trace


def _session(record: Record, session_of: dict[str, str]) -> str:
    """The first chat of the session; a parent that the file lacks stands for itself."""
    chat = record.text("chat_id")
    parent = record.text("parent_chat_id") if record.values.get("parent_chat_id") is not None else _ROOT
    session_of[chat] = chat if parent == _ROOT else session_of.get(parent, parent)
    return session_of[chat]
