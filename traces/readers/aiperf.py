"""AIPerf's `profile_export.jsonl`: one line per request of a benchmark, as it was really sent.

Uses `metadata` (`request_start_ns`, `conversation_id`, `benchmark_phase`) and `metrics`
(`input_sequence_length`, `output_sequence_length`, each with a `value`). Lines come as requests end, so
they are put in order of their start. Source: github.com/ai-dynamo/aiperf, docs on profile exports.
"""

from __future__ import annotations

from pagecast.traces.building import NO_REQUESTS, RequestRows
from pagecast.traces.records import Record, records
from pagecast.traces.schema import Trace
from pagecast.traces.source import Source

_COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "session")


def read(source: Source, *, limit: int | None = None, sort: bool = False) -> Trace:
    """Reads the file; warm-up requests and failed ones (no output) are left out and counted in a note."""
    rows = RequestRows(source, _COLUMNS)
    first_ns: int | None = None
    left_out = 0
    for record in records(source, limit):
        about = _part(source, record, "metadata")
        metrics = _part(source, record, "metrics")
        if about.values.get("benchmark_phase") == "warmup" or "output_sequence_length" not in metrics.values:
            left_out += 1
            continue
        start_ns = about.whole("request_start_ns", 0)
        # Nanoseconds since 1970 don't fit a float: count from the first line, late or not, and shift below.
        first_ns = start_ns if first_ns is None else first_ns
        inputs, outputs = (
            _part(source, metrics, name).whole("value")
            for name in ("input_sequence_length", "output_sequence_length")
        )
        session = about.text("conversation_id") if about.values.get("conversation_id") is not None else None
        rows.add(record.line, (start_ns - first_ns) / 1e9, inputs, outputs, session)
    if not len(rows):
        raise source.fail(NO_REQUESTS)
    rows.count_from_first()
    notes = [f"left out, as warm-up or failed: {left_out:,} of {left_out + len(rows):,} requests"]
    return rows.finish(sort=True, time_field="request_start_ns", notes=notes if left_out else ())


def _part(source: Source, record: Record, field: str) -> Record:
    """An object within a record. Raises BadInput where it is missing or none."""
    value = record.required(field)
    if not isinstance(value, dict):
        raise record.fail(field, "is no JSON object; correct or remove the line")
    return Record(source, record.line, value, f"{record.prefix}{field}.")
