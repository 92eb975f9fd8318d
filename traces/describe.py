"""Summary of a trace: its load, burstiness and lengths, and how much of it could be reused.

    >>> from pagecast.traces.describe import describe
    >>> from pagecast.traces.read import read
    >>> describe(read("chat", limit=50))["requests"]
    50

Rates are per second, lengths in tokens, times in seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from pagecast.traces.prefixes import SCOPE, paths
from pagecast.traces.schema import Trace, nominal_arrival_s


def describe(trace: Trace) -> dict[str, Any]:
    """Figures of a trace, ready for JSON; None where a figure has no meaning.

    `duration_s` is from the first arrival to the last, `requests_per_s` the requests after the first
    over it, `interarrival_cv` the coefficient of variation of the times between arrivals (1 for Poisson).
    Where turns follow others these three take serving as instant: they are the most that can be asked.
    `sharing` is what a cache without end would find, token by token and in order of requests, answers
    that later turns quote included; at least one token of a prompt is always computed. It is None where the
    trace tells lengths alone.
    """
    arrival = np.sort(nominal_arrival_s(trace))
    gaps = np.diff(arrival)
    duration = float(arrival[-1] - arrival[0])
    after = trace.integers("after")
    return {
        "name": trace.name,
        "requests": len(trace),
        "duration_s": duration,
        "requests_per_s": (len(trace) - 1) / duration if duration > 0 else None,
        "interarrival_cv": float(gaps.std() / gaps.mean()) if duration > 0 else None,
        "input_tokens": _spread(trace.integers("input_tokens"), total=True),
        "output_tokens": _spread(trace.integers("output_tokens"), total=True),
        "sharing": None if trace.lengths_only else sharing(trace),
        "sessions": _sessions(trace),
        "follow_others": int((after >= 0).sum()),
        "gap_s": _spread(trace.seconds("gap_s")[after >= 0]) if (after >= 0).any() else None,
        "scopes": int(trace.requests[scope].drop_duplicates().shape[0]) if (scope := _scope(trace)) else 1,
        "priorities": sorted(set(trace.integers("priority").tolist()))[:20],
        "may_cancel": int((~np.isnan(trace.seconds("cancel_after_s"))).sum()),
        "notes": list(trace.notes),
    }


def _scope(trace: Trace) -> list[str]:
    return [name for name in SCOPE if name in trace.requests]


def _spread(values: npt.NDArray[Any], total: bool = False) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    figures = {"mean": float(values.mean()), "p50": p50, "p90": p90, "p99": p99, "max": values.max().item()}
    return {**figures, "total": int(values.sum())} if total else figures


def sharing(trace: Trace, *, with_outputs: bool = True) -> dict[str, Any]:
    """Hits and size of an unbounded cache; without outputs, of prompts alone."""
    where = paths(trace, with_outputs=with_outputs)
    tokens = trace.integers("input_tokens")
    shareable = np.minimum(where.matched, tokens - 1)
    return {
        "shareable_tokens": int(shareable.sum()),
        "shareable_fraction": float(shareable.sum() / tokens.sum()),
        "requests_sharing": int((shareable > 0).sum()),
        "working_set_tokens": where.tokens,
    }


def _sessions(trace: Trace) -> dict[str, Any] | None:
    if "session" not in trace.requests:
        return None
    turns = trace.requests.groupby("session").size().to_numpy()
    return {"count": len(turns), "turns": _spread(turns)}
