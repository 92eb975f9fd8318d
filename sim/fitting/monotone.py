"""Non-negative least squares in which the first coefficients, a curve's values, never fall."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

Floats = npt.NDArray[np.float64]


def increments(matrix: Floats, knots: int) -> Floats:
    """The matrix for a curve's increments instead of its values, of which it has `knots`."""
    rising = np.cumsum(matrix[:, knots - 1 :: -1], axis=1)[:, ::-1] if knots else matrix[:, :0]
    return np.hstack([rising, matrix[:, knots:]])


def values(solution: Floats, knots: int) -> Floats:
    """The curve's values again: the opposite of `increments`, for a solution."""
    return np.append(np.cumsum(solution[:knots]), solution[knots:])


def nonnegative(matrix: Floats, target: Floats, knots: int) -> Floats:
    """Coefficients of least squares, none negative, the first `knots` of them in rising order.

    By way of the QR factors, which have as many rows as there are coefficients.
    """
    q, r = np.linalg.qr(increments(matrix, knots))
    norms = np.maximum(np.linalg.norm(r, axis=0), 1e-300)
    solution, _ = nnls(r / norms, q.T @ target, maxiter=50 * r.shape[1])
    return values(np.asarray(solution / norms, np.float64), knots)
