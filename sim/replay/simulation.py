"""`replay(trace, scenario)`: how a server would have served a trace.

A replay is a pure function of trace, scenario and seed.

Clients submit the trace's requests, the scheduler of `sim.core` decides each step, and the scenario's step
costs time it. Times are seconds in results, integer nanoseconds inside.

    >>> from pagecast.sim.replay import replay
    >>> from pagecast.sim.scenario import Scenario
    >>> from pagecast.traces.read import read
    >>> result = replay(read("chat", limit=50), Scenario())
    >>> result.summary["completed"], round(result.summary["token_hit_rate"], 3)
    (50, 0.677)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import simpy
from pagecast.sim.core.check import Checker
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.kv_events import KvEventStream
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replay.clients import Arrivals
from pagecast.sim.replay.eviction_figures import merged_eviction
from pagecast.sim.replay.folder import replacing, save, save_summary
from pagecast.sim.replay.kv_event_file import KvEventFile
from pagecast.sim.replay.metrics import (
    PROMPT_TOKENS,
    Ints,
    cached_and_uncached,
    latency_summary,
    prefill_avoided_s,
    prefix_hits,
    prefix_lookup_s,
    prompt_sources,
    request_table,
)
from pagecast.sim.replay.notes import notes
from pagecast.sim.replay.offloading_figures import offloading_figures
from pagecast.sim.replay.recorder import Recorder
from pagecast.sim.replay.rejections import kind
from pagecast.sim.replay.replica import Replica
from pagecast.sim.replay.rollout import RevisionWatch, peak_admission, rollout_figures, watch_revision
from pagecast.sim.replay.set_up import set_up
from pagecast.sim.replay.speculating import speculation_figures
from pagecast.sim.replay.tenancy import isolation_price, merged, tenant_figures, without_salts
from pagecast.sim.replay.windows import bytes_per_sequence
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

Progress = Callable[[int], None]  # called now and then with the number of requests that have ended
_SLICE = 4096


@dataclass(frozen=True)
class Result:
    """A replay's figures. `summary` is what `pagecast replay --json` prints.

    `requests` has a row per request (latencies in seconds), `steps` a row per step or fast-forwarded row of
    steps (nanoseconds; empty with `keep_steps=False`). `notes` are sentences that qualify the figures.
    `pool_blocks`: the pool that `used_blocks` of `steps` are of, in blocks of sequences, which take several
    of `num_gpu_blocks` each where `windows.py` says so; 0 for a fleet, whose replicas have their own.
    """

    trace: str
    scenario: Scenario
    summary: dict[str, Any]
    requests: pd.DataFrame
    steps: pd.DataFrame
    notes: tuple[str, ...]
    pool_blocks: int = field(default=0, kw_only=True)


def replay(
    trace: Trace,
    scenario: Scenario,
    *,
    costs: StepCosts | None = None,
    arrivals: Callable[[Trace], Arrivals] = Arrivals,
    keep_steps: bool = True,
    out: str | Path | None = None,
    fast_forward: bool = True,
    check_every: int = 0,
    progress: Progress | None = None,
    kv_events: bool = False,
    compare: bool = True,
) -> Result:
    """Serves `trace` on one replica of `scenario` and returns its figures.

    `costs` replaces the scenario's cost model. `arrivals` makes the clients from the trace: by default they
    keep to its times; `partial(ClosedLoop, users=8)` are users who wait for an answer.
    `out`: a folder for `summary.json`, `requests.parquet`, `steps.parquet`, `events.parquet`,
    `trace.parquet` and `scenario.yaml`; it changes only once all is written. `check_every`: proves every
    invariant of the core each so many steps (and cheap ones on each). `kv_events`: write `kv_events.jsonl` as
    well, in vLLM's vocabulary (`kv_event_file.py`). `compare`: replay again where the scenario asks for
    figures that compare two replays (`rollout`, `isolation`); without, they are left out.
    Errors: BadInput for a trace, scenario or folder that can't be used; AssertionError from a check that
    fails.
    """
    if not len(trace):
        raise BadInput(f"{trace.name}: the trace has no requests")
    costs = costs or scenario.step_costs()
    with replacing(out) as folder:
        recorder = Recorder(keep_steps=keep_steps, out=folder)
        stream = KvEventStream() if kv_events and folder is not None else None
        scheduler, feed, speculation, share = set_up(
            trace, scenario, costs, log=folder is not None, kv_events=stream, numbered=check_every > 0
        )
        limits = scheduler.limits
        recorder.events = scheduler.events
        if stream is not None and folder is not None:
            recorder.kv_events = KvEventFile(folder / "kv_events.jsonl", stream)
        clients = arrivals(trace)
        checker = Checker(scheduler, check_every) if check_every else None
        env = simpy.Environment()
        started = time.perf_counter()
        replica = Replica(
            env,
            scheduler,
            costs,
            clients,
            feed,
            recorder,
            fast_forward=fast_forward,
            after_step=checker.after_step if checker else None,
            speculation=speculation,
            links=scenario.host_links(costs),
            swap_ns_per_token=scenario.swap_ns_per_token() if scenario.swaps else 0.0,
            scrub_ns_per_block=scenario.scrub_ns_per_block() if scenario.scrub_private_blocks else 0.0,
        )
        watch = watch_revision(scenario, scheduler, feed.new_keys, partial(getattr, replica, "clock"))
        _run(env, recorder, progress)
        wall_s = time.perf_counter() - started
        recorder.close()
        check_all_ended(scheduler)
        rows, caching = recorder.requests(), scenario.enable_prefix_caching
        table = request_table(rows, prefix_lookup_s(rows, costs, caching=caching), recorder.reasons)
        summary = summarise(table, counters(recorder, scheduler), scenario, costs, wall_s)
        if "tenant" in trace.requests:
            table["tenant"] = trace.column("tenant").fillna("").to_numpy()[table["row"]]
        summary |= core_figures([(scenario, scheduler)], table, limits.block_size)
        if watch is not None:
            summary["peak"] = peak_admission(table, limits, costs, recorder.most_requests)
        if speculation is not None:
            summary |= speculation_figures([speculation])
        if offloading := offloading_figures([replica], table, summary["makespan_s"]):
            summary["offloading"] = offloading
        remarks = notes(trace, scenario, costs, table, recorder, share)
        steps, pool = recorder.steps(), limits.num_blocks
        result = Result(trace.name, scenario, summary, table, steps, remarks, pool_blocks=pool)
        if folder is not None:
            save(folder, trace, scenario, costs.name, summary, table)
    if compare:
        again = partial(replay, costs=costs, arrivals=arrivals, keep_steps=False)
        add_comparisons(trace, scenario, result, [watch] if watch is not None else [], again, out)
    return result


def check_all_ended(scheduler: Scheduler) -> None:
    """Errors: BadInput where requests wait for one another for ever, AssertionError for others left over."""
    count = len(scheduler.requests)
    if count and scheduler.offloading is not None and scheduler.offloading.holders:
        raise BadInput(f"{count} requests are never served: {_why_never(scheduler.limits)}")
    if count:
        raise AssertionError(f"{count} requests never ended")


def _why_never(limits: Limits) -> str:
    """Why requests wait for one another for ever, and what to do."""
    cause = "the first in the queue needs blocks that a loaded request behind it holds"
    tenants = limits.tenants
    if tenants is not None and tenants.limited:
        return (
            f"{cause}; a ceiling in `tenants` held back requests in front while those behind them loaded; "
            "raise the ceilings, give more blocks, or leave out kv_offloading_size"
        )
    if tenants is not None and tenants.fair:
        return (
            f"{cause}; weights in `tenants` put it in front of what had loaded; "
            "give more blocks, leave out the weights, or leave out kv_offloading_size"
        )
    return f"{cause} (as in vLLM 0.24); give more blocks, or use fcfs"


def core_figures(
    parts: Sequence[tuple[Scenario, Scheduler]], table: pd.DataFrame, block_size: int | Ints
) -> dict[str, Any]:
    """Figures of the core's optional parts, by their name in the summary: empty where all are off.

    `parts`: each replica's scenario and scheduler; what they counted is added up. `block_size`: in tokens, of
    all rows of `table` or of each.
    """
    figures: dict[str, Any] = {}
    for scenario, scheduler in parts:
        for part, counts in _counts(scenario, scheduler).items():
            total = figures.setdefault(part, dict.fromkeys(counts, 0))
            for name, count in counts.items():
                total[name] += count
    if eviction := merged_eviction([scheduler.memory.eviction_figures() for _, scheduler in parts]):
        figures["eviction"] = eviction
    if "tenant" not in table:
        return figures
    ledger = merged([scheduler.memory.ledger for _, scheduler in parts])
    return {"tenants": tenant_figures(table, ledger, block_size), **figures}


def _counts(scenario: Scenario, scheduler: Scheduler) -> dict[str, dict[str, Any]]:
    memory = scheduler.memory
    counts: dict[str, dict[str, Any]] = {}
    if memory.partial_reuse is not None:
        counts["partial_reuse"] = memory.partial_reuse.figures()
    if scenario.scrub_private_blocks and memory.ledger is not None:
        blocks = memory.ledger.private_blocks
        counts["scrubbing"] = {"blocks": blocks, "seconds": blocks * scenario.scrub_ns_per_block() * 1e-9}
    if (swap := scheduler.lifecycle.swap) is not None:
        counts["swap"] = {"out_tokens": swap.out_tokens, "in_tokens": swap.in_tokens}
    return counts


def add_comparisons(
    trace: Trace,
    scenario: Scenario,
    result: Result,
    watches: Sequence[RevisionWatch],
    again: Callable[[Trace, Scenario], Result],
    out: str | Path | None,
) -> None:
    """Adds the figures that need a second replay: the cost of a rollout, and the price of isolation.

    `watches`: one for each replica, where there is a rollout. `again` makes the other replays. `out`: the
    folder of the result, if it has one.
    """
    figures: dict[str, Any] = {}
    if watches:
        before = again(trace, scenario.model_copy(update={"rollout_at_s": None, "isolation_price": False}))
        figures["rollout"] = rollout_figures(watches, result.requests, before.summary, result.summary)
    if scenario.isolation_price:
        shared = scenario.model_copy(update={"isolation": "salt", "isolation_price": False})
        other = again(without_salts(trace), shared)
        figures["isolation"] = isolation_price(result.summary, other.summary)
    if not figures:
        return
    result.summary.update(figures)
    if out is not None:
        save_summary(Path(out), result.summary)


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


class Counters(NamedTuple):
    """Counters of a replica beside its requests; of several equal replicas the sums, and the highest peak."""

    steps: int
    peak_used_blocks: int
    evicted_blocks: int
    preemptions: int
    failed_allocations: int
    limits: Limits


def counters(recorder: Recorder, scheduler: Scheduler) -> Counters:
    """The counters of one replica."""
    return Counters(
        recorder.step_count,
        recorder.peak_used_blocks,
        scheduler.memory.evicted_blocks,
        scheduler.preemptions,
        scheduler.failed_allocations,
        scheduler.limits,
    )


def summarise(
    table: pd.DataFrame,
    counted: Counters,
    scenario: Scenario,
    costs: StepCosts,
    wall_s: float,
) -> dict[str, Any]:
    """The figures of one replica, or of several equal ones. `table` has the requests that ended there."""
    states = table["state"].to_numpy(object)
    inputs, outputs = (table[name].to_numpy(np.int64) for name in ("input_tokens", "output_tokens"))
    completed, rejected = states == "completed", states == "rejected"
    ends = table["finished_s"].to_numpy(np.float64)[~rejected]
    makespan = float(ends.max() - table["arrival_s"].min()) if len(ends) else 0.0
    output = int(outputs[~rejected].sum())
    admitted = table[list(PROMPT_TOKENS)][table["admitted_s"].notna()]
    hits = prefix_hits(table, counted.limits.block_size)
    sequence_tokens = (inputs + outputs - 1)[completed].tolist()
    cached, uncached = cached_and_uncached(table)
    refused = table["reason"][rejected].map(kind).value_counts()
    return {
        "requests": len(table),
        "completed": int(completed.sum()),
        "rejected": int(rejected.sum()),
        "cancelled": int((states == "cancelled").sum()),
        "makespan_s": makespan,
        "wall_s": wall_s,
        "steps": counted.steps,
        "input_tokens": int(inputs[~rejected].sum()),
        "output_tokens": output,
        "output_tokens_per_s": output / makespan if makespan > 0 else 0.0,
        **latency_summary(table),
        "prefill_avoided_s": prefill_avoided_s(admitted, costs),
        "ttft_cached_s": cached,
        "ttft_uncached_s": uncached,
        "bytes_per_sequence": bytes_per_sequence(sequence_tokens, scenario),
        "eligible_prefix_tokens": hits.eligible,
        "reused_prefix_tokens": hits.reused,
        "prompt_tokens_by_source": prompt_sources(admitted),
        "token_hit_rate": hits.rate,
        "num_gpu_blocks": scenario.blocks(),
        "peak_kv_usage": counted.peak_used_blocks / counted.limits.num_blocks,
        "evicted_blocks": counted.evicted_blocks,
        "preemptions": counted.preemptions,
        "recomputed_tokens": int(table["recomputed_tokens"].sum()),
        "failed_allocations": counted.failed_allocations,
        "rejected_reasons": {str(reason): int(count) for reason, count in refused.items()},
        "costs": costs.name,
        "expected_error": costs.expected_error(),
    }
