"""Results of `vllm bench serve --save-detailed` and of SGLang's `bench_serving --output-details`.

One JSON object per run: `input_lens`, `output_lens`, `ttfts`, `itls` (seconds), and with vLLM 0.11 or later
`start_times` (seconds of a clock). Files to which runs were appended have several, one per line. Where start
times are missing they follow from how requests were sent, which the file says: with `max_concurrency` alone
each request starts when the answer before it in its place has ended, with `request_rate` as a process of that
rate. Requests that failed (an error, or no output token) are left out. Source: vLLM,
vllm/benchmarks/serve.py; SGLang, python/sglang/bench_serving.py.
"""

from __future__ import annotations

import heapq
import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pagecast.traces.arrays import Floats, Ints
from pagecast.traces.arrivals import ArrivalProcess
from pagecast.traces.building import apart, finish, trace_name
from pagecast.traces.checks import MAX_TOKENS
from pagecast.traces.head import json_fields
from pagecast.traces.operations import sort as sort_trace
from pagecast.traces.runs import chosen, several
from pagecast.traces.schema import Trace, table
from pagecast.traces.seeds import checked_seed
from pagecast.traces.source import Source

_AGAIN = "run the benchmark again with --save-result --save-detailed (vLLM) or --output-details (SGLang)"
recognise = json_fields(
    *("input_lens", "output_lens", "start_times", "ttfts", "itls"),
    *("request_throughput", "total_token_throughput", "num_prompts", "total_input_tokens"),
)


@dataclass(frozen=True)
class _Run:
    """The requests of one run, in the file's order, with what they took (NaN where it is not known)."""

    inputs: Ints
    outputs: Ints
    starts: Floats
    ttft_s: Floats
    e2e_s: Floats
    longest_gap_s: Floats
    served: Any
    note: str | None

    @property
    def end_s(self) -> float:
        """When the last request had its answer."""
        return float(np.nanmax(self.starts + np.nan_to_num(self.e2e_s)))


def read(
    source: Source, *, limit: int | None = None, sort: bool = False, run: int | None = None, seed: int = 0
) -> Trace:
    """Reads the file, in order of start times: the benchmark lists requests as it made them."""
    documents = _documents(source)
    picked = chosen(source, documents, run)
    runs: list[_Run] = []
    begin = 0.0
    for document in picked:
        one = _run(source, document, seed)
        first = float(one.starts.min())
        # Clocks of other runs may be other clocks: a run that would overlap the last one begins at its end.
        moved = first if runs and first >= begin else begin
        runs.append(_moved(one, moved - first if runs else 0.0))
        begin = runs[-1].end_s
    inputs, outputs, starts, ttft, e2e, gaps, served = (
        np.concatenate([getattr(one, name) for one in runs])[:limit]
        for name in ("inputs", "outputs", "starts", "ttft_s", "e2e_s", "longest_gap_s", "served")
    )
    if not served.any():
        raise source.fail("no request in it has an output token; a trace needs at least one")
    columns = {
        "arrival_s": starts[served] - starts[served].min(),
        "input_tokens": inputs[served],
        "output_tokens": outputs[served],
        "ttft_s": ttft[served],
        "e2e_s": e2e[served],
        "longest_gap_s": gaps[served],
    }
    failed = int((~served).sum())
    notes = [*several(documents, picked, _named), *dict.fromkeys(one.note for one in runs if one.note)]
    if failed:
        notes.append(f"left out, for they failed: {failed:,} of {len(served):,} requests")
    own, measured = apart(columns)
    trace = Trace(trace_name(source), table(own), notes=tuple(notes), measured=measured)
    return finish(source, sort_trace(trace), None, time_field="start_times")


def _documents(source: Source) -> list[dict[str, Any]]:
    """The runs of a file: one JSON object, one per line, or a list of them."""
    text = source.text().strip()
    decoder = json.JSONDecoder()
    documents, at = [], 0
    while at < len(text):
        try:
            document, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise source.fail(f"broken JSON ({error}); the file may be cut off") from None
        runs = document if isinstance(document, list) else [document]
        if not all(isinstance(one, dict) for one in runs):
            raise source.fail("no JSON object; give the file that the benchmark wrote")
        documents += runs
        while at < len(text) and text[at].isspace():
            at += 1
    return documents


def _named(document: dict[str, Any]) -> str:
    """A run as a note names it: by its load."""
    rate, most = _rate(document), document.get("max_concurrency")
    load = f"{rate:g} requests/s" if math.isfinite(rate) else "as fast as it goes"
    return load + (f", {most} at a time" if most else "")


