"""Figures of the eviction orders of several replicas together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


def merged_eviction(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the eviction orders of several replicas count, together. `parts`: the figures of each.

    Blocks are added up. Each replica learns by itself how likely content is to be reused; of all of them the
    probability is the mean, weighted by the blocks that each has learned it from.
    """
    told = [part for part in parts if part]
    if len(told) < 2:
        return dict(told[0]) if told else {}
    total: dict[str, Any] = {}
    if by_priority := _of(told, "evicted_by_priority"):
        evicted = sum((Counter(each) for each in by_priority), Counter[str]())
        total["evicted_by_priority"] = {key: evicted[key] for key in sorted(evicted, key=int)}
        total["reverted_blocks"] = sum(_of(told, "reverted_blocks"))
    if learned := _of(told, "learned_blocks"):
        probabilities = np.average(_of(told, "reuse_probability"), axis=0, weights=learned)
        total["reuse_probability"] = np.round(probabilities, 4).tolist()
        total["learned_blocks"] = np.sum(learned, axis=0).tolist()
    if by_tenant := _of(told, "tenants"):
        names = dict.fromkeys(name for each in by_tenant for name in each)
        total["tenants"] = {name: merged_eviction(_of(by_tenant, name)) for name in names}
    return total


def _of(parts: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """A figure of those that have it."""
    return [part[name] for part in parts if name in part]
