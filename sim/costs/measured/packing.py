"""The packed form of measured times: logarithms in 16 bits.

A time is stored as the number of steps of 0.1% that it lies above 0.05 us, so that a table of a GPU stays
small; 0 stands for a shape that was not measured. Times from 0.05 us to hours fit, rounded by 0.05% at most.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from pagecast.traces.arrays import Floats

_LEAST_S = 5e-8
_STEP = 1e-3


def pack(seconds: Floats) -> npt.NDArray[np.uint16]:
    """Codes of times in seconds; NaN is a shape that was not measured."""
    finite = np.isfinite(seconds)
    steps = np.log(np.where(finite, np.maximum(seconds, _LEAST_S), _LEAST_S) / _LEAST_S) / _STEP
    return np.where(finite, 1 + np.rint(steps), 0).astype(np.uint16)


def unpack(codes: npt.NDArray[Any]) -> Floats:
    """Times in seconds, NaN where none was measured."""
    return np.where(codes == 0, np.nan, _LEAST_S * np.exp((codes.astype(np.float64) - 1) * _STEP))
