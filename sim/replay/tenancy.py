"""Figures by tenant, and the price of keeping tenants apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from pagecast.sim.core.memory.tenant_ledger import TenantLedger
from pagecast.sim.replay.metrics import prefix_hits
from pagecast.traces.arrays import Ints
from pagecast.traces.schema import Trace


def merged(ledgers: Iterable[TenantLedger | None]) -> TenantLedger | None:
    """The accounts of several replicas together; None where one of them keeps none."""
    total = TenantLedger()
    for ledger in ledgers:
        if ledger is None:
            return None
        total.evicted_for.update(ledger.evicted_for)
    return total


def tenant_figures(
    table: pd.DataFrame, ledger: TenantLedger | None, block_size: int | Ints
) -> dict[str, Any]:
    """By tenant: requests, latency, hits, and blocks evicted, by whom. Content shared by all is tenant "".
    Rejected requests have neither latency nor output, as in the summary.

    `block_size`: in tokens, of all rows or of each. Without a ledger nobody counted evictions by tenant, and
    these figures are None.
    """
    sizes = np.broadcast_to(block_size, len(table))
    states, ttft_s = table["state"].to_numpy(object), table["ttft_s"].to_numpy(np.float64)
    outputs, preemptions = (table[name].to_numpy(np.int64) for name in ("output_tokens", "preemptions"))
    prompts = table[["admitted_s", "input_tokens", "cached_tokens", "partial_tokens"]]
    evicted = None if ledger is None else ledger.evicted
    takers = None if ledger is None else _takers(ledger)
    figures = {}
    for tenant, rows in sorted(table.groupby("tenant").indices.items()):
        name, mine = str(tenant), states[rows]
        accepted = rows[mine != "rejected"]
        ttft = ttft_s[accepted]
        ttft = ttft[~np.isnan(ttft)]
        hits = prefix_hits(prompts.iloc[rows], sizes[rows])
        figures[name] = {
            "requests": len(rows),
            **{state: int((mine == state).sum()) for state in ("completed", "rejected", "cancelled")},
            "ttft_mean_s": float(ttft.mean()) if len(ttft) else None,
            "ttft_p99_s": float(np.percentile(ttft, 99)) if len(ttft) else None,
            "output_tokens": int(outputs[accepted].sum()),
            "eligible_prefix_tokens": hits.eligible,
            "reused_prefix_tokens": hits.reused,
            "token_hit_rate": hits.rate,
            "preemptions": int(preemptions[rows].sum()),
            "evicted_blocks": None if evicted is None else evicted[name],
            "evicted_by": None if takers is None else takers.get(name, {}),
        }
    return figures


def _takers(ledger: TenantLedger) -> dict[str, dict[str, int]]:
    """By who lost content: how many blocks of it each tenant took."""
    takers: dict[str, dict[str, int]] = {}
    for (taker, loser), blocks in sorted(ledger.evicted_for.items()):
        takers.setdefault(loser, {})[taker] = blocks
    return takers


def without_salts(trace: Trace) -> Trace:
    """The trace with everybody in one salt."""
    return replace(trace, requests=trace.requests.drop(columns="salt", errors="ignore"))


def isolation_price(apart: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The price of isolation: figures of a replay with it, against one where all tenants share."""
    loss = shared["reused_prefix_tokens"] - apart["reused_prefix_tokens"]
    eligible = apart["eligible_prefix_tokens"]
    return {
        "hit_tokens": apart["reused_prefix_tokens"],
        "hit_tokens_shared": shared["reused_prefix_tokens"],
        "lost_hit_tokens": loss,
        "lost_hit_rate": loss / eligible if eligible else 0.0,
        "ttft_mean_s": apart["ttft_s"]["mean"],
        "ttft_mean_shared_s": shared["ttft_s"]["mean"],
    }
