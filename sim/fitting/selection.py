"""Choice of terms by the error on data left out of the fit.

A term is kept where the fit without it is worse on steps that it has not seen: those of each recording and of
each load of a sweep in turn, and of each of five parts of all recordings, for a term may occur in one of them
alone. Rows keep the weights of a fit of all terms, so that every trial is a small problem in the products of
its columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pagecast.sim.fitting.design import Design
from pagecast.sim.fitting.monotone import increments
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import nnls

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_WORSE = 0.01  # by which the error must grow without a term for it to be kept, as a share
_PARTS = 5  # of each recording
_WINDOW = 16  # steps of one kind whose time is forecast together
_RIDGE = 1e-9  # of each column's own product, so that equal columns can be solved for


@dataclass(frozen=True)
class Weighted:
    """A fit's rows as its last round weighs them; `each` is the weight of a nanosecond of each row."""

    matrix: Floats
    target: Floats
    each: Floats


@dataclass(frozen=True)
class _Part:
    """A part that is left out: the products of all other rows, and the sums of its own windows of steps."""

    products: Floats
    targets: Floats
    sums: Floats
    measured: Floats
    weight: float


def select(full: Design, rows: Weighted) -> tuple[str, ...]:
    """The terms to keep, in the design's order: of those that can go, the last of its family goes first."""
    parts = _parts(full, rows)
    kept = list(full.names)
    fixed = {term.name for term in full.kernels.terms if term.needed}
    best = _error(full, parts, kept)
    while True:
        trials = [name for name in reversed(kept) if name not in fixed]
        errors = ((name, _error(full, parts, [other for other in kept if other != name])) for name in trials)
        victim, error = next((pair for pair in errors if pair[1] <= best * (1 + _WORSE)), (None, best))
        if victim is None:
            break
        kept.remove(victim)
        best = min(best, error)
    return tuple(kept)


def _parts(full: Design, rows: Weighted) -> list[_Part]:
    matrix = increments(rows.matrix, len(full.knots))
    plain = matrix / rows.each[:, None]
    measured = rows.target / rows.each
    found = []
    for parts in _partitions(full):
        for chosen in parts:
            others, mine = matrix[~chosen], np.flatnonzero(chosen)
            order = mine[np.argsort(full.kind[mine], kind="stable")]
            starts = np.arange(0, len(order), _WINDOW)
            found.append(
                _Part(
                    others.T @ others,
                    others.T @ rows.target[~chosen],
                    np.add.reduceat(plain[order], starts),
                    np.add.reduceat(measured[order], starts),
                    1 / len(parts),
                )
            )
    return found


def _partitions(full: Design) -> list[list[npt.NDArray[np.bool_]]]:
    """Ways to part the rows: by recording and by load where there are several, and each recording in time."""
    found = []
    for numbers in (full.run, full.load):
        unique = np.unique(numbers)
        if len(unique) > 1:
            found.append([numbers == number for number in unique])
    block = np.zeros(len(full.ns), np.int64)
    for rows in full.blocks():
        block[rows] = np.arange(len(rows)) * _PARTS // len(rows)
    return [*found, [block == number for number in range(_PARTS)]]


def _error(full: Design, parts: list[_Part], kept: list[str]) -> float:
    """Sum over the ways to part of the mean error in the time of windows."""
    first, terms = len(full.knots), len(full.names)
    columns = [
        *range(first),
        *(first + i for i, name in enumerate(full.names) if name in kept),
        *range(first + terms, full.matrix.shape[1]),
    ]
    errors = [part.weight * _error_of(part, np.array(columns)) for part in parts]
    return float(sum(errors))


def _error_of(part: _Part, columns: Ints) -> float:
    products = part.products[np.ix_(columns, columns)]
    norms = np.sqrt(np.maximum(np.diag(products), 1e-300))
    scaled = products / norms / norms[:, None] + _RIDGE * np.eye(len(columns))
    upper = cholesky(scaled)
    target = solve_triangular(upper, part.targets[columns] / norms, trans="T")
    solution, _ = nnls(upper, target, maxiter=50 * len(columns))
    expected = part.sums[:, columns] @ (solution / norms)
    errors = np.abs(np.log(np.maximum(expected, 1.0) / np.maximum(part.measured, 1.0)))
    return float(errors.mean())