def _rate(document: dict[str, Any]) -> float:
    try:
        return float(document.get("request_rate") or math.inf)
    except (TypeError, ValueError):
        return math.inf


def _run(source: Source, document: dict[str, Any], seed: int) -> _Run:
    inputs, outputs = (_numbers(source, document, name) for name in ("input_lens", "output_lens"))
    count = len(inputs)
    if len(outputs) != count:
        raise source.fail(f"{count} input_lens and {len(outputs)} output_lens; they must be equally many")
    errors = document.get("errors")
    failed = (
        np.array([bool(error) for error in errors]) if isinstance(errors, list) else np.zeros(count, bool)
    )
    if len(failed) != count:
        raise source.fail(f"{len(failed)} errors and {count} input_lens; they must be equally many")
    ttft, e2e, longest = _latencies(source, document, outputs)
    served = (outputs > 0) & ~failed
    given = document.get("start_times")
    if given:
        starts, note = _numbers(source, document, "start_times"), None
        if len(starts) != count:
            raise source.fail(f"{count} input_lens and {len(starts)} start_times; they must be equally many")
    else:
        starts, note = _starts(source, document, e2e, seed)
    return _Run(
        _whole(source, "input_lens", inputs),
        _whole(source, "output_lens", outputs),
        starts,
        ttft,
        e2e,
        longest,
        served,
        note,
    )


def _moved(run: _Run, seconds: float) -> _Run:
    return replace(run, starts=run.starts + seconds)


def _latencies(source: Source, document: dict[str, Any], outputs: Floats) -> tuple[Floats, Floats, Floats]:
    """TTFT, E2E and longest gap between tokens of each request; NaN where the file has none."""
    count = len(outputs)
    unknown = np.full(count, math.nan)
    if document.get("ttfts") is None:
        return unknown, unknown, unknown
    ttft = _numbers(source, document, "ttfts")
    gaps = document.get("itls")
    if gaps is None:
        return ttft, unknown, unknown
    if not isinstance(gaps, list) or {len(ttft), len(gaps)} != {count}:
        raise source.fail(
            f"{count} input_lens, {len(ttft)} ttfts and as many itls; they must be equally many"
        )
    try:
        decode = np.array([math.fsum(one) for one in gaps])
        longest = [_longest(one, int(tokens)) for one, tokens in zip(gaps, outputs, strict=True)]
    except TypeError:
        raise source.fail("must be a list of lists of numbers", field="itls") from None
    came = ttft > 0
    return (
        np.where(came, ttft, math.nan),
        np.where(came, ttft + decode, math.nan),
        np.where(came, np.array(longest), math.nan),
    )


def _longest(gaps: list[float], tokens: int) -> float:
    """The longest of a request's gaps; NaN where tokens came several at a time, or gaps are means."""
    whole = len(gaps) == tokens - 1 and len(gaps) > 0
    return float(max(gaps)) if whole and (len(gaps) == 1 or max(gaps) > min(gaps)) else math.nan


def _starts(source: Source, document: dict[str, Any], e2e: Floats, seed: int) -> tuple[Floats, str]:
    """When requests were sent, as the file says that they were, and a note on that. Errors: BadInput."""
    if "request_rate" not in document and not document.get("max_concurrency"):
        problem = f"missing, and the file does not say how requests were sent; {_AGAIN}"
        raise source.fail(problem, field="start_times")
    rate, most = _rate(document), document.get("max_concurrency")
    if most and not np.isfinite(e2e).any():
        raise source.fail(f"missing beside max_concurrency, and latencies too; {_AGAIN}", field="start_times")
    count = len(e2e)
    how = "all at once"
    due = np.zeros(count)
    if math.isfinite(rate):
        law = ArrivalProcess("gamma", rate, cv=float(document.get("burstiness") or 1.0) ** -0.5)
        due = np.cumsum(law.gaps_s(count, np.random.default_rng(checked_seed(seed))))
        how = f"as a random process of {rate:g} per second (seed {seed}; the file does not say when)"
    if most:
        due = _by_places(due, np.nan_to_num(e2e), int(most))
        how += f", at most {int(most)} at a time, by the latencies measured"
    return due, f"the file has no start_times: requests are sent {how}; vLLM 0.11 and later writes them"


def _by_places(due_s: Floats, e2e: Floats, places: int) -> Floats:
    """Starts where each request waits for one of `places` to be free."""
    free = [0.0] * places
    starts = []
    for due, took in zip(due_s.tolist(), e2e.tolist(), strict=True):
        start = max(due, heapq.heappop(free))
        starts.append(start)
        heapq.heappush(free, start + took)
    return np.array(starts)


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
