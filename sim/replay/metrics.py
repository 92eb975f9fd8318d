"""Metrics of a replay, from its rows: TTFT, TPOT, hits, occupancy.

TTFT is first token minus arrival. TPOT is (last - first token) / (output tokens - 1); a request of one
token has none. Percentiles are linear. Rejected requests count as rejects and nowhere else; cancelled ones
in what they had reached: their queue, their TTFT, the tokens they were given. A request's time splits into
queue, prefix lookup, prefill and decode, which add up to its E2E; lookup is the host's time for its prompt
tokens at arrival (hashing and searching), where the costs tell it from the time for the request. A failed
allocation is an attempt, in one step, to admit or to go on that found too few blocks; a queue that stays
blocked is counted when it became so. Recomputed tokens are those computed before a preemption and not found
in the cache after it.

Eligible are the prompt tokens that the device can have cached: the whole blocks before a prompt's last token,
which is always computed. A host tier may bring more of a prompt; what it brought is eligible, too. A block
that matched partly is not reused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replay.recorder import COUNT_COLUMNS
from pagecast.traces.arrays import Flags, Floats, Ints
from pagecast.traces.schema import Trace

STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
PROMPT_TOKENS = ("input_tokens", "cached_tokens", "partial_tokens", "external_tokens", "disk_tokens")
_NS = 1e-9


def statistics(values: Floats) -> dict[str, float | None]:
    """Mean, linear percentiles and maximum; None each where there are no values."""
    if not len(values):
        return dict.fromkeys(STATISTICS)
    p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
    return {
        "mean": float(values.mean()),
        "p50": p50,
        "p90": p90,
        "p95": p95,
        "p99": p99,
        "max": float(values.max()),
    }


def weighted_statistics(values: Floats, weights: Floats) -> dict[str, float | None]:
    """The same of values that count unequally."""
    if not len(values) or weights.sum() <= 0:
        return dict.fromkeys(STATISTICS)
    order = np.argsort(values)
    values, weights = values[order], weights[order]
    middle = np.cumsum(weights) - weights / 2
    points = np.interp(np.array([0.5, 0.9, 0.95, 0.99]) * weights.sum(), middle, values).tolist()
    mean = float(np.average(values, weights=weights))
    return dict(zip(STATISTICS, (mean, *points, float(values[-1])), strict=True))


def prefix_lookup_s(rows: pd.DataFrame, costs: StepCosts, *, caching: bool = True) -> Floats:
    """Seconds that the prefix lookup of each row's prompt took the host; 0 without caching."""
    lengths, inverse = np.unique(rows["input_tokens"].to_numpy(), return_inverse=True)
    if not caching or not len(lengths):
        return np.zeros(len(rows))
    plain = costs.arrival_ns(0)
    seconds = np.array([costs.arrival_ns(int(n)) - plain for n in lengths], dtype=np.float64) * _NS
    return seconds[inverse]


def request_table(rows: pd.DataFrame, lookup_s: Floats, reasons: dict[int, str]) -> pd.DataFrame:
    """The recorder's rows with latencies in seconds; NaN for what a request never reached.

    `lookup_s`: the seconds of `prefix_lookup_s`, by row.
    """
    columns: dict[str, Any] = {"row": rows["row"].to_numpy()}
    states = np.array(["completed", "cancelled", "rejected"])
    columns["state"] = states[rows["state"].to_numpy()]
    for name in ("arrival", "admitted", "first_token", "finished"):
        ns = rows[f"{name}_ns"].to_numpy()
        columns[f"{name}_s"] = np.where(ns < 0, np.nan, ns * _NS)
    for name in COUNT_COLUMNS:
        columns[name] = np.maximum(rows[name].to_numpy(), 0)
    arrival, admitted, first, finished = (
        columns[name] for name in ("arrival_s", "admitted_s", "first_token_s", "finished_s")
    )
    columns["prefix_lookup_s"] = lookup_s
    columns["queue_s"] = admitted - arrival - lookup_s
    columns["prefill_s"] = first - admitted
    columns["ttft_s"] = first - arrival
    done = columns["state"] == "completed"
    columns["decode_s"] = np.where(done, finished - first, np.nan)
    columns["e2e_s"] = np.where(done, finished - arrival, np.nan)
    gaps = columns["output_tokens"] - 1
    columns["tpot_s"] = np.where(gaps > 0, columns["decode_s"] / np.maximum(gaps, 1), np.nan)
    columns["reason"] = [reasons.get(row, "") for row in columns["row"].tolist()] if reasons else ""
    return pd.DataFrame(columns, index=rows.index)


def measured(table: pd.DataFrame, trace: Trace) -> pd.DataFrame:
    """The requests of a table that are no warm-up of their trace."""
    if "warmup" not in trace.requests:
        return table
    kept: pd.DataFrame = table[trace.integers("warmup")[table["row"].to_numpy()] == 0]
    return kept.reset_index(drop=True)


