"""Figures of a fleet: those of all its replicas together, and of what its router did.

Stale tokens are prompt tokens that the router believed cached and the replica had to compute, though it could
have had them cached: those in whole blocks before the last token, which is always computed. Herding and
imbalance are those of `sim.fleet.spread`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from pagecast.sim.fleet.choices import Choices
from pagecast.sim.fleet.member import Member
from pagecast.sim.fleet.spread import computed_tokens, herding, imbalance
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.replay.metrics import prefix_hits, whole_blocks
from pagecast.sim.replica.arrivals import NS
from pagecast.traces.arrays import Ints

_REPLICA_COLUMNS = (
    *(
        "row",
        "state",
        "arrival_s",
        "admitted_s",
        "input_tokens",
        "cached_tokens",
        "partial_tokens",
        "output_tokens",
    ),
    *("ttft_s", "tpot_s"),
)
_LEAVES = ("draining", "lost")  # events after which a replica takes no more requests


def routing_figures(
    table: pd.DataFrame,
    routers: list[Choices],
    believed: list[int],
    served: dict[int, pd.DataFrame],
    block_sizes: Ints,
) -> dict[str, Any]:
    """How a router spread the requests: herding, imbalance and stale tokens.

    `served`: the rows that ended on each replica, by its number. `block_sizes`: tokens per block where each
    row of `table` was served.
    """
    admitted = table["admitted_s"].notna().to_numpy()
    rows, cached, prompts = (
        table[name].to_numpy(np.int64)[admitted] for name in ("row", "cached_tokens", "input_tokens")
    )
    claimed = np.array(believed, dtype=np.int64)[rows]
    cacheable = np.minimum(claimed, whole_blocks(prompts, block_sizes[admitted]))
    return {
        "herding": herding(routers),
        "imbalance": imbalance(routers, served, len(believed)),
        "believed_tokens": int(claimed.sum()),
        "stale_tokens": int(np.maximum(cacheable - cached, 0).sum()),
    }


def gpu_figures(members: list[Member], table: pd.DataFrame, price: float | None) -> dict[str, Any]:
    """GPUs from each replica's start to its end, counted within the makespan.

    The makespan is from the first arrival to the end of the last request: a replica that was there before the
    first arrival counts from then. `gpu_hours` and their price, `peak_gpus` held at once, and `mean_gpus`
    held by type; `least_replicas` and `peak_replicas` that were there at once.
    """
    first_ns = float(table["arrival_s"].min()) * NS
    last_ns = max(float(np.nanmax(table["finished_s"].to_numpy(np.float64), initial=0.0)) * NS, first_ns)
    hours = 0.0
    mean: dict[str, float] = {}
    spans: list[tuple[float, float, int]] = []
    for member in members:
        begin_ns = max(member.started_ns, first_ns)
        end_ns = last_ns if member.gone_ns is None else min(member.gone_ns, last_ns)
        held_ns = max(end_ns - begin_ns, 0.0)
        gpus = member.scenario.tensor_parallel_size
        kind = find_gpu(member.scenario.gpu).name
        hours += held_ns / 3.6e12 * gpus
        share = held_ns / (last_ns - first_ns) if last_ns > first_ns else 1.0
        mean[kind] = mean.get(kind, 0.0) + share * gpus
        if begin_ns <= end_ns:
            spans.append((begin_ns, end_ns, gpus))
    least, most = _at_once([(begin, end, 1) for begin, end, _ in spans], first_ns, last_ns)
    return {
        "least_replicas": least,
        "peak_replicas": most,
        "gpu_hours": hours,
        "cost": None if price is None else hours * price,
        "peak_gpus": _at_once(spans, first_ns, last_ns)[1],
        "mean_gpus": mean,
    }


def _at_once(spans: list[tuple[float, float, int]], first: float, last: float) -> tuple[int, int]:
    """The least and the most that is held at once from `first` to `last`, of `(begin, end, how much)`.

    What ends when something else begins is held beside it: it is handed over.
    """
    changes = [(begin, held) for begin, _, held in spans] + [(end, -held) for _, end, held in spans]
    held = most = 0
    after: dict[float, int] = {first: 0}  # what is held after each time at which something changes
    for time, change in sorted(changes, key=lambda entry: (entry[0], -entry[1])):
        held += change
        most = max(most, held)
        after[time] = held
    return min((level for time, level in after.items() if time < last), default=most), most


def ready_over_time(timeline: pd.DataFrame) -> pd.DataFrame:
    """How many replicas take requests (`replicas`) from each time on (`time_s`), of a result's timeline."""
    ready: set[str] = set()
    rows: dict[float, int] = {0.0: 0}
    for time_s, replica, event in timeline[["time_s", "replica", "event"]].itertuples(index=False):
        if event == "ready":
            ready.add(replica)
        elif event in _LEAVES:
            ready.discard(replica)
        rows[float(time_s)] = len(ready)
    return pd.DataFrame({"time_s": list(rows), "replicas": list(rows.values())})


def ready_shares(log: list[tuple[int, str, str]], start_s: float, end_s: float) -> dict[str, float]:
    """For which share of a time each replica took requests; those that never did are left out.

    `log`: times in nanoseconds, replica names and what happened, in order.
    """
    begun: dict[str, float] = {}
    ready_s: dict[str, float] = {}
    for time_ns, name, event in log:
        time_s = min(max(time_ns / NS, start_s), end_s)
        if event == "ready":
            begun[name] = time_s
        elif event in _LEAVES and name in begun:
            ready_s[name] = time_s - begun.pop(name)
    ready_s |= {name: end_s - time_s for name, time_s in begun.items()}
    return {name: seconds / (end_s - start_s) for name, seconds in ready_s.items() if seconds}


def by_replica(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of each replica that has any, with the columns that figures of a replica are made of."""
    codes, names = pd.factorize(table["replica"])
    counts = np.bincount(codes, minlength=len(names))
    ends = np.cumsum(counts)
    ordered = table[list(_REPLICA_COLUMNS)].iloc[np.argsort(codes, kind="stable")]
    return {
        name: ordered.iloc[end - count : end] for name, count, end in zip(names, counts, ends, strict=True)
    }


def replica_figures(table: pd.DataFrame, member: Member) -> dict[str, Any]:
    """Figures of one replica: the requests that it served (`table`), how fast, and what was cached."""
    limits, scheduler = member.limits, member.scheduler
    states = table["state"].to_numpy()
    completed = states == "completed"
    output = int(table["output_tokens"].to_numpy(np.int64)[states != "rejected"].sum())
    return {
        "replica": member.name,
        "gpu": f"{member.scenario.tensor_parallel_size} x {member.scenario.gpu}",
        "requests": len(table),
        "completed": int(completed.sum()),
        "rejected": int((states == "rejected").sum()),
        "computed_tokens": int(computed_tokens(table).sum()),
        "output_tokens": output,
        "token_hit_rate": prefix_hits(table, limits.block_size).rate,
        "ttft_p99_s": _p99(table["ttft_s"]),
        "tpot_p99_s": _p99(table["tpot_s"]),
        "num_gpu_blocks": limits.num_blocks,
        "peak_kv_usage": member.recorder.peak_used_blocks / limits.num_blocks,
        "evicted_blocks": scheduler.memory.evicted_blocks,
        "preemptions": scheduler.preemptions,
        "steps": member.recorder.step_count,
    }


def _p99(column: pd.Series) -> float | None:
    values = column.to_numpy(np.float64)
    values = values[~np.isnan(values)]
    return float(np.percentile(values, 99)) if len(values) else None
