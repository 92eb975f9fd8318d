"""What changes when steps are planned ahead: the host's part of a step disappears behind the device.

So does launching the kernels of a step with prompts; but a device that never rests runs its matrix work at
lower clocks. Where such a step may be launched kernel by kernel, its launches are hidden only as far as the
device is still busy with the step before: there, the steps are walked through as a replay does, and what
heats the device is among the costs of synchronous steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pagecast.sim.calibration.features import StepTable
from pagecast.sim.calibration.file import FITTED, MEASURED, Host
from pagecast.sim.calibration.fit import Fit
from pagecast.sim.calibration.shape import Shape
from scipy.optimize import least_squares, nnls

Floats = npt.NDArray[np.float64]

_WINDOW = 64  # steps summed, since a step planned ahead gives its time to its neighbours
_OUTLIER = 0.02


def measured_host(tables: list[StepTable]) -> Host:
    """The host's share as synchronous runs show it: scheduling, and from a step's end to the next start."""
    quiet = [table.take(np.flatnonzero(table.arrivals == 0)) for table in tables]
    host = np.concatenate([table.sched_ns + np.maximum(table.gap_ns, 0.0) for table in quiet])
    rows = np.concatenate([table.n + table.chunks for table in quiet])
    if not len(host):
        return Host(0.0, 0.0, 0.0, 0.0, MEASURED)
    found = _robust(np.stack([np.ones(len(host)), rows], axis=1), host, np.maximum(host, 1e3))
    return Host(float(found[0]), float(found[1]), 0.0, 0.0, MEASURED)


def fitted_host(tables: list[StepTable], found: Fit, shape: Shape) -> Host:
    """What asynchronous runs save against `found`, the costs of synchronous ones, over windows of steps."""
    if not shape.prompt_graphs:
        return _walked_host(tables, found, shape)
    parts: list[Floats] = []
    for table in tables:
        window = np.arange(len(table)) // _WINDOW
        arriving = found.terms.get("arrival", 0.0) * table.arrivals
        arriving = arriving + found.terms.get("arriving_token", 0.0) * table.arrived_tokens
        expected = found.predict(table, shape) - arriving
        mixed = table.mixed.astype(np.float64)
        columns = (np.ones(len(table)), table.n + table.chunks, mixed, -expected * mixed)
        sums = (*columns, expected - table.ns, expected)
        parts.append(np.stack([np.bincount(window, weights=column) for column in sums], axis=1))
    flat = np.concatenate(parts)
    best = _robust(flat[:, :4], flat[:, 4], flat[:, 5] * _OUTLIER)
    return Host(float(best[0]), float(best[1]), float(best[2]), float(best[3]), FITTED)


@dataclass(frozen=True)
class Walk:
    """Synchronous costs of consecutive asynchronous steps, to be walked through at pipeline depth 1.

    Nanoseconds: what the host adds to each step, what the device takes, what launching takes at least, and
    what arrivals take after it; `rows` are the requests of each, `begins` whether no step comes before.
    """

    host: Floats
    device: Floats
    launching: Floats
    arriving: Floats
    rows: Floats
    mixed: Floats
    begins: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, table: StepTable, found: Fit, shape: Shape) -> Walk:
        """That of a run's steps."""
        host, device, launching = found.sides(table, shape)
        arriving = found.terms.get("arrival", 0.0) * table.arrivals
        arriving = arriving + found.terms.get("arriving_token", 0.0) * table.arrived_tokens
        begins = np.append(True, np.diff(table.index) != 1)
        rows = table.n + table.chunks
        return cls(host - arriving, device, launching, arriving, rows, table.mixed.astype(float), begins)

    def steps_ns(self, host: Host) -> Floats:
        """Time from each step's start to the next one's, as `sim.replica` walks through them."""
        hidden = host.step_ns + host.request_ns * self.rows
        device = self.host + self.device * (1 + host.busy * self.mixed) - hidden - host.launch_ns * self.mixed
        launching = np.maximum(np.where(self.launching > 0, self.host + self.launching - hidden, 0.0), 0.0)
        took, free, before = [], 0.0, 0.0
        now = 0.0  # the host's clock; `free`: when the device is, `before`: when the last but one step ended
        columns = (hidden, np.maximum(device, 0.0), launching, self.arriving, self.begins)
        for plan, compute, launch, arrive, begins in zip(*(c.tolist() for c in columns), strict=True):
            if begins:
                free = before = now
            start, ready = now, now + plan
            before, free = free, max(max(free, ready) + compute, ready + launch)
            now = max(ready + launch, before) + arrive
            took.append(now - start)
        return np.array(took)


def _walked_host(tables: list[StepTable], found: Fit, shape: Shape) -> Host:
    """Fits `Host` so that walking through the steps takes as long as they took, over windows of steps."""
    walks = [Walk.of(table, found, shape) for table in tables]
    windows = [np.arange(len(table)) // _WINDOW for table in tables]
    measured = [np.bincount(window, weights=table.ns) for window, table in zip(windows, tables, strict=True)]

    # What a request costs the host is told by synchronous runs, and is hidden wholly.
    request_ns = found.terms.get("request", 0.0)

    def host(values: Floats) -> Host:
        step_us, launch_us = values.tolist()
        return Host(step_us * 1e3, request_ns, launch_us * 1e3, 0.0, FITTED)

    def strays(values: Floats) -> Floats:
        made = host(values)
        steps = [walk.steps_ns(made) for walk in walks]
        sums = [np.bincount(window, weights=ns) for window, ns in zip(windows, steps, strict=True)]
        return (np.concatenate(sums) / np.concatenate(measured) - 1) / _OUTLIER

    start = np.array([100.0, 100.0])
    best = least_squares(strays, start, bounds=(0, np.inf), x_scale=start, loss="soft_l1", diff_step=0.01)
    return host(best.x)


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
