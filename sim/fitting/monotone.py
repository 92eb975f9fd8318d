"""Non-negative least squares in which the first coefficients, a curve's values, never fall."""

from __future__ import annotations

import numpy as np
from pagecast.traces.arrays import Floats
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import nnls

_RIDGE = 1e-9  # of each column's own product, so that equal columns can be solved for


def increments(matrix: Floats, knots: int) -> Floats:
    """The matrix for a curve's increments instead of its values, of which it has `knots`."""
    rising = np.cumsum(matrix[:, knots - 1 :: -1], axis=1)[:, ::-1] if knots else matrix[:, :0]
    return np.hstack([rising, matrix[:, knots:]])


def values(solution: Floats, knots: int) -> Floats:
    """The curve's values again: the opposite of `increments`, for a solution."""
    return np.append(np.cumsum(solution[:knots]), solution[knots:])


def nonnegative(matrix: Floats, target: Floats, knots: int) -> Floats:
    """Coefficients of least squares, none negative, the first `knots` of them in rising order.

    By way of the Cholesky factor of the normal equations, which has as many rows as there are coefficients.
    """
    rising = increments(matrix, knots)
    return values(solved(rising.T @ rising, rising.T @ target), knots)


def solved(products: Floats, targets: Floats) -> Floats:
    """Non-negative solution of normal equations: `products` of the columns, and `targets` of each with the
    target. Of a column of zeros nothing is known: its coefficient is 0."""
    squares = np.diag(products)
    known = np.flatnonzero(squares > 0)
    norms = np.sqrt(squares[known])
    scaled = products[np.ix_(known, known)] / norms / norms[:, None] + _RIDGE * np.eye(len(norms))
    upper = cholesky(scaled)
    reduced = solve_triangular(upper, targets[known] / norms, trans="T")
    solution = np.zeros(len(squares))
    solution[known] = nnls(upper, reduced, maxiter=50 * len(norms))[0] / norms
    return solution
