"""Step costs drawn from what a calibration does not know: one draw for each replicate of a forecast.

A draw has the coefficients of one resampled fit, a level for the run as a whole, a level for its steps with
prompts, and noise on each such step. The noise of single decode steps is left out: a request's decode
averages over hundreds of them.
"""

from __future__ import annotations

import numpy as np
from pagecast.sim.calibration.calibrated import Calibrated
from pagecast.sim.calibration.file import Calibration
from pagecast.sim.costs import Batch

_BLOCK = 4096


class Drawn(Calibrated):
    """The costs of draw number `index`; equal seeds and numbers give equal costs."""

    def __init__(
        self, calibration: Calibration, index: int, *, seed: int = 0, pipeline_depth: int = 0
    ) -> None:
        random = np.random.default_rng([seed, index])
        noise = calibration.noise
        level = float(np.exp(random.normal(0.0, np.hypot(noise.level_sd, noise.run_sd))))
        copies = calibration.replicates or (_values(calibration),)
        values = tuple(value * level for value in copies[index % len(copies)])
        super().__init__(calibration, values, pipeline_depth=pipeline_depth)
        self._random = random
        self._prompts = float(np.exp(random.normal(0.0, noise.kind_sd)))
        self._noise: list[float] = []

    def device_ns(self, batch: Batch) -> int:
        """Device time of a step with prompt chunks, with noise of its own."""
        if not self._noise:
            sd = self.calibration.noise.prompt_sd
            draws = np.exp(self._random.normal(-(sd**2) / 2, sd, _BLOCK))
            self._noise = (self._prompts * draws).tolist()
        return round(super().device_ns(batch) * self._noise.pop())


def scaled(calibration: Calibration, factor: float, *, pipeline_depth: int = 0) -> Calibrated:
    """The costs with every step `factor` times as long: a forecast's sensitivity is measured with them."""
    values = tuple(value * factor for value in _values(calibration))
    return Calibrated(calibration, values, pipeline_depth=pipeline_depth)


def _values(calibration: Calibration) -> tuple[float, ...]:
    return (*calibration.curve_ns, *calibration.terms_ns.values())
