"""Figures by tenant, and the price of keeping tenants apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.tenant_ledger import TenantLedger
from pagecast.sim.core.tenants import Tenants
from pagecast.traces.schema import Trace


def with_accounts(limits: Limits, trace: Trace) -> Limits:
    """The limits with tenants told apart, where the trace names some and the model can."""
    if limits.tenants is not None or limits.groups or "tenant" not in trace.requests:
        return limits
    return replace(limits, tenants=Tenants())


def merged(ledgers: Iterable[TenantLedger | None]) -> TenantLedger:
    """The accounts of several replicas together."""
    total = TenantLedger()
    for ledger in ledgers:
        if ledger is not None:
            total.evicted_for.update(ledger.evicted_for)
    return total


def tenant_figures(table: pd.DataFrame, ledger: TenantLedger | None, block_size: int) -> dict[str, Any]:
    """By tenant: requests, latency, hits, and blocks evicted, by whom. Content shared by all is tenant ""."""
    figures = {}
    for tenant, rows in table.groupby("tenant", sort=True):
        states = rows["state"].value_counts()
        admitted = rows[rows["admitted_s"].notna()]
        eligible = int(((admitted["input_tokens"] - 1) // block_size * block_size).sum())
        reused = int((admitted["cached_tokens"] - admitted["partial_tokens"]).sum())
        ttft = rows["ttft_s"].to_numpy(np.float64)
        ttft = ttft[~np.isnan(ttft)]
        figures[str(tenant)] = {
            "requests": len(rows),
            **{state: int(states.get(state, 0)) for state in ("completed", "rejected", "cancelled")},
            "ttft_mean_s": float(ttft.mean()) if len(ttft) else None,
            "ttft_p99_s": float(np.percentile(ttft, 99)) if len(ttft) else None,
            "output_tokens": int(rows["output_tokens"].sum()),
            "eligible_prefix_tokens": eligible,
            "reused_prefix_tokens": reused,
            "token_hit_rate": reused / eligible if eligible else 0.0,
            "preemptions": int(rows["preemptions"].sum()),
            "evicted_blocks": 0 if ledger is None else ledger.evicted[str(tenant)],
            "evicted_by": _evicted_by(ledger, str(tenant)),
        }
    return figures


def _evicted_by(ledger: TenantLedger | None, tenant: str) -> dict[str, int]:
    pairs = {} if ledger is None else ledger.evicted_for
    return {taker: count for (taker, loser), count in sorted(pairs.items()) if loser == tenant}


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
