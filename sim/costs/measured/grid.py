"""Interpolation on grids of measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pagecast.traces.arrays import Floats


def bracket(value: float, points: Sequence[float]) -> list[tuple[float, float]]:
    """Points around `value` with their weights; beyond the greatest the time grows in proportion."""
    at = int(np.searchsorted(points, value))
    if at == len(points):
        return [(points[-1], value / points[-1])]
    if points[at] == value or at == 0:
        return [(points[at], 1.0)]
    low, high = points[at - 1], points[at]
    share = (value - low) / (high - low)
    return [(low, 1.0 - share), (high, share)]


def completed(times: Floats, axis: Floats) -> Floats:
    """A row with its gaps closed: interpolated between measured sizes, in a line beyond the last two."""
    finite = np.flatnonzero(np.isfinite(times))
    if not len(finite):
        return times
    filled = np.interp(axis, axis[finite], times[finite])
    if len(finite) > 1 and finite[-1] + 1 < len(axis):
        first, last = finite[-2], finite[-1]
        slope = max(times[last] - times[first], 0.0) / (axis[last] - axis[first])
        beyond = axis[last + 1 :] - axis[last]
        filled[last + 1 :] = times[last] + slope * beyond
    return filled


def extended(points: Any, axis: Floats, times: Floats) -> Floats:
    """Times at `points`, linear between measured sizes and, beyond them, along the last two."""
    inside = np.interp(points, axis, times)
    slope = max(times[-1] - times[-2], 0.0) / (axis[-1] - axis[-2]) if len(axis) > 1 else 0.0
    return np.asarray(inside + slope * np.maximum(np.asarray(points) - axis[-1], 0.0))
