"""Figures of KV offloading: hits by tier, what was moved, and how full the host tier is."""

from __future__ import annotations

from typing import Any

import pandas as pd
from pagecast.sim.core.tiers.offloading import Offloading
from pagecast.sim.core.tiers.tiered_offloading import TieredOffloading
from pagecast.sim.replay.disk_transfers import DiskTransfers
from pagecast.sim.replay.transfers import Transfers


def offloading_figures(
    offloading: Offloading,
    transfers: Transfers,
    table: pd.DataFrame,
    makespan_s: float,
    disk: DiskTransfers | None = None,
) -> dict[str, Any]:
    """Hits of prompt tokens on the device and from the host, at first admission, and the transfers.

    `busy` is the share of the makespan in which a direction carried something, `wait_s` for how long its
    transfers waited for one another; `flush_wait_s` for how long steps waited for stores.
    """
    admitted = table[table["admitted_s"].notna()]
    tokens = int(admitted["input_tokens"].sum())
    cached, external = int(admitted["cached_tokens"].sum()), int(admitted["external_tokens"].sum())
    figures = {
        "device_hit_tokens": cached - external,
        "host_hit_tokens": external,
        "device_hit_rate": (cached - external) / tokens if tokens else 0.0,
        "host_hit_rate": external / tokens if tokens else 0.0,
        "requests_with_host_hit": int((admitted["external_tokens"] > 0).sum()),
        "host_blocks": offloading.host.room,
        "used_host_blocks": offloading.host.used,
        "evicted_host_blocks": offloading.host.evicted_blocks,
        "stored_blocks": offloading.stored_blocks,
        "loaded_blocks": offloading.loaded_blocks,
        "refused_stores": offloading.host.refused_stores,
        "lost_loads": offloading.lost_loads,
        **transfers.figures(makespan_s),
    }
    if disk is not None and isinstance(offloading, TieredOffloading):
        figures |= _disk_figures(offloading, disk, admitted, tokens, makespan_s)
    return figures


def _disk_figures(
    offloading: TieredOffloading,
    transfers: DiskTransfers,
    admitted: pd.DataFrame,
    tokens: int,
    makespan_s: float,
) -> dict[str, Any]:
    """Of the hits in the host, those that came from the disk first; and what moved between the two."""
    disk = offloading.disk
    found = int(admitted["disk_tokens"].sum())
    return {
        "disk_hit_tokens": found,
        "disk_hit_rate": found / tokens if tokens else 0.0,
        "requests_with_disk_hit": int((admitted["disk_tokens"] > 0).sum()),
        "disk_blocks": len(disk.stored),
        "promoted_blocks": disk.promoted_blocks,
        "cascaded_blocks": disk.cascaded_blocks,
        "refused_promotions": offloading.tiers.refused_promotions,
        "lost_disk_loads": disk.lost_promotions,
        "lost_disk_stores": disk.lost_stores,
        **transfers.figures(makespan_s),
    }
