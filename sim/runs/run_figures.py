"""Figures of a run, measured or simulated, in one form for comparison.

Times of a request count from its arrival: queue until its first step is planned, TTFT until its first
token, E2E until its last. TPOT is (last - first token) / (output tokens - 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay.metrics import statistics
from pagecast.sim.replay.result import Result
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import DecisionReplay
from pagecast.traces.arrays import Floats, Ints

LATENCIES = ("ttft_s", "tpot_s", "e2e_s", "queue_s")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
SCALARS = ("makespan_s", "output_tokens_per_s", "steps", "preemptions", "reused_prefix_tokens")


@dataclass(frozen=True)
class Timeline:
    """How many requests ran and waited from each time on (seconds), as long as steps were kept."""

    time_s: Floats
    running: Floats
    waiting: Floats


@dataclass(frozen=True)
class RunFigures:
    """Latencies in seconds, one per request that has them (in no order that matters), totals, and load."""

    latencies: dict[str, Floats]
    scalars: dict[str, float]
    timeline: Timeline

    def figures(self) -> dict[str, float]:
        """All figures by name: `ttft_s.p90`, `makespan_s` and so on; NaN where there is none."""
        figures: dict[str, float] = {}
        for name in LATENCIES:
            if name not in self.latencies:
                continue
            for key, value in statistics(self.latencies[name]).items():
                if key in STATISTICS:
                    figures[f"{name}.{key}"] = float("nan") if value is None else value
        return figures | self.scalars


def measured(run: RecordedRun) -> RunFigures:
    """A recorded run's figures. Admissions and preemptions, which it does not log, are those of the core
    on the run's own clock. Errors: BadInput for a run without requests."""
    if not len(run.requests):
        raise BadInput(f"{run.folder}: has no requests.csv.gz: a run of steady shapes can't be replayed")
    table = run.requests
    arrival, first, last, tokens = (
        table[name].to_numpy(np.float64) for name in ("arrival_s", "first_token_s", "finish_s", "tokens_out")
    )
    replay = DecisionReplay(run)
    for number in range(len(run.steps)):
        replay.step(number)
    replay.finish()
    requests = [request for request in replay.requests if request is not None]
    admitted = np.array([request.admitted_ns for request in requests], np.float64)
    queue = np.where(admitted >= 0, admitted / 1e9 - arrival[[request.index for request in requests]], np.nan)
    done = np.isfinite(last)
    makespan = float(np.nanmax(last) - arrival.min())
    tpot = np.where(tokens > 1, (last - first) / np.maximum(tokens - 1, 1), np.nan)
    return RunFigures(
        latencies={
            "ttft_s": _finite(first - arrival),
            "tpot_s": _finite(tpot),
            "e2e_s": _finite(last - arrival),
            "queue_s": _finite(queue),
        },
        scalars={
            "makespan_s": makespan,
            "output_tokens_per_s": float(tokens[done].sum()) / makespan,
            "steps": float(len(run.steps)),
            "preemptions": float(replay.scheduler.preemptions),
            "reused_prefix_tokens": float(table["cached_tokens"].sum()),
        },
        timeline=_timeline(run.steps.start_ns, run.steps.running, run.steps.waiting),
    )


def latency_figures(ttft_s: Floats, tpot_s: Floats, e2e_s: Floats) -> RunFigures:
    """The figures of requests of which only latencies are known."""
    empty = np.zeros(0)
    latencies = {"ttft_s": _finite(ttft_s), "tpot_s": _finite(tpot_s), "e2e_s": _finite(e2e_s)}
    return RunFigures(latencies, {}, Timeline(empty, empty, empty))


def simulated(result: Result) -> RunFigures:
    """A replay's figures."""
    table, summary = result.requests, result.summary
    latencies = {name: _finite(table[name].to_numpy(np.float64)) for name in ("ttft_s", "tpot_s", "e2e_s")}
    queue = table["admitted_s"].to_numpy(np.float64) - table["arrival_s"].to_numpy(np.float64)
    steps = result.steps
    return RunFigures(
        {**latencies, "queue_s": _finite(queue)},
        {name: float(summary[name]) for name in SCALARS},
        _timeline(*(steps[name].to_numpy() for name in ("start_ns", "running", "waiting"))),
    )


def _timeline(start_ns: Ints, running: Any, waiting: Any) -> Timeline:
    return Timeline(start_ns / 1e9, np.asarray(running, np.float64), np.asarray(waiting, np.float64))


def _finite(values: Floats) -> Floats:
    return np.asarray(values[np.isfinite(values)], np.float64)
