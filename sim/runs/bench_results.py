"""Request-level results of a benchmark: when each request was sent, and when its tokens came.

Read from what load tools write, as traces are (`traces.read`): every format that has latencies beside the
requests. Or the requests of a recorded run's folder, whose steps are not looked at. Latencies count from the
arrival, in seconds. Those of files are a client's, those of a folder the engine's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.sim.runs.client_share import CLIENT_SHARE, ClientShare, known_share
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.traces.arrays import Floats
from pagecast.traces.read import read
from pagecast.traces.schema import MEASURED, Trace

_MODELS = ("model_id", "model")
_MOST_BYTES = 1 << 30
_FORMS = (
    "give what `vllm bench serve --save-result --save-detailed`, SGLang's bench_serving --output-details, "
    "guidellm, AIPerf or inference-perf wrote, a log with times of first and last tokens, a recorded run's "
    "folder, or a CSV with the columns arrival_s, input_tokens, output_tokens, ttft_s, e2e_s"
)


@dataclass(frozen=True)
class BenchResults:
    """Requests in order of arrival, each with its measured latencies in seconds.

    `client`: what a client's latencies hold beside the engine's; None where they are the engine's own.
    `longest_gap_s`: the longest time between two tokens of each; None where none is known.
    """

    name: str
    trace: Trace
    ttft_s: Floats
    e2e_s: Floats
    client: ClientShare | None = None
    longest_gap_s: Floats | None = None

    @property
    def tpot_s(self) -> Floats:
        """Seconds per token after the first; NaN for one token."""
        tokens = self.trace.integers("output_tokens")
        spread = self.e2e_s - self.ttft_s
        return np.asarray(np.where(tokens > 1, spread / np.maximum(tokens - 1, 1), np.nan))

    def compared(self, requests: pd.DataFrame) -> pd.DataFrame:
        """The rows of a replay's requests whose latencies were measured."""
        measured = np.isfinite(self.ttft_s) | np.isfinite(self.e2e_s)
        rows = np.flatnonzero(measured[requests["row"].to_numpy()])
        return requests.iloc[rows]


def is_results(path: str | Path) -> bool:
    """Whether `path` is a file of results, not the folder of a recorded run."""
    return Path(path).is_file()


def read_results(
    path: str | Path, client_ms: float | None = None, *, run: int | None = None, columns: Sequence[str] = ()
) -> BenchResults:
    """Reads one file or folder. Errors: BadInput with the file and what is missing.

    `client_ms`: what the latencies of a file hold beside the engine's, where that is known. `run`, `columns`:
    as for `traces.read.read`.
    """
    where = Path(path)
    if where.is_dir():
        if client_ms is not None:
            raise BadInput(f"{where}: a recorded run has the engine's own latencies; leave out --client-ms")
        return _of_run(RecordedRun.load(where))
    trace = read(where, sort=True, run=run, columns=columns or None, max_bytes=_MOST_BYTES)
    client = CLIENT_SHARE if client_ms is None else known_share(client_ms)
    if trace.measured is None:
        raise BadInput(f"{where}: no request in it has latencies; {_FORMS}")
    ttft, e2e, gaps = (trace.measured[name].to_numpy(np.float64) for name in MEASURED)
    if not np.isfinite(ttft).any():
        raise BadInput(f"{where}: no request in it has a TTFT; measure with streaming (AIPerf: --streaming)")
    bad = np.flatnonzero((ttft <= 0) | (ttft > e2e + 1e-9))
    if len(bad):
        row = int(bad[0])
        raise BadInput(
            f"{where}: request {row + 1}, in order of arrival, has a TTFT of {ttft[row]:g} s and an E2E of "
            f"{e2e[row]:g} s; TTFT must be positive and the lesser"
        )
    arrival = trace.seconds("arrival_s")
    requests = trace.requests.assign(arrival_s=arrival - np.nanmin(arrival))
    longest = gaps if np.isfinite(gaps).any() else None
    return BenchResults(trace.name, replace(trace, requests=requests), ttft, e2e, client, longest)


def model_named(path: str | Path) -> str | None:
    """The model that a file of results names beside its requests, as `vllm bench serve` does; else None."""
    where = Path(path)
    if where.suffix not in (".json", ".jsonl") or not where.is_file() or where.stat().st_size > _MOST_BYTES:
        return None
    try:
        text = where.read_text(encoding="utf-8")
        body = json.loads(text if where.suffix == ".json" else text.partition("\n")[0])
    except ValueError:  # the reader says what is wrong
        return None
    named = (body.get(name) for name in _MODELS) if isinstance(body, dict) else ()
    return next((name for name in named if isinstance(name, str) and name), None)


def _of_run(run: RecordedRun) -> BenchResults:
    if not len(run.requests):
        raise BadInput(f"{run.folder}: has no requests; give a run that served some")
    t = run.requests
    arrival, first, end = (
        t[name].to_numpy(np.float64) for name in ("arrival_s", "first_token_s", "finish_s")
    )
    return BenchResults(run.name, run.trace(), first - arrival, end - arrival)
