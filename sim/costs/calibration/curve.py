"""The curve of matrix work over a step's tokens: piecewise linear between knots.

Its value at a token count is the cost of everything that each token passes through, weights included, with
the fixed cost of a step. Tokens are padded to CUDA graph sizes where graphs exist.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from pagecast.traces.arrays import Floats, Ints


def padded(tokens: Ints, sizes: tuple[int, ...]) -> Floats:
    """Tokens up to the next CUDA graph size where there is one."""
    if not sizes:
        return tokens.astype(np.float64)
    table = np.array(sizes)
    slot = np.minimum(np.searchsorted(table, tokens), len(table) - 1)
    return np.where(tokens <= table[-1], table[slot], tokens).astype(np.float64)


def curve_weights(tokens: Floats, knots: tuple[int, ...]) -> Floats:
    """Weight of each knot's value at the given tokens; beyond the last knot the last slope goes on."""
    table = np.array(knots, np.float64)
    weights = np.zeros((len(tokens), len(table)))
    if len(table) == 1:
        weights[:, 0] = 1.0
        return weights
    inside = np.maximum(tokens, table[0])
    left = np.clip(np.searchsorted(table, inside, side="right") - 1, 0, len(table) - 2)
    share = (inside - table[left]) / (table[left + 1] - table[left])
    rows = np.arange(len(tokens))
    weights[rows, left] = 1.0 - share
    weights[rows, left + 1] = share
    return weights


@lru_cache(8)
def table_weights(most: int, sizes: tuple[int, ...], knots: tuple[int, ...]) -> Floats:
    """`curve_weights` of 0 to `most` tokens, padded; kept, for all draws of a calibration have the same."""
    weights = curve_weights(padded(np.arange(most + 1), sizes), knots)
    weights.flags.writeable = False
    return weights
