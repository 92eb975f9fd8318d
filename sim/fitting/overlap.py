"""Effect of asynchronous scheduling on step times, for recordings without device times.

The device hides the host's part of a step, and the kernel launches of a step with prompts. On the other hand,
a device that never rests runs its matrix work at lower clocks. Recordings with device times are fitted
together with the synchronous ones instead (`ahead.py`).
"""

from __future__ import annotations

import numpy as np
from pagecast.sim.costs.calibration.file import FITTED, MEASURED, Host
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.fitting.features import StepTable
from pagecast.sim.fitting.fit import Fit
from pagecast.traces.arrays import Floats
from scipy.optimize import nnls

_WINDOW = 64  # steps summed: the time of a single step planned ahead overlaps with its neighbours'
_OUTLIER = 0.02  # of a window's time: beyond it a window weighs less


def measured_host(tables: list[StepTable]) -> Host:
    """The host's share in synchronous runs: scheduling, and the time from a step's end to the next start.

    A lower bound: recorded host times leave out what overlaps with the device.
    """
    quiet = [table.take(np.flatnonzero(table.arrivals == 0)) for table in tables]
    host = np.concatenate([table.sched_ns + np.maximum(table.gap_ns, 0.0) for table in quiet])
    rows = np.concatenate([table.n + table.chunks for table in quiet])
    if not len(host):
        return Host(0.0, 0.0, 0.0, 0.0, MEASURED)
    solution = _robust(np.stack([np.ones(len(host)), rows], axis=1), host, np.maximum(host, 1e3))
    return Host(float(solution[0]), float(solution[1]), 0.0, 0.0, MEASURED)


def fitted_host(tables: list[StepTable], synchronous: Fit, shape: TileShape) -> Host:
    """The host time that asynchronous runs save against `synchronous`, the fit of synchronous ones."""
    parts: list[Floats] = []
    for table in tables:
        window = np.arange(len(table)) // _WINDOW
        arriving = synchronous.terms.get("arrival", 0.0) * table.arrivals
        arriving = arriving + synchronous.terms.get("arriving_token", 0.0) * table.arrived_tokens
        expected = synchronous.predict(table, shape) - arriving
        mixed = table.mixed.astype(np.float64)
        columns = (np.ones(len(table)), table.n + table.chunks, mixed, -expected * mixed)
        sums = (*columns, expected - table.ns, expected)
        parts.append(np.stack([np.bincount(window, weights=column) for column in sums], axis=1))
    flat = np.concatenate(parts)
    best = _robust(flat[:, :4], flat[:, 4], flat[:, 5] * _OUTLIER)
    return Host(float(best[0]), float(best[1]), float(best[2]), float(best[3]), FITTED)


def _robust(matrix: Floats, target: Floats, scale: Floats) -> Floats:
    """Non-negative least squares, rows weighted by 1 / `scale` and less the further they stray."""
    weight = np.ones(len(target))
    solution = np.zeros(matrix.shape[1])
    for _ in range(8):
        row = weight / scale
        solution, _ = nnls(matrix * row[:, None], target * row)
        stray = np.abs(matrix @ solution - target) / scale
        weight = np.sqrt(np.minimum(1.0, 1.0 / np.maximum(stray, 1e-9)))
    return np.asarray(solution, np.float64)
