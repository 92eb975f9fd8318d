"""AIPerf's `profile_export.jsonl`: one line per request of a benchmark, as it was really sent.

Uses `metadata` (`request_start_ns`, `conversation_id`, `benchmark_phase`) and `metrics`
(`input_sequence_length`, `output_sequence_length`, and where they are there `time_to_first_token` and
`request_latency`, each with a `value` and a `unit`). Lines come as requests end, so they are put in order of
their start. Source: github.com/ai-dynamo/aiperf, docs on profile exports.
"""

from __future__ import annotations

import math

from pagecast.traces.building import RequestRows, none_left
from pagecast.traces.head import json_fields
from pagecast.traces.records import Record, records
from pagecast.traces.schema import Trace
from pagecast.traces.source import Source

_COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "session", "ttft_s", "e2e_s")
_SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
recognise = json_fields(
    "metadata", "metrics", "request_start_ns", "input_sequence_length", "output_sequence_length"
)


def read(source: Source, *, limit: int | None = None, sort: bool = False) -> Trace:
    """Reads the file; warm-up requests and failed ones (no output) are left out and counted in a note."""
    rows = RequestRows(source, _COLUMNS)
    first_ns: int | None = None
    left_out = 0
    for record in records(source, limit):
        about, metrics = record.part("metadata"), record.part("metrics")
        if about.values.get("benchmark_phase") == "warmup" or not metrics.has("output_sequence_length"):
            left_out += 1
            continue
        start_ns = about.whole("request_start_ns", 0)
        # Nanoseconds since 1970 don't fit a float: count from the first line, late or not, and shift below.
        first_ns = start_ns if first_ns is None else first_ns
        inputs, outputs = (
            metrics.part(name).whole("value") for name in ("input_sequence_length", "output_sequence_length")
        )
        session = about.text("conversation_id") if about.has("conversation_id") else None
        latencies = (_seconds(metrics, name) for name in ("time_to_first_token", "request_latency"))
        rows.add(record.line, (start_ns - first_ns) / 1e9, inputs, outputs, session, *latencies)
    if not len(rows):
        raise none_left(source, left_out)
    rows.count_from_first()
    notes = [f"left out, as warm-up or failed: {left_out:,} of {left_out + len(rows):,} requests"]
    return rows.finish(sort=True, time_field="request_start_ns", notes=notes if left_out else ())


def _seconds(metrics: Record, name: str) -> float:
    """A latency in seconds; NaN where it was not measured."""
    if not metrics.has(name):
        return math.nan
    entry = metrics.part(name)
    unit = str(entry.values.get("unit") or "ms")
    if unit not in _SECONDS:
        raise entry.fail("unit", f"{unit!r} is none of {', '.join(_SECONDS)}")
    return entry.number("value", 0.0) * _SECONDS[unit]
