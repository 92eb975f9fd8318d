"""Fits the terms of `features` to recorded steps: non-negative, weighted by relative error, by run.

Runs of the same set-up differ by a percent or so as a whole (clocks, host). Each run therefore has a scale
of its own, drawn towards 1; the result is the middle run. Rare long pauses (garbage collection, the
operating system) are cut while fitting and given back as a cost of each request handled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from pagecast.sim.calibration.features import (
    EXPENDABLE,
    HOST_TERMS,
    LAUNCH,
    OF_GRAPHS,
    TERMS,
    StepTable,
    choose_knots,
    computed_rows,
    curve_weights,
    term_columns,
)
from pagecast.sim.calibration.file import Calibration
from pagecast.sim.calibration.shape import Shape
from pagecast.sim.core.errors import BadInput
from scipy.optimize import nnls

Floats = npt.NDArray[np.float64]

# Prior of a run's scale, one standard deviation: three recordings of one load, step for step at the same
# shapes, lay 1.3% apart from lowest to highest.
RUN_SD = 0.007
STEPS_PER_TERM = 4
LEAST_STEPS = 100
_OUTLIER = 6.0  # standard deviations beyond which a step counts as a pause
_CORRELATED = 20  # steps that move together: fewer of them are independent
_SMOOTH = 1.0  # weight of the curve's bending against one step of data
_TELL_APART = 400.0  # variance inflation beyond which a term is merged into the others
_ROUNDS = 15


@dataclass(frozen=True)
class Fit:
    """Coefficients in nanoseconds: the curve's value at each knot, and one for each term that was kept.

    `merged` names terms that the data can't tell from the others, `absent` those that never occur.
    `scales` are the runs' own factors, `sd` a step's relative spread around the fit.
    """

    knots: tuple[int, ...]
    curve: Floats
    terms: dict[str, float]
    merged: tuple[str, ...]
    absent: tuple[str, ...]
    scales: tuple[float, ...]
    sd: float

    @classmethod
    def of(cls, made: Calibration) -> Fit:
        """The fit that a calibration keeps; its runs' scales are in the provenance."""
        curve = np.array(made.curve_ns)
        return cls(made.knots, curve, made.terms_ns, (), (), (), float(made.provenance.get("step_sd", 0.0)))

    def predict(self, table: StepTable, shape: Shape) -> Floats:
        """Nanoseconds of each step, from start to start."""
        host, device, launching = self.sides(table, shape)
        return host + np.maximum(device, launching)

    def sides(self, table: StepTable, shape: Shape) -> tuple[Floats, Floats, Floats]:
        """Of each step: what the host adds, what the device takes, and what launching takes at least."""
        device = curve_weights(computed_rows(table, shape), self.knots) @ self.curve
        columns = term_columns(table, shape)
        host = np.zeros(len(table))
        for name, value in self.terms.items():
            if name in HOST_TERMS:
                host += value * columns[name]
            elif name != LAUNCH:
                device = device + value * columns[name]
        return host, device, self.terms.get(LAUNCH, 0.0) * columns[LAUNCH]


@dataclass(frozen=True)
class Design:
    """The matrix of a fit, its target, and which run each row is of."""

    knots: tuple[int, ...]
    names: tuple[str, ...]
    matrix: Floats
    ns: Floats
    run: npt.NDArray[np.int64]
    runs: int

    def take(self, rows: npt.NDArray[np.int64]) -> Design:
        """The design of the given rows; rows may repeat."""
        return replace(self, matrix=self.matrix[rows], ns=self.ns[rows], run=self.run[rows])

    def bounded(self, coefficients: Floats) -> Floats:
        """The matrix with one side of each row alone: the floor of its launches, or what the device does."""
        if LAUNCH not in self.names:
            return self.matrix
        column, device = self._sides()
        busy = self.matrix[:, device] @ coefficients[device]
        return self.sided(self.matrix[:, column] * coefficients[column] > busy)

    def sided(self, launching: npt.NDArray[np.bool_]) -> Floats:
        """The same for rows of which it is known which side takes longer."""
        column, device = self._sides()
        matrix = self.matrix.copy()
        matrix[np.ix_(launching, device)] = 0.0
        matrix[~launching, column] = 0.0
        return matrix

    def _sides(self) -> tuple[int, npt.NDArray[np.int64]]:
        first = len(self.knots)
        rest = [i for i, name in enumerate(self.names) if name not in (*HOST_TERMS, LAUNCH)]
        return first + self.names.index(LAUNCH), np.array([*range(first), *(first + i for i in rest)])


