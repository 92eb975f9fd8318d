"""inference-perf's `per_request_lifecycle_metrics.json`: an array of the requests of a benchmark.

Uses `start_time`, `end_time` (seconds), and of `info` the input tokens, `output_tokens` and
`output_token_times`, which later versions keep in its `request_metrics` and `response_metrics`; a request
with an `error` failed. Source: github.com/kubernetes-sigs/inference-perf, apis/base.py, reportgen/base.py.
"""

from __future__ import annotations

import math

from pagecast.traces.building import RequestRows, none_left
from pagecast.traces.head import json_fields
from pagecast.traces.records import items
from pagecast.traces.schema import Trace
from pagecast.traces.source import Source

_COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "ttft_s", "e2e_s")
recognise = json_fields(
    *("scheduled_time", "start_time", "end_time", "info", "output_token_times"),
    *("request_metrics", "response_metrics", "lora_adapter"),
)


def read(source: Source, *, limit: int | None = None, sort: bool = False) -> Trace:
    """Reads the file; failed requests are left out and counted in a note."""
    rows = RequestRows(source, _COLUMNS)
    failed = 0
    for request in items(source, limit):
        info = request.part("info") if request.has("info") else None
        answer = info.part("response_metrics") if info is not None and info.has("response_metrics") else info
        if request.has("error") or info is None or answer is None or not answer.has("output_tokens"):
            failed += 1
            continue
        outputs = answer.whole("output_tokens", 0)
        if not outputs:
            failed += 1
            continue
        asked = info if info.has("input_tokens") else info.part("request_metrics").part("text")
        start, end = request.number("start_time"), request.number("end_time")
        times = answer.items("output_token_times") if answer.has("output_token_times") else []
        first = times[0] if times and isinstance(times[0], int | float) else math.nan
        rows.add(request.line, start, asked.whole("input_tokens"), outputs, first - start, end - start)
    if not len(rows):
        raise none_left(source, failed)
    rows.count_from_first()
    notes = [f"left out, for they failed: {failed:,} of {failed + len(rows):,} requests"]
    return rows.finish(sort=True, time_field="start_time", notes=notes if failed else ())
