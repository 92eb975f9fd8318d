"""guidellm's JSON: benchmarks, each with its requests as they were really sent.

Of each benchmark `requests.successful` is read: `request_start_time` (seconds since 1970), `prompt_tokens`,
`output_tokens`, `request_latency` (s) and `time_to_first_token_ms`. Benchmarks follow one another as they
did.
Source: github.com/vllm-project/guidellm, schemas of a generative benchmark, 0.2 to 0.8.
"""

from __future__ import annotations

import json
import math
from typing import Any

from pagecast.traces.building import RequestRows, none_left
from pagecast.traces.head import json_fields
from pagecast.traces.records import Record
from pagecast.traces.runs import chosen, several
from pagecast.traces.schema import Trace
from pagecast.traces.source import Source

_COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "ttft_s", "e2e_s")
recognise = json_fields(
    *("benchmarks", "requests", "successful", "errored", "incomplete", "scheduler_state", "request_latency"),
    *("request_start_time", "prompt_tokens", "output_tokens", "time_to_first_token_ms"),
)


def read(source: Source, *, limit: int | None = None, sort: bool = False, run: int | None = None) -> Trace:
    """Reads the file; requests that failed or were cut off at a benchmark's end are counted in a note."""
    try:
        document = json.loads(source.text())
    except (ValueError, RecursionError) as error:
        raise source.fail(f"broken JSON ({error}); the file may be cut off") from None
    benchmarks = document.get("benchmarks") if isinstance(document, dict) else None
    if not isinstance(benchmarks, list) or not benchmarks:
        raise source.fail("no list of benchmarks; save guidellm's full JSON (--output-path results.json)")
    picked = chosen(source, benchmarks, run)
    rows = RequestRows(source, _COLUMNS)
    left_out = 0
    for benchmark in picked:
        number = benchmarks.index(benchmark) + 1
        requests = benchmark.get("requests") if isinstance(benchmark, dict) else None
        if not isinstance(requests, dict) or not isinstance(requests.get("successful"), list):
            problem = f"benchmark {number} has no requests.successful; save guidellm's full JSON"
            raise source.fail(problem)
        left_out += sum(len(requests.get(name) or ()) for name in ("errored", "incomplete"))
        for at, request in enumerate(requests["successful"], 1):
            if limit is not None and len(rows) >= limit:
                break
            left_out += not _add(rows, Record(source, at, request, f"benchmark {number}, "))
    if not len(rows):
        raise none_left(source, left_out)
    rows.count_from_first()
    notes = several(benchmarks, picked, _named)
    if left_out:
        total = left_out + len(rows)
        notes.append(f"left out, for they failed or were cut off: {left_out:,} of {total:,} requests")
    return rows.finish(sort=True, time_field="request_start_time", notes=notes)


def _add(rows: RequestRows, request: Record) -> bool:
    """Adds a request; False for one without an output token."""
    outputs = request.whole("output_tokens", 0)
    if not outputs:
        return False
    if not request.has("prompt_tokens"):
        raise request.fail("prompt_tokens", "is null, for the server sent no usage: lengths are not known")
    start = "request_start_time" if request.has("request_start_time") else "start_time"
    ttft, e2e = (
        request.number(name, 0.0) if request.has(name) else math.nan
        for name in ("time_to_first_token_ms", "request_latency")
    )
    rows.add(request.line, request.number(start), request.whole("prompt_tokens"), outputs, ttft / 1e3, e2e)
    return True


def _named(benchmark: Any) -> str:
    """A benchmark as a note names it: by its strategy, where the file tells it, and its requests."""
    requests = benchmark.get("requests", {}).get("successful") or []
    config = benchmark.get("config") or benchmark.get("args") or {}
    strategy = config.get("strategy") if isinstance(config, dict) else None
    if isinstance(strategy, dict):
        rate = strategy.get("rate") or strategy.get("streams") or strategy.get("max_concurrency")
        return f"{strategy.get('type_', 'benchmark')} {rate or ''}".strip()
    return f"{len(requests):,} requests"
