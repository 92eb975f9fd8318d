"""Fits the terms of `features` to recorded steps: non-negative, weighted by relative error, by run.

Runs of the same set-up differ by a percent or so as a whole (clocks, host). Each run therefore has a scale
of its own, drawn towards 1; the result is the middle run. Rare long pauses (garbage collection, the
operating system) are cut while fitting and given back as a cost of each request handled.

Where steps planned ahead tell what the device takes (`ahead`), they are fitted together with synchronous
ones, of which the host adds a constant of its own to each segment, and to each request. Steps then weigh by
how far those of their kind stray, for the device's times stray least; pauses are given back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pagecast.sim.costs.calibration.curve import curve_weights
from pagecast.sim.costs.calibration.file import Calibration, Host
from pagecast.sim.costs.families.common import REQUEST
from pagecast.sim.costs.families.registry import family
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.costs.families.term import Place
from pagecast.sim.fitting.ahead import AheadSteps
from pagecast.sim.fitting.design import Design, design
from pagecast.sim.fitting.features import StepTable, computed_rows
from pagecast.sim.fitting.monotone import nonnegative
from pagecast.sim.fitting.selection import Weighted, select

Floats = npt.NDArray[np.float64]

# Prior of a run's scale, one standard deviation: three recordings of one load, step for step at the same
# shapes, lay 1.3% apart from lowest to highest.
RUN_SD = 0.007
_OUTLIER = 6.0  # standard deviations beyond which a step counts as a pause
_CORRELATED = 20  # steps that move together: fewer of them are independent
_SMOOTH = 1.0  # weight of the curve's bending against one step of data
_ROUNDS = 15
_SELECTION_ROUNDS = 5
_LEAST_SD = 0.004  # of a kind of step: less would make it decide alone


@dataclass(frozen=True)
class Fit:
    """Coefficients in nanoseconds: the curve's value at each knot, and one for each term that was kept.

    `dropped` names terms without which data left out are forecast as well, `absent` those that never occur.
    `scales` are the runs' own factors, `sd` a step's relative spread around the fit. `host` is what planning
    ahead hides, where the fit tells; `solution` are all of the design's coefficients.
    """

    knots: tuple[int, ...]
    curve: Floats
    terms: dict[str, float]
    dropped: tuple[str, ...]
    absent: tuple[str, ...]
    scales: tuple[float, ...]
    sd: float
    host: Host | None = None
    solution: Floats | None = None

    @classmethod
    def of(cls, made: Calibration) -> Fit:
        """The fit that a calibration keeps; its runs' scales are in the provenance."""
        curve = np.array(made.curve_ns)
        return cls(made.knots, curve, made.terms_ns, (), (), (), float(made.provenance.get("step_sd", 0.0)))

    def predict(self, table: StepTable, shape: TileShape) -> Floats:
        """Nanoseconds of each step, from start to start."""
        host, device, launching = self.sides(table, shape)
        return host + np.maximum(device, launching)

    def sides(self, table: StepTable, shape: TileShape) -> tuple[Floats, Floats, Floats]:
        """Of each step: what the host adds, what the device takes, and what launching takes at least."""
        kernels = family(shape.family)
        device = curve_weights(computed_rows(table, shape), self.knots) @ self.curve
        host, launching = np.zeros(len(table)), np.zeros(len(table))
        for name, value in self.terms.items():
            place = kernels.term(name).place
            if place in (Place.HOST, Place.ARRIVAL):
                host += value * table.column(name)
            elif place is Place.LAUNCH:
                launching += value * table.column(name)
            else:
                device = device + value * table.column(name)
        return host, device, launching


def fit(
    tables: list[StepTable],
    shape: TileShape,
    ahead: Sequence[AheadSteps] = (),
    *,
    without: tuple[str, ...] = (),
) -> Fit:
    """Fits steps of several runs: `tables` of synchronous ones, `ahead` of asynchronous ones.

    Of the terms that occur, but for those of `without`, it keeps those that lower the error on data left out
    (`selection`). Errors: BadInput for too few steps.
    """
    full, absent = design(tables, shape, ahead)
    full = full.keeping(tuple(name for name in full.names if name not in without))
    names = select(full, _weighted(full))
    kept = full.keeping(names)
    coefficients, scales, sd = solve(kept)
    curve, terms, host = kept.parted(coefficients)
    dropped = tuple(name for name in (*full.names, *without) if name not in names)
    return Fit(kept.knots, curve, terms, dropped, absent, tuple(scales.tolist()), sd, host, coefficients)


def _weighted(full: Design) -> Weighted:
    """The rows of a fit of all terms, as its last round weighs them."""
    coefficients, scales, _ = solve(full, rounds=_SELECTION_ROUNDS)
    return _round(full, coefficients, scales)[0]