class PrefixHits(NamedTuple):
    """Prompt tokens of admitted requests that could be reused, and those that were, at first admission."""

    eligible: int
    reused: int

    @property
    def rate(self) -> float:
        """The share of eligible tokens that were reused, from 0 to 1; 0 where there are none."""
        return self.reused / self.eligible if self.eligible else 0.0


def whole_blocks(prompt_tokens: Ints, block_size: int | Ints) -> Ints:
    """Tokens in the whole blocks before the last token of each prompt."""
    return (prompt_tokens - 1) // block_size * block_size


def prefix_hits(table: pd.DataFrame, block_size: int | Ints) -> PrefixHits:
    """The prefix hits of a table's admitted requests. `block_size`: in tokens, of all rows or of each."""
    admitted = ~np.isnan(table["admitted_s"].to_numpy(np.float64))
    prompts, cached, partial = (
        table[name].to_numpy(np.int64) for name in ("input_tokens", "cached_tokens", "partial_tokens")
    )
    reused = (cached - partial)[admitted]
    eligible = np.maximum(whole_blocks(prompts, block_size)[admitted], reused)
    return PrefixHits(int(eligible.sum()), int(reused.sum()))


def prompt_sources(admitted: pd.DataFrame) -> dict[str, int]:
    """Where the tokens of admitted prompts came from at the first admission; `missed` were computed."""
    cached = int(admitted["cached_tokens"].sum())
    partial = int(admitted["partial_tokens"].sum())
    external = int(admitted["external_tokens"].sum())
    disk = int(admitted["disk_tokens"].sum())
    return {
        "exact": cached - partial - external,
        "partial": partial,
        "host": external - disk,
        "disk": disk,
        "missed": int(admitted["input_tokens"].sum()) - cached,
    }


def latency_summary(table: pd.DataFrame) -> dict[str, Any]:
    """Statistics of every latency over the requests that reached it."""
    names = ("ttft_s", "tpot_s", "e2e_s", "queue_s", "prefix_lookup_s", "prefill_s", "decode_s")
    accepted = table["state"].to_numpy(object) != "rejected"
    admitted = ~np.isnan(table["admitted_s"].to_numpy(np.float64))
    summary: dict[str, Any] = {}
    for name in names:
        values = table[name].to_numpy(np.float64)
        counts = accepted & admitted if name == "prefix_lookup_s" else accepted
        summary[name] = statistics(values[counts & ~np.isnan(values)])
    return summary


def cached_and_uncached(table: pd.DataFrame) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """TTFT of requests with and without a prefix hit, at equal queue depth.

    Hits are often more frequent when the queue is short, which would flatter them. Requests are binned by
    how many waited when they arrived (0, 1, 2-3, 4-7, ...); only bins with both kinds count, and those
    without a hit are weighted as the others are spread.
    """
    ttft, bins, in_bins, others = _equal_queues(table)
    size = int(bins.max(initial=0)) + 1
    hits, misses = (np.bincount(bins[kind], minlength=size) for kind in (in_bins, others))
    weights = hits[bins[others]] / np.maximum(misses[bins[others]], 1)
    return statistics(ttft[in_bins]), weighted_statistics(ttft[others], weights.astype(np.float64))


def telling(table: pd.DataFrame) -> bool:
    """Whether `cached_and_uncached` compares enough requests to say something of them all: 20 of each kind,
    and half of all there are."""
    ttft, _, in_bins, others = _equal_queues(table)
    return bool(min(in_bins.sum(), others.sum()) >= 20 and 2 * (in_bins | others).sum() >= len(ttft))


def _equal_queues(table: pd.DataFrame) -> tuple[Floats, Ints, Flags, Flags]:
    """TTFT and bin of each request, and which with and without a hit lie in bins that have both."""
    ttft = table["ttft_s"].to_numpy(np.float64)
    got = ~np.isnan(ttft)
    hit = table["cached_tokens"].to_numpy()[got] > 0
    bins = np.ceil(np.log2(table["queue_depth"].to_numpy(np.float64)[got] + 1)).astype(np.int64)
    size = int(bins.max()) + 1 if len(bins) else 1
    both = (np.bincount(bins[hit], minlength=size) > 0) & (np.bincount(bins[~hit], minlength=size) > 0)
    return ttft[got], bins, hit & both[bins], ~hit & both[bins]


def prefill_avoided_s(table: pd.DataFrame, costs: StepCosts) -> float:
    """Device seconds that reused prefixes saved: what each prompt would have cost alone, less what it did."""
    pairs = table[["input_tokens", "cached_tokens"]].to_numpy(np.int64)
    pairs = pairs[pairs[:, 1] > 0]
    if not len(pairs):
        return 0.0
    unique, counts = np.unique(pairs, axis=0, return_counts=True)
    saved = 0
    for (tokens, cached), count in zip(unique.tolist(), counts.tolist(), strict=True):
        whole = costs.device_ns(Batch(0, 0, 0, ((tokens, 0),)))
        rest = costs.device_ns(Batch(0, 0, 0, ((tokens - cached, cached),)))
        saved += max(whole - rest, 0) * count
    return saved * _NS
