"""Summary of what replicas served: the figures of one replica, or of several together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pagecast.sim.core.limits import Limits
from pagecast.sim.replay.eviction_figures import merged_eviction
from pagecast.sim.replay.metrics import (
    PROMPT_TOKENS,
    PrefixHits,
    cached_and_uncached,
    latency_summary,
    prefill_avoided_s,
    prefix_hits,
    prompt_sources,
    statistics,
)
from pagecast.sim.replay.offloading_figures import offloading_figures
from pagecast.sim.replay.rejections import kind
from pagecast.sim.replay.sequence_bytes import bytes_per_sequence
from pagecast.sim.replay.served import Served
from pagecast.sim.replay.tenancy import merged, tenant_figures
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.speculation.speculation import draft_figures
from pagecast.traces.arrays import Ints
from pagecast.traces.schema import Trace

_SUMS = (
    "requests",
    "completed",
    "rejected",
    "cancelled",
    "steps",
    "input_tokens",
    "output_tokens",
    "prefill_avoided_s",
    "eligible_prefix_tokens",
    "reused_prefix_tokens",
    "num_gpu_blocks",
    "evicted_blocks",
    "preemptions",
    "recomputed_tokens",
    "failed_allocations",
)


def by_spec(replicas: Sequence[Served]) -> dict[ReplicaSpec, list[Served]]:
    """The replicas of each kind, in their order."""
    kinds: dict[ReplicaSpec, list[Served]] = {}
    for served in replicas:
        kinds.setdefault(served.spec, []).append(served)
    return kinds


def summary(
    trace: Trace,
    replicas: Sequence[Served],
    table: pd.DataFrame,
    wall_s: float,
    *,
    of_kind: Sequence[pd.DataFrame] = (),
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The figures of replicas that have served `trace`; `table` has the requests that ended.

    `of_kind`: the requests of each kind of replica, where there are several. `more`: figures that follow
    those of the requests. The table gets the trace's column `tenant`, if it has one.
    """
    parts = []
    kinds = by_spec(replicas)
    for (spec, alike), own in zip(kinds.items(), of_kind or [table], strict=True):
        part = summarise(own, counters(alike), spec, wall_s)
        part["num_gpu_blocks"] *= len(alike)
        parts.append(part)
    figures = combine(parts, table, wall_s)
    figures["costs"] = " and ".join(dict.fromkeys(part["costs"] for part in parts))
    scenarios = [spec.scenario for spec in kinds]
    figures["engine"] = " and ".join(dict.fromkeys(scenario.engine for scenario in scenarios))
    if len(scenarios) == 1:
        figures["defaults"] = scenarios[0].defaults
    figures |= more or {}
    if "tenant" in trace.requests:
        table["tenant"] = trace.column("tenant").fillna("").to_numpy()[table["row"]]
    figures |= core_figures(replicas, table)
    servers = [served.replica for served in replicas]
    if speculating := [server.speculation for server in servers if server.speculation is not None]:
        figures["itl_s"] = statistics(np.concatenate([part.gaps_s() for part in speculating]))
        figures["speculation"] = draft_figures(speculating)
    if offloading := offloading_figures(servers, table, figures["makespan_s"]):
        figures["offloading"] = offloading
    without_unknown_hits(trace, figures, *figures.get("tenants", {}).values())
    return figures


def without_unknown_hits(trace: Trace, *figures: dict[str, Any]) -> None:
    """Replaces hit rates with None where the trace tells lengths alone: its zero hits are not known."""
    if trace.lengths_only:
        for each in figures:
            each["token_hit_rate"] = None


def block_sizes(replicas: Sequence[Served], table: pd.DataFrame) -> int | Ints:
    """Tokens per block where each request was served, or of all of them."""
    if "replica" not in table:
        return replicas[0].spec.limits.block_size
    sizes = {served.name: served.spec.limits.block_size for served in replicas}
    return np.array(table["replica"].map(sizes).fillna(1), dtype=np.int64)


