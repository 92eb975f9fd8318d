"""The JSON that `vllm bench serve --save-result --save-detailed` writes: one load as it was really sent.

Uses `input_lens`, `output_lens` and `start_times` (seconds of a clock; they count from the first).
Requests that failed (no output token) are left out. Source: vLLM, vllm/benchmarks/serve.py.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from pagecast.traces.building import finish, trace_name
from pagecast.traces.checks import MAX_TOKENS
from pagecast.traces.operations import sort as sort_trace
from pagecast.traces.schema import Floats, Ints, Trace, table
from pagecast.traces.source import Source

_FIELDS = ("input_lens", "output_lens", "start_times")
_AGAIN = "run the benchmark again with --save-result --save-detailed (vLLM 0.11 or later)"


def read(source: Source, *, limit: int | None = None, sort: bool = False) -> Trace:
    """Reads the file, in order of start times: the benchmark lists requests as it made them."""
    try:
        document = json.loads(source.text())
    except (ValueError, RecursionError) as error:
        raise source.fail(f"broken JSON ({error}); the file may be cut off") from None
    if not isinstance(document, dict):
        raise source.fail("no JSON object; give the file that --save-detailed wrote")
    inputs, outputs, start_s = (_numbers(source, document, field)[:limit] for field in _FIELDS)
    if not len(inputs) == len(outputs) == len(start_s):
        raise source.fail(
            f"{len(inputs)} input_lens, {len(outputs)} output_lens and {len(start_s)} start_times; "
            "they must be equally many"
        )
    has_output = outputs > 0
    if not has_output.any():
        raise source.fail("no request in it has an output token; a trace needs at least one")
    columns = {
        "arrival_s": start_s[has_output] - start_s[has_output].min(),
        "input_tokens": _whole(source, "input_lens", inputs)[has_output],
        "output_tokens": _whole(source, "output_lens", outputs)[has_output],
    }
    failed = int((~has_output).sum())
    notes = (f"left out, for they generated nothing: {failed:,} of {len(has_output):,} requests",)
    trace = sort_trace(Trace(trace_name(source), table(columns), notes=notes if failed else ()))
    return finish(source, trace, None, time_field="start_times")


def _numbers(source: Source, document: dict[str, Any], field: str) -> Floats:
    values = document.get(field)
    if values is None:
        raise source.fail(f"missing; {_AGAIN}", field=field)
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise source.fail("must be a list of numbers", field=field)
    numbers = np.asarray(values, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(numbers) | (numbers < 0))
    if len(bad):
        raise source.fail(f"item {bad[0] + 1} is {numbers[bad[0]]:g}; it must be 0 or more", field=field)
    return numbers


def _whole(source: Source, field: str, values: Floats) -> Ints:
    bad = np.flatnonzero((values != np.floor(values)) | (values > MAX_TOKENS))
    if len(bad):
        raise source.fail(f"item {bad[0] + 1} is {values[bad[0]]:g}, no whole number of tokens", field=field)
    return values.astype(np.int64)