def solve(d: Design, start: Floats | None = None, rounds: int = _ROUNDS) -> tuple[Floats, Floats, float]:
    """Coefficients, run scales and the relative spread. Starts from `start` where given.

    Rows are weighted by the reciprocal of what the last round predicted (not of what was measured, which
    would draw the fit below the mean), and of how far their kind strays.
    """
    scales = np.ones(d.runs)
    bend = _bending(d)
    coefficients = _first(d) if start is None else start
    sd = np.zeros(len(d.ns))
    cut = d.ns
    for _ in range(rounds):
        rows, sd, cut = _round(d, coefficients, scales)
        smooth = np.zeros((len(bend), d.matrix.shape[1]))
        smooth[:, : len(d.knots)] = bend / np.maximum(coefficients[1 : len(bend) + 1], 1e3)[:, None]
        matrix, target = np.vstack([rows.matrix, smooth]), np.append(rows.target, np.zeros(len(smooth)))
        coefficients = nonnegative(matrix, target, len(d.knots))
        scales = _run_scales(d, cut / np.maximum(d.bounded(coefficients) @ coefficients, 1.0), sd)
    return _give_back(d, coefficients, d.ns - cut), scales, float(sd.mean())


def _round(d: Design, coefficients: Floats, scales: Floats) -> tuple[Weighted, Floats, Floats]:
    """Weighted rows, each row's spread, and its time with pauses cut, from the last round's solution."""
    matrix = d.bounded(coefficients)
    expected = np.maximum(matrix @ coefficients, 1.0)
    scaled = expected * scales[d.run]
    sd = _spread(d, np.abs(d.ns / scaled - 1))
    cut = np.clip(d.ns, scaled * (1 - _OUTLIER * sd), scaled * (1 + _OUTLIER * sd))
    weight = sd.mean() / sd if sd.all() else np.ones(len(sd))
    each = weight / expected
    return Weighted(matrix * each[:, None], cut / scaled * weight, each), sd, cut


def _spread(d: Design, stray: Floats) -> Floats:
    """Each row's robust standard deviation: one for all (the mean over runs), or one per kind of step."""
    if not d.ahead.any():
        of_runs = [1.48 * np.median(stray[d.run == i]) for i in range(d.runs)]
        return np.full(len(stray), np.mean(of_runs))
    sd = np.zeros(len(stray))
    for kind in np.unique(d.kind):
        rows = d.kind == kind
        sd[rows] = max(1.48 * float(np.median(stray[rows])), _LEAST_SD)
    return sd


def _first(d: Design) -> Floats:
    """Coefficients to start from."""
    launch = d.launch
    if launch is not None and not d.launch_ns:
        return _first_launches(d, launch)
    first = nonnegative(d.matrix / d.ns[:, None], np.ones(len(d.ns)), len(d.knots))
    if launch is not None:
        first[launch] = d.launch_ns
    return first


def _first_launches(d: Design, launch: int) -> Floats:
    """The best of guesses at which steps are as long as their launches."""
    eager = d.matrix[:, launch] > 0
    found: list[tuple[float, Floats]] = []
    for share in (0.0, 0.2, 0.4, 0.6, 0.8):
        launching = eager & (d.ns < np.quantile(d.ns[eager], share))
        guess = nonnegative(d.sided(launching) / d.ns[:, None], np.ones(len(d.ns)), len(d.knots))
        stray = np.abs(d.bounded(guess) @ guess / d.ns - 1)
        found.append((float(np.minimum(stray, 0.5).mean()), guess))
    return min(found, key=lambda pair: pair[0])[1]


def _bending(d: Design) -> Floats:
    """Rows that ask each knot of the curve to lie on the line between its neighbours."""
    x = np.array(d.knots, np.float64)
    rows = np.zeros((max(len(x) - 2, 0), len(x)))
    for i in range(1, len(x) - 1):
        a, b, c = x[i - 1 : i + 2]
        rows[i - 1, i - 1 : i + 2] = ((c - b) / (c - a), -1.0, (b - a) / (c - a))
    return _SMOOTH * rows


def _run_scales(d: Design, ratio: Floats, sd: Floats) -> Floats:
    """Each run's factor: its mean ratio drawn towards 1 by the prior, all of them centred on 1.

    Of a run with steps planned ahead only these count: a host that is slow for a while is no slow GPU.
    """
    found = np.ones(d.runs)
    if d.runs == 1:
        return found
    weights = 1 / np.maximum(sd, 1e-6) ** 2 / _CORRELATED
    for i in range(d.runs):
        mine = d.run == i
        if (mine & d.ahead).any():
            mine &= d.ahead
        weight = weights[mine]
        found[i] = (weight @ ratio[mine] + 1 / RUN_SD**2) / (weight.sum() + 1 / RUN_SD**2)
    return np.asarray(found / np.exp(np.mean(np.log(found))), np.float64)


def _give_back(d: Design, coefficients: Floats, pauses_ns: Floats) -> Floats:
    """Adds the time of pauses to the cost of a request: they come with the objects that requests leave.

    Pauses in steps that last as long as their launches are added to the launches instead.
    """
    matrix, rest = d.bounded(coefficients), ~d.ahead
    coefficients = coefficients.copy()
    launch = d.launch
    for column in (launch, d.column(REQUEST)):
        if column is None:
            continue
        rows = rest & (matrix[:, column] > 0)
        if column == launch:
            rest &= ~rows
        else:
            rows = rest
        lost = float(pauses_ns[rows].sum())
        if lost > 0 and matrix[rows, column].sum() > 0:
            coefficients[column] += lost / matrix[rows, column].sum()
    return coefficients
