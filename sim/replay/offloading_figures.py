"""Figures of KV offloading: hits by tier, what was moved, and how full the host tier is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from pagecast.sim.core.tiers.tiered_offloading import TieredOffloading
from pagecast.sim.replica.arrivals import NS
from pagecast.sim.replica.links import Makespan
from pagecast.sim.replica.replica import Replica


def offloading_figures(replicas: Sequence[Replica], table: pd.DataFrame, makespan_s: float) -> dict[str, Any]:
    """Hits of prompt tokens on the device and from the host, at first admission, and the transfers.

    `table` has the requests of all replicas. What the replicas counted is added up, save `busy`: the share of
    the makespan in which a direction carried something, as a mean of the replicas. What is carried after the
    last request is in the other totals alone. `wait_s` is for how long its transfers waited for one another;
    `flush_wait_s` for how long steps waited for stores. Empty where no replica has a host tier.
    """
    first_s = float(table["arrival_s"].min())
    makespan = Makespan(round(first_s * NS), round((first_s + makespan_s) * NS))
    counted = [_counted(replica, makespan) for replica in replicas if replica.copies is not None]
    if not counted:
        return {}
    totals = {name: sum(each.get(name, 0) for each in counted) for each in counted for name in each}
    for name in totals:
        if name.endswith("_busy"):
            totals[name] /= len(counted)
    return _hits(table, disk="disk_blocks" in totals) | totals


def _hits(table: pd.DataFrame, *, disk: bool) -> dict[str, Any]:
    """Prompt tokens found on the device and in the host; with a `disk`, those that came from there first."""
    admitted = table[table["admitted_s"].notna()]
    tokens = int(admitted["input_tokens"].sum())
    cached, external = int(admitted["cached_tokens"].sum()), int(admitted["external_tokens"].sum())
    figures = {
        "device_hit_tokens": cached - external,
        "host_hit_tokens": external,
        "device_hit_rate": (cached - external) / tokens if tokens else 0.0,
        "host_hit_rate": external / tokens if tokens else 0.0,
        "requests_with_host_hit": int((admitted["external_tokens"] > 0).sum()),
    }
    if disk:
        found = int(admitted["disk_tokens"].sum())
        figures |= {
            "disk_hit_tokens": found,
            "disk_hit_rate": found / tokens if tokens else 0.0,
            "requests_with_disk_hit": int((admitted["disk_tokens"] > 0).sum()),
        }
    return figures


def _counted(replica: Replica, makespan: Makespan) -> dict[str, Any]:
    """What one replica's tiers and transfers counted."""
    offloading, copies = replica.scheduler.offloading, replica.copies
    assert offloading is not None
    assert copies is not None
    transfers, disk = copies.transfers, copies.disk
    figures = {
        "host_blocks": offloading.host.room,
        "used_host_blocks": offloading.host.used,
        "evicted_host_blocks": offloading.host.evicted_blocks,
        "stored_blocks": offloading.stored_blocks,
        "loaded_blocks": offloading.loaded_blocks,
        "refused_stores": offloading.host.refused_stores,
        "lost_loads": offloading.lost_loads,
        **transfers.figures(makespan),
    }
    if disk is not None and isinstance(offloading, TieredOffloading):
        figures |= {
            "disk_blocks": len(disk.disk.stored),
            "promoted_blocks": disk.disk.promoted_blocks,
            "cascaded_blocks": disk.disk.cascaded_blocks,
            "refused_promotions": offloading.tiers.refused_promotions,
            "lost_disk_loads": disk.disk.lost_promotions,
            "lost_disk_stores": disk.disk.lost_stores,
            **disk.figures(makespan),
        }
    return figures
