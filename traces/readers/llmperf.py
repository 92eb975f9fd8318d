"""llmperf's `..._individual_responses.json`: lengths and latencies, without the times of requests.

llmperf keeps a number of requests in flight and notes neither when each was sent nor, in this file, how many
those were. So requests start as a Poisson process, as sessions of other formats without times do. Source:
github.com/ray-project/llmperf, token_benchmark_ray.py.
"""

from __future__ import annotations

import numpy as np
from pagecast.traces.arrivals import ArrivalProcess
from pagecast.traces.building import RequestRows, none_left
from pagecast.traces.head import json_fields
from pagecast.traces.records import items
from pagecast.traces.schema import Trace
from pagecast.traces.seeds import checked_seed
from pagecast.traces.source import Source

RATE = 1.0
_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
recognise = json_fields(
    *("number_input_tokens", "number_output_tokens", "number_total_tokens", "end_to_end_latency_s"),
    *("inter_token_latency_s", "request_output_throughput_token_per_s"),
)


def read(
    source: Source, *, limit: int | None = None, session_rate: float | None = None, seed: int = 0
) -> Trace:
    """Reads the file, without failed requests; they start at `session_rate` per second (1 unless given)."""
    law = ArrivalProcess("poisson", RATE if session_rate is None else session_rate)
    rows = RequestRows(source, _COLUMNS)
    random = np.random.default_rng(checked_seed(seed))
    failed = 0
    now_s = 0.0
    for request in items(source, limit):
        if request.has("error_code") or not request.whole("number_output_tokens", 0):
            failed += 1
            continue
        rows.add(
            request.line, now_s, request.whole("number_input_tokens"), request.whole("number_output_tokens")
        )
        now_s += float(law.gaps_s(1, random)[0])
    if not len(rows):
        raise none_left(source, failed)
    notes = [
        f"the format has no times: requests start at {law.rate:g} per second (Poisson, seed {seed}; choose "
        "with --session-rate), and what was measured belongs to a load that the file does not tell"
    ]
    if failed:
        notes.append(f"left out, for they failed: {failed:,} of {failed + len(rows):,} requests")
    return rows.finish(notes=notes)
