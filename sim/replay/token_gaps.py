"""The longest time between two tokens of each request of a replay."""

from __future__ import annotations

import numpy as np
from pagecast.sim.replay.result import Result
from pagecast.traces.arrays import Floats, Ints

_NS = 1e-9


def longest_gaps_s(result: Result) -> Floats:
    """Of each row of `result.requests`, in seconds; NaN for one token, or where it did not end.

    The steps tell it (`Kept.steps`): a step hands out a token of each request that it decodes. The steps of a
    row take equally long. What a preempted request waits counts as the longest of the steps meanwhile.
    """
    requests, steps = result.requests, result.steps
    gaps = np.full(len(requests), np.nan)
    if not len(steps):
        return gaps
    ends = steps["end_ns"].to_numpy(np.float64) * _NS
    begin = np.concatenate([steps["start_ns"].to_numpy(np.float64)[:1] * _NS, ends[:-1]])
    each = (ends - begin) / np.maximum(steps["steps"].to_numpy(), 1)
    first, last = (requests[name].to_numpy(np.float64) for name in ("first_token_s", "finished_s"))
    known = np.isfinite(first) & np.isfinite(last) & (requests["output_tokens"].to_numpy() > 1)
    # Half a nanosecond: times of requests and of steps are the same, but for rounding.
    low = np.searchsorted(ends, first[known] + _NS / 2, side="right")
    high = np.minimum(np.searchsorted(ends, last[known] + _NS / 2, side="right"), len(ends))
    high = np.maximum(high, np.minimum(low + 1, len(ends)))
    low = np.minimum(low, high - 1)
    gaps[known] = _greatest(each, low, high)
    return gaps


def _greatest(values: Floats, low: Ints, high: Ints) -> Floats:
    """The greatest of values[low:high], each range one at least: by tables of ranges of powers of two."""
    length = high - low
    power = np.log2(length).astype(np.int64)
    table, found = values, np.empty(len(low))
    for level in range(int(power.max(initial=0)) + 1):
        rows = power == level
        found[rows] = np.maximum(table[low[rows]], table[high[rows] - (1 << level)])
        if len(table) > 1 << level:
            table = np.maximum(table[: -(1 << level)], table[1 << level :])
    return found
