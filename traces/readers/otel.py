"""OpenTelemetry spans of requests: OTLP in JSON, as the collector's file exporter, Tempo and Jaeger give it.

Also the spans that an SDK's console exporter prints.

Every span with token counts is a request: `gen_ai.usage.prompt_tokens` or `input_tokens`,
`completion_tokens` or `output_tokens`, or OpenInference's names. It arrives at `startTimeUnixNano`; TTFT is
`gen_ai.latency.time_to_first_token` (s), E2E the span's length. Sources: vLLM, vllm/tracing; OpenTelemetry's
conventions for generative AI.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from pagecast.traces.building import NO_REQUESTS, RequestRows, none_left
from pagecast.traces.head import Head, json_fields
from pagecast.traces.records import Record, items, records
from pagecast.traces.schema import Trace
from pagecast.traces.source import Source

_COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "session", "ttft_s", "e2e_s")
_INPUT = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens", "llm.token_count.prompt")
_OUTPUT = ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens", "llm.token_count.completion")
_TTFT = ("gen_ai.latency.time_to_first_token",)
_SESSION = ("gen_ai.conversation.id", "session.id")
_OF_JAEGER = ("traceID", "spanID", "operationName", "tags")
_OF_CONSOLE = ("trace_id", "span_id", "parent_id", "start_time", "end_time", "attributes")
recognise = json_fields(
    *("resourceSpans", "scopeSpans", "spans", "startTimeUnixNano", "endTimeUnixNano"),
    *_OF_JAEGER,
    *_OF_CONSOLE,
)


def read(source: Source, *, limit: int | None = None, sort: bool = False) -> Trace:
    """Reads the file; spans without token counts and failed requests are counted in notes."""
    rows = RequestRows(source, _COLUMNS)
    first_ns: int | None = None
    others = failed = 0
    for span, line in _spans(source):
        values = _attributes(span)
        inputs, outputs = _of(values, _INPUT), _of(values, _OUTPUT)
        if inputs is None or outputs is None:
            others += 1
            continue
        if limit is not None and len(rows) >= limit:
            break
        if not outputs or (span.get("status") or {}).get("code") in (2, "STATUS_CODE_ERROR"):
            failed += 1
            continue
        counts = Record(source, line, {"input tokens": _plain(inputs), "output tokens": _plain(outputs)})
        start, end = (
            _nanoseconds(source, span, line, name) for name in ("startTimeUnixNano", "endTimeUnixNano")
        )
        first_ns = start if first_ns is None else first_ns
        session = _of(values, _SESSION)
        rows.add(
            line,
            (start - first_ns) / 1e9,
            counts.whole("input tokens"),
            counts.whole("output tokens"),
            None if session is None else str(session),
            float(_of(values, _TTFT) or math.nan),
            (end - start) / 1e9,
        )
    if not len(rows) and failed:
        raise none_left(source, failed)
    if not len(rows):
        raise source.fail(f"{NO_REQUESTS}: no span of {others:,} has {_INPUT[0]} and {_OUTPUT[0]}")
    rows.count_from_first()
    notes = [f"{others:,} spans without token counts are passed over"] if others else []
    if failed:
        notes.append(f"left out, for they failed: {failed:,} of {failed + len(rows):,} requests")
    return rows.finish(sort=True, time_field="startTimeUnixNano", notes=notes)


def _spans(source: Source) -> Iterator[tuple[dict[str, Any], int]]:
    """The spans of a file of one document, or of one per line, each with its line."""
    documents: Iterator[tuple[dict[str, Any], int]]
    if "resourceSpans" in source.head.decode("utf-8-sig", errors="replace").split("\n", 1)[0]:
        documents = ((record.values, record.line) for record in records(source))
    elif {"trace_id", "attributes", "start_time"} <= (Head(source.head).keys or set()):
        documents = ((record.values, record.line) for record in items(source))
    else:
        try:
            documents = iter([(json.loads(source.text()), 1)])
        except (ValueError, RecursionError) as error:
            raise source.fail(f"broken JSON ({error}); the file may be cut off") from None
    for document, line in documents:
        try:
            if "start_time" in document:
                yield _of_console(document), line
                continue
            if "data" in document:
                yield from ((_of_jaeger(span), line) for trace in document["data"] for span in trace["spans"])
                continue
            for resource in document["resourceSpans" if "resourceSpans" in document else "batches"]:
                older = "instrumentationLibrarySpans"
                for scope in resource[older if older in resource else "scopeSpans"]:
                    yield from ((span, line) for span in scope["spans"])
        except (KeyError, TypeError, ValueError):
            raise source.fail("no spans (resourceSpans, scopeSpans, spans)", line) from None


def _of_jaeger(span: dict[str, Any]) -> dict[str, Any]:
    """A span of Jaeger's JSON, whose times are microseconds, as one of OTLP. Errors: KeyError, TypeError."""
    tags = {tag["key"]: tag.get("value") for tag in span.get("tags") or ()}
    start_ns = 1000 * int(span["startTime"])
    return {
        "startTimeUnixNano": start_ns,
        "endTimeUnixNano": start_ns + 1000 * int(span["duration"]),
        "attributes": [{"key": key, "value": {"value": value}} for key, value in tags.items()],
        "status": {"code": 2} if tags.get("error") or tags.get("otel.status_code") == "ERROR" else None,
    }


def _of_console(span: dict[str, Any]) -> dict[str, Any]:
    """A span as a console exporter prints it, as one of OTLP. Errors: KeyError, TypeError, ValueError."""
    return {
        "startTimeUnixNano": _ticks(span["start_time"]),
        "endTimeUnixNano": _ticks(span["end_time"]),
        "attributes": [{"key": key, "value": {"value": value}} for key, value in span["attributes"].items()],
        "status": {"code": 2} if (span.get("status") or {}).get("status_code") == "ERROR" else None,
    }


def _ticks(date: str) -> int:
    """Nanoseconds since 1970 of a date. Errors: ValueError, TypeError."""
    return (
        (datetime.fromisoformat(date) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000
    )


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    """A span's attributes by name."""
    listed = span.get("attributes") or ()
    return {one["key"]: next(iter(one["value"].values()), None) for one in listed if one.get("value")}


def _of(values: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _plain(value: Any) -> Any:
    """A number that JSON holds as text."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _nanoseconds(source: Source, span: dict[str, Any], line: int, field: str) -> int:
    try:
        return int(span[field])
    except (KeyError, TypeError, ValueError):
        raise source.fail(f"{span.get(field)!r} is no time in nanoseconds", line, field) from None