def core_figures(replicas: Sequence[Served], table: pd.DataFrame) -> dict[str, Any]:
    """Figures of the core's optional parts, by their name in the summary: empty where all are off.

    What each replica counted is added up.
    """
    figures: dict[str, Any] = {}
    for served in replicas:
        for part, counts in _counts(served).items():
            total = figures.setdefault(part, dict.fromkeys(counts, 0))
            for name, count in counts.items():
                total[name] += count
    if eviction := merged_eviction([served.scheduler.memory.eviction_figures() for served in replicas]):
        figures["eviction"] = eviction
    if "tenant" not in table:
        return figures
    ledger = merged([served.scheduler.memory.ledger for served in replicas])
    return {"tenants": tenant_figures(table, ledger, block_sizes(replicas, table)), **figures}


def _counts(served: Served) -> dict[str, dict[str, Any]]:
    memory = served.scheduler.memory
    counts: dict[str, dict[str, Any]] = {}
    if memory.partial_reuse is not None:
        counts["partial_reuse"] = memory.partial_reuse.figures()
    if served.spec.scenario.tenancy.scrub_private_blocks and memory.ledger is not None:
        blocks = memory.ledger.private_blocks
        counts["scrubbing"] = {"blocks": blocks, "seconds": blocks * served.spec.scrub_ns_per_block * 1e-9}
    if (swap := served.scheduler.lifecycle.swap) is not None:
        counts["swap"] = {"out_tokens": swap.out_tokens, "in_tokens": swap.in_tokens}
    return counts


class Counters(NamedTuple):
    """Counters of a replica beside its requests; of several equal replicas the sums, and the highest peak."""

    steps: int
    peak_used_blocks: int
    evicted_blocks: int
    preemptions: int
    failed_allocations: int
    limits: Limits


def counters(alike: Sequence[Served]) -> Counters:
    """The counters of equal replicas together."""
    recorders = [served.recorder for served in alike]
    schedulers = [served.scheduler for served in alike]
    return Counters(
        sum(recorder.step_count for recorder in recorders),
        max(recorder.peak_used_blocks for recorder in recorders),
        sum(scheduler.memory.evicted_blocks for scheduler in schedulers),
        sum(scheduler.preemptions for scheduler in schedulers),
        sum(scheduler.failed_allocations for scheduler in schedulers),
        alike[0].spec.limits,
    )


def summarise(table: pd.DataFrame, counted: Counters, spec: ReplicaSpec, wall_s: float) -> dict[str, Any]:
    """The figures of one replica, or of several equal ones. `table` has the requests that ended there."""
    scenario, costs = spec.scenario, spec.costs
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


def combine(summaries: list[dict[str, Any]], table: pd.DataFrame, wall_s: float) -> dict[str, Any]:
    """The summary of several kinds of replicas, with the names and meanings of one replica's.

    `num_gpu_blocks` is of all of them, `peak_kv_usage` the highest of any. `table` has every request.
    """
    if len(summaries) == 1:
        return summaries[0]
    total: dict[str, Any] = dict(summaries[0])
    for name in _SUMS:
        total[name] = sum(summary[name] for summary in summaries)
    served = table[table["state"] != "rejected"]
    ends = served["finished_s"].to_numpy(np.float64)
    makespan = float(ends.max() - table["arrival_s"].min()) if len(served) else 0.0
    reasons: dict[str, int] = {}
    for summary in summaries:
        for reason, count in summary["rejected_reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    sources = [summary["prompt_tokens_by_source"] for summary in summaries]
    total["prompt_tokens_by_source"] = {kind: sum(each[kind] for each in sources) for kind in sources[0]}
    cached, uncached = cached_and_uncached(table)
    completed = [summary["completed"] for summary in summaries]
    sizes = [summary["bytes_per_sequence"] for summary in summaries]
    hits = PrefixHits(total["eligible_prefix_tokens"], total["reused_prefix_tokens"])
    total.update(
        makespan_s=makespan,
        wall_s=wall_s,
        output_tokens_per_s=total["output_tokens"] / makespan if makespan > 0 else 0.0,
        **latency_summary(table),
        ttft_cached_s=cached,
        ttft_uncached_s=uncached,
        bytes_per_sequence=float(np.average(sizes, weights=completed)) if sum(completed) else 0.0,
        token_hit_rate=hits.rate,
        peak_kv_usage=max(summary["peak_kv_usage"] for summary in summaries),
        rejected_reasons=reasons,
    )
    return total
