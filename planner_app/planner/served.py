"""Requests that were served, and those that were not: the rule behind every SLO, and counts to tell it by.

A request is unserved whose client never got a first token: it was shed, its client gave up before (the
trace's `cancel_after_s`), it failed, or its replica was lost. However long somebody waits for it, it does not
come, so its TTFT, its E2E and, unless it was admitted, its queue time are infinite. A request that is
cancelled later keeps the TTFT that it had and has no E2E.

Rejections for a request's length alone are left out: they are the same at any load. A retry counts by itself,
and only where it was sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from pagecast.planner_app.wording.quantities import counted
from pagecast.sim.replay.rejections import at_any_load
from pagecast.traces.arrays import Flags, Floats

ENDLESS = ("ttft", "e2e", "queue")  # what an unserved request waits for; other latencies are of those served


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Numbers of requests: all, those by how they ended, and of these some that weren't served.

    `rejected_at_any_load` are a part of `rejected`. `unserved`: see the module; requests that are rejected
    at any load are not among them.
    """

    requests: int = 0
    completed: int = 0
    rejected: int = 0
    rejected_at_any_load: int = 0
    cancelled: int = 0
    unserved: int = 0

    @classmethod
    def of(cls, requests: pd.DataFrame) -> RequestCounts:
        """The counts of a table of requests."""
        state = requests["state"].to_numpy()
        return cls(
            len(requests),
            int((state == "completed").sum()),
            int((state == "rejected").sum()),
            int((~offered(requests)).sum()),
            int((state == "cancelled").sum()),
            int(unserved(requests).sum()),
        )

    @property
    def served_share(self) -> float:
        """The share of the requests offered whose first token came; 1 where there were none."""
        count = self.requests - self.rejected_at_any_load
        return 1 - self.unserved / count if count else 1.0

    @property
    def sentence(self) -> str:
        """How the requests ended; empty where all completed."""
        if self.completed == self.requests:
            return ""
        parts = [f"{self.completed:,} completed"]
        if self.rejected:
            always = self.rejected_at_any_load
            parts.append(f"{self.rejected:,} rejected" + (f" ({always:,} at any load)" if always else ""))
        if self.cancelled:
            early = self.unserved - (self.rejected - self.rejected_at_any_load)
            early_text = f" ({early:,} before the first token)" if early else ""
            parts.append(f"{self.cancelled:,} cancelled{early_text}")
        return f"of {counted(self.requests, 'request')} {', '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """As printed in JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def offered(requests: pd.DataFrame) -> Flags:
    """Which requests count: all but those that are rejected at any load."""
    counts = np.ones(len(requests), dtype=np.bool_)
    rejected = np.flatnonzero(requests["state"].to_numpy() == "rejected")
    if len(rejected):
        counts[rejected] = ~requests["reason"].iloc[rejected].map(at_any_load).to_numpy(np.bool_)
    return counts


def rejected_for_load(requests: pd.DataFrame) -> Flags:
    """Which requests were rejected that would be served at another load."""
    return np.asarray((requests["state"].to_numpy() == "rejected") & offered(requests), dtype=np.bool_)


def unserved(requests: pd.DataFrame) -> Flags:
    """Which of the requests that count ended before their clients got a first token.

    A client that leaves during the step of its first token is gone when that comes, at the request's end.
    """
    ended_early = requests["state"].to_numpy() != "completed"
    first, end = (requests[name].to_numpy(np.float64) for name in ("first_token_s", "finished_s"))
    without_token = np.isnan(first) | (first >= end)
    return np.asarray(offered(requests) & ended_early & without_token, dtype=np.bool_)


def latencies(requests: pd.DataFrame, latency: str) -> Floats:
    """Seconds of each request that has a latency, infinite where it has no end (`ENDLESS`)."""
    values = requests[f"{latency}_s"].to_numpy(np.float64, copy=True)
    values[requests["state"].to_numpy() == "rejected"] = np.nan
    if latency in ENDLESS:
        lost = unserved(requests)
        values[lost & np.isnan(values) if latency == "queue" else lost] = np.inf
    return np.asarray(values[~np.isnan(values)], dtype=np.float64)