def fit(tables: list[StepTable], shape: Shape) -> Fit:
    """Fits all terms to the steps of several runs. Errors: BadInput for too few steps."""
    full, absent = design(tables, shape)
    names, merged = _separable(full)
    kept = _keep(full, names)
    coefficients, scales, sd = solve(kept)
    curve = coefficients[: len(kept.knots)]
    terms = dict(zip(names, coefficients[len(kept.knots) :].tolist(), strict=True))
    return Fit(kept.knots, curve, terms, merged, absent, tuple(scales.tolist()), sd)


def design(tables: list[StepTable], shape: Shape) -> tuple[Design, tuple[str, ...]]:
    """The matrix with every term that occurs, and the names of those that don't. Errors: BadInput."""
    ns = np.concatenate([table.ns for table in tables])
    run = np.concatenate([np.full(len(table), i) for i, table in enumerate(tables)]).astype(np.int64)
    if not len(ns):
        raise BadInput("no step with work after it: nothing to fit")
    tokens = np.concatenate([computed_rows(table, shape) for table in tables])
    sizes = () if shape.prompt_graphs else (*shape.graph_sizes, *shape.prompt_sizes)
    knots = choose_knots(tokens, sizes)
    parts = [term_columns(table, shape) for table in tables]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in TERMS}
    present = tuple(name for name, column in columns.items() if np.any(column))
    of_others = (LAUNCH,) if shape.prompt_graphs else OF_GRAPHS
    absent = tuple(name for name in TERMS if name not in present and name not in of_others)
    count = len(knots) + len(present)
    least = max(STEPS_PER_TERM * count, LEAST_STEPS)
    if len(ns) < least:
        raise BadInput(f"{len(ns)} steps are too few for {count} terms: record at least {least}")
    matrix = np.hstack([curve_weights(tokens, knots), *(columns[name][:, None] for name in present)])
    return Design(knots, present, matrix, ns, run, len(tables)), absent


def _keep(full: Design, names: tuple[str, ...]) -> Design:
    columns = [*range(len(full.knots)), *(len(full.knots) + full.names.index(name) for name in names)]
    return replace(full, names=names, matrix=full.matrix[:, columns])


