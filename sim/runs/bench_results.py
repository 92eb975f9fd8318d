"""Request-level results of a benchmark: when each request was sent, and when its tokens came.

Read from what users have: `vllm bench serve --save-result --save-detailed` (JSON), AIPerf's
`profile_export.jsonl`, guidellm's JSON, a CSV of our own, or the requests of a recorded run's folder, whose
steps are not looked at. A CSV has the columns `arrival_s`, `input_tokens`, `output_tokens`, `ttft_s` and
`e2e_s`; latencies count from the arrival, in seconds. Those of files are a client's, those of a folder the
engine's own.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pagecast.sim.core.errors import BadInput
from pagecast.sim.documents import read_text
from pagecast.sim.runs.client_share import CLIENT_SHARE, ClientShare, known_share
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.recorded_requests import HUGE
from pagecast.traces.schema import Trace, table

Floats = npt.NDArray[np.float64]
Row = tuple[float, int, int, float, float]  # arrival_s, input_tokens, output_tokens, ttft_s, e2e_s

_MOST_BYTES = 1 << 30
_COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "ttft_s", "e2e_s")
_FORMS = (
    "give what `vllm bench serve --save-result --save-detailed` wrote, AIPerf's profile_export.jsonl, "
    f"guidellm's JSON, a recorded run's folder, or a CSV with the columns {', '.join(_COLUMNS)}"
)


@dataclass(frozen=True)
class BenchResults:
    """Requests in order of arrival, each with its measured latencies in seconds.

    `client`: what a client's latencies hold beside the engine's; None where they are the engine's own.
    """

    name: str
    trace: Trace
    ttft_s: Floats
    e2e_s: Floats
    client: ClientShare | None = None

    @property
    def tpot_s(self) -> Floats:
        """Seconds per token after the first; NaN for one token."""
        tokens = self.trace.integers("output_tokens")
        spread = self.e2e_s - self.ttft_s
        return np.asarray(np.where(tokens > 1, spread / np.maximum(tokens - 1, 1), np.nan))


def is_results(path: str | Path) -> bool:
    """Whether `path` is a file of results, not the folder of a recorded run."""
    return Path(path).is_file()


def read_results(path: str | Path, client_ms: float | None = None) -> BenchResults:
    """Reads one file or folder. Errors: BadInput with the file and what is missing.

    `client_ms`: what the latencies of a file hold beside the engine's, where that is known.
    """
    where = Path(path)
    if where.is_dir():
        if client_ms is not None:
            raise BadInput(f"{where}: a recorded run has the engine's own latencies; leave out --client-ms")
        return _of_run(RecordedRun.load(where))
    text = read_text(where, _MOST_BYTES, _FORMS)
    rows = list(_reader(where, text)(str(where), text))
    if not rows:
        raise BadInput(f"{where}: no request in it has latencies; {_FORMS}")
    client = CLIENT_SHARE if client_ms is None else known_share(client_ms)
    return _results(where.stem, rows, client)


def _reader(path: Path, text: str) -> Callable[[str, str], Iterator[Row]]:
    start = text.lstrip()[:1]
    if start != "{":
        return _csv_rows
    first = text.lstrip().split("\n", 1)[0]
    if '"metadata"' in first and '"metrics"' in first:
        return _aiperf_rows
    return _json_rows


def _results(name: str, rows: list[Row], client: ClientShare) -> BenchResults:
    rows = sorted(rows, key=lambda row: row[0])
    arrival, inputs, outputs, ttft, e2e = (np.array(column) for column in zip(*rows, strict=True))
    columns = {"arrival_s": arrival - arrival[0], "input_tokens": inputs, "output_tokens": outputs}
    trace = Trace(name, table(columns))
    return BenchResults(name, trace, ttft.astype(float), e2e.astype(float), client)


def _of_run(run: RecordedRun) -> BenchResults:
    if not len(run.requests):
        raise BadInput(f"{run.folder}: has no requests; give a run that served some")
    t = run.requests
    arrival, first, end = (
        t[name].to_numpy(np.float64) for name in ("arrival_s", "first_token_s", "finish_s")
    )
    return BenchResults(run.name, run.trace(), first - arrival, end - arrival)


def _json_rows(where: str, text: str) -> Iterator[Row]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: broken JSON ({error}); the file may be cut off") from None
    if "benchmarks" in document:
        yield from _guidellm_rows(where, document)
        return
    names = ("start_times", "input_lens", "output_lens", "ttfts", "itls")
    for name in names:
        if not isinstance(document.get(name), list):
            raise BadInput(f"{where}: {name} is missing; {_FORMS}")
    lists = [document[name] for name in names]
    if len({len(values) for values in lists}) > 1:
        raise BadInput(f"{where}: {', '.join(names)} must be equally long")
    for number, (start, inputs, outputs, ttft, itl) in enumerate(zip(*lists, strict=True), 1):
        at = f"{where}: request {number}"
        try:
            e2e = ttft + sum(itl)
        except TypeError:
            raise BadInput(f"{at}: ttfts must hold numbers, and itls lists of numbers") from None
        if outputs:
            yield _row(at, start, inputs, outputs, ttft, e2e)


def _guidellm_rows(where: str, document: dict[str, Any]) -> Iterator[Row]:
    for run, benchmark in enumerate(document["benchmarks"], 1):
        done = (benchmark.get("requests") or {}).get("successful")
        if not isinstance(done, list):
            raise BadInput(f"{where}: benchmark {run} has no requests.successful; save guidellm's full JSON")
        for number, request in enumerate(done, 1):
            at = f"{where}: benchmark {run}, request {number}"
            start = _first(at, request, "request_start_time", "start_time")
            latency = _first(at, request, "request_latency")
            ttft = _first(at, request, "time_to_first_token_ms") / 1e3
            inputs, outputs = _first(at, request, "prompt_tokens"), _first(at, request, "output_tokens")
            yield _row(at, start, inputs, outputs, ttft, latency)


def _aiperf_rows(where: str, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        at = f"{where}, line {number}"
        try:
            record = json.loads(line)
            about, metrics = record["metadata"], record["metrics"]
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{at}: no record of AIPerf ({error}); correct or remove the line") from None
        if about.get("benchmark_phase") == "warmup" or "output_sequence_length" not in metrics:
            continue

        names = "input_sequence_length", "output_sequence_length", "time_to_first_token", "request_latency"
        values = [_aiperf_value(at, metrics, name) for name in names]
        yield _row(at, _first(at, about, "request_start_ns") / 1e9, *values)


def _aiperf_value(where: str, metrics: dict[str, Any], name: str) -> float:
    """A metric; times in seconds."""
    entry = metrics.get(name)
    if not isinstance(entry, dict):
        raise BadInput(f"{where}: metrics.{name} is missing; run AIPerf with --streaming")
    scale = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}.get(str(entry.get("unit", "")), 1.0)
    return _first(where, entry, "value") * scale


def _csv_rows(where: str, text: str) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise BadInput(f"{where}: column {missing[0]} is missing; {_FORMS}")
    for number, row in enumerate(reader, 2):
        try:
            arrival, inputs, outputs, ttft, e2e = (float(str(row[name])) for name in _COLUMNS)
        except (TypeError, ValueError):
            raise BadInput(f"{where}, line {number}: {', '.join(_COLUMNS)} must be numbers") from None
        yield _row(f"{where}, line {number}", arrival, inputs, outputs, ttft, e2e)


def _first(where: str, fields: dict[str, Any], *names: str) -> float:
    for name in names:
        value = fields.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    raise BadInput(f"{where}: {names[0]} is missing or no number")


def _row(where: str, *numbers: float) -> Row:
    """A checked row of these numbers, in the order of `Row`. Errors: BadInput with the place."""
    try:
        start, inputs, outputs, ttft, e2e = map(float, numbers)
    except (TypeError, ValueError, OverflowError):
        raise BadInput(f"{where}: {', '.join(_COLUMNS)} must be numbers") from None
    if not np.isfinite((start, inputs, outputs, ttft, e2e)).all():
        raise BadInput(f"{where}: a time or a number of tokens is not finite")
    if not (1 <= inputs < HUGE and 1 <= outputs < HUGE):
        raise BadInput(f"{where}: {inputs:g} and {outputs:g} tokens; there is at least 1 and at most 2**53")
    if not 0 < ttft <= e2e + 1e-9:
        raise BadInput(f"{where}: TTFT is {ttft:g} s and E2E {e2e:g} s; TTFT must be positive and the lesser")
    return start, int(inputs), int(outputs), ttft, e2e
