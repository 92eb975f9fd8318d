"""Non-negative least squares fit of a kernel family's terms to recorded steps.

Rows are weighted by relative error. Runs of one set-up differ by a percent or so as a whole (clocks, host),
so each run has a scale factor with a prior around 1; the coefficients are those of a run with factor 1. Rare
long pauses (garbage collection, the operating system) are cut while fitting, and their time is added back as
a cost of each request.

Where asynchronous runs give device times (`ahead.py`), their steps are fitted together with synchronous ones.
In a synchronous step the host adds a constant, one for each segment, and a time per request. Each kind of
step is then weighted by its own spread, since device times vary least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
from pagecast.traces.arrays import Floats

# Standard deviation of a run's scale, the prior: three recordings of one load with equal batches in every
# step were 1.3% apart from lowest to highest.
RUN_SD = 0.007
_OUTLIER = 6.0  # standard deviations beyond which a step counts as a pause
_CORRELATED = 20  # consecutive steps whose errors are correlated, and that count as one
_SMOOTH = 1.0  # weight of a bend in the curve; a step of data has 1
_ROUNDS = 15
_SELECTION_ROUNDS = 5
_LEAST_SD = 0.004  # the least spread of a kind of step, so that none decides the fit alone


@dataclass(frozen=True)
class Fit:
    """Coefficients in nanoseconds: the curve's value at each knot, and one for each term that was kept.

    `dropped` names terms that did not lower the error on data left out, or that resampling left uncertain;
    `absent` those whose units are 0 in all steps. `scales` are the runs' scale factors, `sd` is a step's
    relative spread around the fit. `host` is the host time that planning ahead hides, None where the fit does
    not give it; `solution` has all coefficients of the design.
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
    def of(cls, calibration: Calibration) -> Fit:
        """The fit that a calibration keeps; its runs' scales are in the provenance."""
        curve = np.array(calibration.curve_ns)
        return cls(
            calibration.knots,
            curve,
            calibration.terms_ns,
            (),
            (),
            (),
            float(calibration.provenance.get("step_sd", 0.0)),
        )

    def predict(self, table: StepTable, shape: TileShape) -> Floats:
        """Nanoseconds of each step, from start to start."""
        host, device, launching = self.sides(table, shape)
        return host + np.maximum(device, launching)

    def sides(self, table: StepTable, shape: TileShape) -> tuple[Floats, Floats, Floats]:
        """Nanoseconds of each step: host, device, and kernel launches, which overlap with the device."""
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

    Considers the terms that occur in the data and are not in `without`, and keeps those that lower the error
    on data left out (`selection`). Errors: BadInput for too few steps.
    """
    full, absent = design(tables, shape, ahead)
    full = full.keeping(tuple(name for name in full.names if name not in without))
    names = select(full, _weighted(full))
    final = full.keeping(names)
    coefficients, scales, sd = solve(final)
    curve, terms, host = final.parted(coefficients)
    dropped = tuple(name for name in (*full.names, *without) if name not in names)
    return Fit(final.knots, curve, terms, dropped, absent, tuple(scales.tolist()), sd, host, coefficients)


def _weighted(full: Design) -> Weighted:
    """The rows of a fit of all terms, with the weights of its last round."""
    coefficients, scales, _ = solve(full, rounds=_SELECTION_ROUNDS)
    return _round(full, coefficients, scales)[0]


def solve(d: Design, start: Floats | None = None, rounds: int = _ROUNDS) -> tuple[Floats, Floats, float]:
    """Coefficients, run scales and the relative spread, by iterated weighted least squares.

    `start`: coefficients to begin with. A row's weight is the reciprocal of the last round's prediction, and
    of the spread of its kind. The reciprocal of the measured time would bias the fit below the mean.
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
    """Coefficients to start from where it is not known which steps last as long as their launches.

    Tries several shares of the shortest steps launched kernel by kernel, and takes the best fit.
    """
    eager = d.matrix[:, launch] > 0
    guesses: list[tuple[float, Floats]] = []
    for share in (0.0, 0.2, 0.4, 0.6, 0.8):
        launching = eager & (d.ns < np.quantile(d.ns[eager], share))
        guess = nonnegative(d.sided(launching) / d.ns[:, None], np.ones(len(d.ns)), len(d.knots))
        stray = np.abs(d.bounded(guess) @ guess / d.ns - 1)
        guesses.append((float(np.minimum(stray, 0.5).mean()), guess))
    return min(guesses, key=lambda pair: pair[0])[1]


def _bending(d: Design) -> Floats:
    """Rows that pull each knot of the curve towards the line between its neighbours."""
    x = np.array(d.knots, np.float64)
    rows = np.zeros((max(len(x) - 2, 0), len(x)))
    for i in range(1, len(x) - 1):
        a, b, c = x[i - 1 : i + 2]
        rows[i - 1, i - 1 : i + 2] = ((c - b) / (c - a), -1.0, (b - a) / (c - a))
    return _SMOOTH * rows


def _run_scales(d: Design, ratio: Floats, sd: Floats) -> Floats:
    """Each run's scale factor: its mean ratio shrunk towards 1 by the prior, with a geometric mean of 1.

    In a run with steps planned ahead only those count: the others also show a host that is slow for a while.
    """
    scales = np.ones(d.runs)
    if d.runs == 1:
        return scales
    weights = 1 / np.maximum(sd, 1e-6) ** 2 / _CORRELATED
    for i in range(d.runs):
        mine = d.run == i
        if (mine & d.ahead).any():
            mine &= d.ahead
        weight = weights[mine]
        scales[i] = (weight @ ratio[mine] + 1 / RUN_SD**2) / (weight.sum() + 1 / RUN_SD**2)
    return np.asarray(scales / np.exp(np.mean(np.log(scales))), np.float64)


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
        pause_ns = float(pauses_ns[rows].sum())
        if pause_ns > 0 and matrix[rows, column].sum() > 0:
            coefficients[column] += pause_ns / matrix[rows, column].sum()
    return coefficients
