"""Choice of terms by the error on data left out of the fit.

A term stays where the fit without it is worse on steps left out. Left out in turn are each recording, each
load of a sweep, and each fifth of all recordings: the last, because a term may occur in one recording alone.
Where there is one recording, a load that has nearly all units of a term is not judged by its steps with that
term: without them the fit knows nothing of it.

Errors of windows of steps count by the time that they took, for a replay's clock is their sum. That is done
twice: over all steps, and over each kind of step alike, for which kinds are many depends on the load. A term
goes if neither error needs it; what resampled fits find uncertain goes afterwards (`build.py`). Rows keep the
weights of a fit of all terms, so each trial only solves the normal equations of its columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pagecast.sim.fitting.design import Design
from pagecast.sim.fitting.monotone import increments, solved
from pagecast.traces.arrays import Flags, Floats, Ints

_PARTS = 5  # of each recording
_NEARLY_ALL = 0.8  # of a term's units: without them its cost can't be told
_HARDLY_ANY = 1e-3  # of a term's units: a fit of rows that have fewer gives it no cost
_NO_WORSE = 1 + 1e-6  # an error that is larger by less differs by rounding
_WINDOW = 16  # steps of one kind whose time is forecast together


@dataclass(frozen=True)
class Weighted:
    """A fit's rows, weighted as in its last round; `each` is the weight of a nanosecond in each row."""

    matrix: Floats
    target: Floats
    each: Floats


@dataclass(frozen=True)
class _Part:
    """A part left out: normal equations of all other rows, and sums over its own windows of steps.

    `shares` are those of each window in its two errors, `weight` the part's share of its partition's.
    """

    products: Floats
    targets: Floats
    sums: Floats
    measured: Floats
    shares: Floats
    weight: float


def select(full: Design, rows: Weighted) -> tuple[str, ...]:
    """The terms to keep, in the design's order.

    Backward elimination: of the terms that can be dropped without a worse error, the last in the family's
    list goes first.
    """
    parts = _parts(full, rows)
    names = list(full.names)
    fixed = {term.name for term in full.kernels.terms if term.needed}
    best = _errors(full, parts, names)
    while True:
        trials = [name for name in reversed(names) if name not in fixed]
        errors = (
            (name, _errors(full, parts, [other for other in names if other != name])) for name in trials
        )
        dispensable = (pair for pair in errors if np.all(pair[1] <= best * _NO_WORSE))
        victim, error = next(dispensable, (None, best))
        if victim is None:
            break
        names.remove(victim)
        best = np.minimum(best, error)
    return tuple(names)


def _parts(full: Design, rows: Weighted) -> list[_Part]:
    matrix = increments(rows.matrix, len(full.knots))
    plain = matrix / rows.each[:, None]
    units = np.abs(plain).sum(axis=0)
    measured = rows.target / rows.each
    left_out = []
    for parts in _partitions(full):
        for subset, judged in parts:
            others, mine = matrix[~subset], np.flatnonzero(judged)
            # Of a term with hardly a unit in the other rows, their noise would be the cost.
            others = others * (np.abs(plain[~subset]).sum(axis=0) > _HARDLY_ANY * units)
            order = mine[np.argsort(full.kind[mine], kind="stable")]
            starts = np.arange(0, len(order), _WINDOW)
            taken = np.add.reduceat(measured[order], starts)
            left_out.append(
                _Part(
                    others.T @ others,
                    others.T @ rows.target[~subset],
                    np.add.reduceat(plain[order], starts),
                    taken,
                    np.stack([taken / taken.sum(), _shares(full.kind[order][starts], taken)]),
                    1 / len(parts),
                )
            )
    return left_out


def _shares(kinds: Ints, taken: Floats) -> Floats:
    """By time within each kind of step, whose sums are equal; they sum to 1."""
    _, numbers = np.unique(kinds, return_inverse=True)
    of_kind = np.bincount(numbers, taken)
    return np.asarray(taken / of_kind[numbers] / len(of_kind), np.float64)


def _partitions(full: Design) -> list[list[tuple[Flags, Flags]]]:
    """Partitions of the rows: by recording, by load, and by time within each recording.

    Of each part its rows, and those of them that are judged.
    """
    partitions = []
    for numbers in (full.run, full.load):
        unique = np.unique(numbers)
        if len(unique) > 1:
            parts = [numbers == number for number in unique]
            alone = numbers is full.load and len(np.unique(full.run)) == 1
            judged = [_judged(full, part) if alone else part for part in parts]
            partitions.append([pair for pair in zip(parts, judged, strict=True) if pair[1].any()])
    block = np.zeros(len(full.ns), np.int64)
    for rows in full.blocks():
        block[rows] = np.arange(len(rows)) * _PARTS // len(rows)
    fifths = [block == number for number in range(_PARTS)]
    return [*partitions, list(zip(fifths, fifths, strict=True))]


def _judged(full: Design, part: Flags) -> Flags:
    """The rows of a part without terms of which it has nearly all units."""
    units = np.abs(full.matrix[:, len(full.knots) : len(full.knots) + len(full.names)])
    own = units[part].sum(axis=0) > _NEARLY_ALL * units.sum(axis=0)
    return np.asarray(part & ~(units[:, own] > 0).any(axis=1), bool)


def _errors(full: Design, parts: list[_Part], names: list[str]) -> Floats:
    """The errors in the time of windows left out, as a share of it, summed over the partitions.

    Two: over all steps, and over each kind of step alike.
    """
    first, terms = len(full.knots), len(full.names)
    columns = [
        *range(first),
        *(first + i for i, name in enumerate(full.names) if name in names),
        *range(first + terms, full.matrix.shape[1]),
    ]
    errors = [part.weight * _errors_of(part, np.array(columns)) for part in parts]
    return np.asarray(np.sum(errors, axis=0), np.float64)


def _errors_of(part: _Part, columns: Ints) -> Floats:
    solution = solved(part.products[np.ix_(columns, columns)], part.targets[columns])
    expected = part.sums[:, columns] @ solution
    errors = np.abs(np.log(np.maximum(expected, 1.0) / np.maximum(part.measured, 1.0)))
    return np.asarray(part.shares @ errors, np.float64)
