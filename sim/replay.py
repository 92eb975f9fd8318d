"""`replay(trace, scenario)`: how a server would have served a trace.

A replay is a pure function of trace, scenario and seed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import simpy
from pagecast.sim.arrivals import Arrivals
from pagecast.sim.core.check import Checker
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.profile import profile as find_profile
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.costs import StepCosts
from pagecast.sim.feed import Feed
from pagecast.sim.metrics import cached_and_uncached, latency_summary, prefill_avoided_s, request_table
from pagecast.sim.models import model as find_model
from pagecast.sim.recorder import Recorder
from pagecast.sim.replica import Replica
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

Progress = Callable[[int], None]  # told now and then how many requests have ended
_SLICE = 4096


@dataclass(frozen=True)
class Result:
    """A replay's figures. `summary` is what `pagecast replay --json` prints.

    `requests` has a row a request (latencies in seconds), `steps` a row a step or fast-forwarded row of
    steps (nanoseconds; empty unless asked for). `notes` are sentences that qualify the figures.
    """

    trace: str
    scenario: Scenario
    summary: dict[str, Any]
    requests: pd.DataFrame
    steps: pd.DataFrame
    notes: tuple[str, ...]


def replay(
    trace: Trace,
    scenario: Scenario,
    *,
    costs: StepCosts | None = None,
    keep_steps: bool = True,
    out: str | Path | None = None,
    fast_forward: bool = True,
    check_every: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Serves `trace` on one replica of `scenario` and returns its figures.

    `costs` replaces the scenario's cost model. `out`: a folder for `summary.json`, `requests.parquet`,
    `steps.parquet`, `events.parquet`, `trace.parquet` and `scenario.yaml`. `check_every`: proves every
    invariant of the core each so many steps (and cheap ones on each). Errors: BadInput for a trace or
    scenario that can't be used; AssertionError from a check that fails.
    """
    limits = scenario.limits()
    costs = costs or scenario.step_costs()
    if not len(trace):
        raise BadInput(f"{trace.name}: the trace has no requests")
    folder = _make_folder(out)
    recorder = Recorder(keep_steps=keep_steps, out=folder)
    scheduler = Scheduler(limits, find_profile(scenario.profile), log=folder is not None)
    recorder.events = scheduler.events
    feed = Feed(trace, limits.block_size)
    arrivals = Arrivals(trace)
    checker = Checker(scheduler, check_every) if check_every else None
    env = simpy.Environment()
    started = time.perf_counter()
    Replica(
        env, scheduler, costs, arrivals, feed, recorder,
        fast_forward=fast_forward, after_step=checker.after_step if checker else None,
    )  # fmt: skip
    _run(env, recorder, progress)
    wall_s = time.perf_counter() - started
    recorder.close()
    if len(scheduler.requests):
        raise AssertionError(f"{len(scheduler.requests)} requests never ended")
    requests = request_table(recorder.requests(), costs, recorder.reasons)
    summary = _summary(requests, recorder, scheduler, scenario, costs, wall_s)
    result = Result(
        trace.name, scenario, summary, requests, recorder.steps(), _notes(trace, scenario, costs, requests)
    )
    if folder is not None:
        _save(result, trace, folder)
    return result


def _run(env: simpy.Environment, recorder: Recorder, progress: Progress | None) -> None:
    step = env.step
    try:
        while True:
            for _ in range(_SLICE):
                step()
            if progress is not None:
                progress(recorder.ended)
    except simpy.core.EmptySchedule:
        if progress is not None:
            progress(recorder.ended)


def _summary(
    table: pd.DataFrame,
    recorder: Recorder,
    scheduler: Scheduler,
    scenario: Scenario,
    costs: StepCosts,
    wall_s: float,
) -> dict[str, Any]:
    states = table["state"].value_counts()
    served = table[table["state"] != "rejected"]
    completed = table[table["state"] == "completed"]
    ends = served["finished_s"].to_numpy(np.float64)
    makespan = float(ends.max() - table["arrival_s"].min()) if len(served) else 0.0
    output = int(completed["output_tokens"].sum())
    size = scheduler.limits.block_size
    admitted = table[table["admitted_s"].notna()]
    eligible = int(((admitted["input_tokens"] - 1) // size * size).sum())
    reused = int(admitted["cached_tokens"].sum())
    blocks = np.ceil((completed["input_tokens"] + completed["output_tokens"] - 1) / size)
    cached, uncached = cached_and_uncached(table)
    return {
        "requests": len(table),
        "completed": int(states.get("completed", 0)),
        "rejected": int(states.get("rejected", 0)),
        "cancelled": int(states.get("cancelled", 0)),
        "makespan_s": makespan,
        "wall_s": wall_s,
        "steps": recorder.step_count,
        "input_tokens": int(completed["input_tokens"].sum()),
        "output_tokens": output,
        "output_tokens_per_s": output / makespan if makespan > 0 else 0.0,
        **latency_summary(table),
        "prefill_avoided_s": prefill_avoided_s(admitted, costs),
        "ttft_cached_s": cached,
        "ttft_uncached_s": uncached,
        "bytes_per_sequence": float(blocks.mean() * scenario.bytes_per_block()) if len(completed) else 0.0,
        "eligible_prefix_tokens": eligible,
        "reused_prefix_tokens": reused,
        "token_hit_rate": reused / eligible if eligible else 0.0,
        "num_gpu_blocks": scheduler.limits.num_blocks,
        "peak_kv_usage": recorder.peak_used_blocks / scheduler.limits.num_blocks,
        "evicted_blocks": scheduler.pool.evicted_blocks,
        "preemptions": scheduler.preemptions,
        "failed_allocations": scheduler.failed_allocations,
        "costs": costs.name,
        "expected_error": costs.expected_error(),
    }


def _notes(trace: Trace, scenario: Scenario, costs: StepCosts, table: pd.DataFrame) -> tuple[str, ...]:
    notes = [*trace.notes, costs.expected_error()]
    longest = int((table["input_tokens"] + table["output_tokens"]).max())
    most = getattr(find_model(scenario.model), "max_position_embeddings", None)
    if most and longest > most and scenario.max_model_len is None:
        notes.append(
            f"The longest request has {longest} tokens; {scenario.model} was made for {most}, and an engine "
            f"would refuse it unless told otherwise. --max-model-len {most} rejects such requests."
        )
    return tuple(notes)


def _make_folder(out: str | Path | None) -> Path | None:
    if out is None:
        return None
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {folder}: can't be made ({error.strerror}); name a folder") from None
    return folder


def _save(result: Result, trace: Trace, folder: Path) -> None:
    from pagecast.traces.write import write_parquet

    result.requests.to_parquet(folder / "requests.parquet", index=False)
    result.scenario.save(folder / "scenario.yaml")
    write_parquet(trace, folder / "trace.parquet")
    (folder / "summary.json").write_text(json.dumps(result.summary, indent=1) + "\n", encoding="utf-8")