def _separable(full: Design) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Terms the data tells apart, and those merged into the rest, the most expendable first."""
    names = [name for name in full.names if name != LAUNCH]
    merged: list[str] = []
    while len(names) > 1:
        kept = _keep(full, tuple(names))
        weighted = kept.matrix / kept.ns[:, None]
        norms = np.linalg.norm(weighted, axis=0)
        gram = (weighted / norms).T @ (weighted / norms)
        inflation = np.diag(np.linalg.inv(gram + 1e-9 * np.eye(len(gram))))[len(kept.knots) :]
        alike = {name for name, value in zip(names, inflation, strict=True) if value > _TELL_APART}
        victim = next((name for name in EXPENDABLE if name in alike), None)
        if victim is None:
            break
        names.remove(victim)
        merged.append(victim)
    return tuple(name for name in full.names if name in (*names, LAUNCH)), tuple(merged)


def solve(d: Design, start: Floats | None = None, rounds: int = _ROUNDS) -> tuple[Floats, Floats, float]:
    """Coefficients, run scales and the relative spread. Starts from `start` where given.

    Rows are weighted by the reciprocal of what the last round predicted (not of what was measured, which
    would draw the fit below the mean).
    """
    scales = np.ones(d.runs)
    bend = _bending(d)
    coefficients = _first(d) if start is None else start
    sd = 0.0
    cut = d.ns
    for _ in range(rounds):
        matrix = d.bounded(coefficients)
        expected = np.maximum(matrix @ coefficients, 1.0)
        scaled = expected * scales[d.run]
        spread = np.abs(d.ns / scaled - 1)
        sd = float(np.mean([1.48 * np.median(spread[d.run == i]) for i in range(d.runs)]))
        cut = np.clip(d.ns, scaled * (1 - _OUTLIER * sd), scaled * (1 + _OUTLIER * sd))
        weighted = matrix / expected[:, None]
        target = cut / scaled
        rows = np.zeros((len(bend), d.matrix.shape[1]))
        rows[:, : len(d.knots)] = bend / np.maximum(coefficients[1 : len(bend) + 1], 1e3)[:, None]
        coefficients = _nnls(np.vstack([weighted, rows]), np.append(target, np.zeros(len(rows))))
        scales = _run_scales(d, cut / np.maximum(d.bounded(coefficients) @ coefficients, 1.0), sd)
    return _give_back(d, coefficients, d.ns - cut), scales, sd


def _first(d: Design) -> Floats:
    """Coefficients to start from: the best of guesses at which steps are as long as their launches."""
    target = np.ones(len(d.ns))
    if LAUNCH not in d.names:
        return _nnls(d.matrix / d.ns[:, None], target)
    eager = d.matrix[:, len(d.knots) + d.names.index(LAUNCH)] > 0
    found: list[tuple[float, Floats]] = []
    for share in (0.0, 0.2, 0.4, 0.6, 0.8):
        launching = eager & (d.ns < np.quantile(d.ns[eager], share))
        guess = _nnls(d.sided(launching) / d.ns[:, None], target)
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


def _run_scales(d: Design, ratio: Floats, sd: float) -> Floats:
    """Each run's factor: its mean ratio drawn towards 1 by the prior, all of them centred on 1."""
    found = np.ones(d.runs)
    if d.runs == 1:
        return found
    for i in range(d.runs):
        mine = ratio[d.run == i]
        weight = len(mine) / _CORRELATED / max(sd, 1e-6) ** 2
        found[i] = (weight * mine.mean() + 1 / RUN_SD**2) / (weight + 1 / RUN_SD**2)
    return np.asarray(found / np.exp(np.mean(np.log(found))), np.float64)


def _give_back(d: Design, coefficients: Floats, pauses_ns: Floats) -> Floats:
    """Adds the time of pauses to the cost of a request: they come with the objects that requests leave.

    Those of steps as long as their launches are the host's, and go to these.
    """
    matrix, rest = d.bounded(coefficients), np.ones(len(d.ns), bool)
    coefficients = coefficients.copy()
    for name in (LAUNCH, "request"):
        if name not in d.names:
            continue
        column = len(d.knots) + d.names.index(name)
        rows = rest & (matrix[:, column] > 0)
        if name == LAUNCH:
            rest &= ~rows
        else:
            rows = rest
        lost = float(pauses_ns[rows].sum())
        if lost > 0 and matrix[rows, column].sum() > 0:
            coefficients[column] += lost / matrix[rows, column].sum()
    return coefficients


def _nnls(matrix: Floats, target: Floats) -> Floats:
    """Non-negative least squares by way of the QR factors, which have as many rows as there are terms."""
    q, r = np.linalg.qr(matrix)
    norms = np.maximum(np.linalg.norm(r, axis=0), 1e-300)
    solution, _ = nnls(r / norms, q.T @ target, maxiter=50 * r.shape[1])
    return np.asarray(solution / norms, np.float64)
