"""Paces: the times at which load tools send requests."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.traces.arrays import Floats

_SEEDS = 2**32  # of numpy's older generator


@dataclass(frozen=True)
class Pace:
    """`rate` requests per second, inf: all at once; `burst` of them come at a time.

    Times between them follow a gamma law of shape `burstiness`: 1 Poisson, inf constant. With a `ramp`,
    linear or exponential, the rate grows from the first request to the last, which come at `rate` and
    `end_rate`. Source: vLLM 0.24, benchmarks/serve.py, `get_request`: the same times at the same seed, unless
    its data set has drawn from numpy's global generator before. Errors: BadInput.
    """

    rate: float = inf
    burstiness: float = 1.0
    burst: int = 1
    ramp: str | None = None
    end_rate: float | None = None

    def __post_init__(self) -> None:
        if self.ramp is not None and not 0 < self.rate <= (self.end_rate or 0) < inf:
            raise BadInput(
                f"ramp-up from {self.rate} to {self.end_rate} requests per second: give the lower first"
            )

    def draw(self, count: int, seed: int) -> Floats:
        """Times of `count` requests, in seconds. Without a ramp the last comes after `count / rate`."""
        bursts = -(-count // self.burst)
        if self.rate == inf:
            return np.zeros(count)
        rates = self._rates(bursts) / self.burst
        if self.burstiness == inf:
            gaps = 1 / rates
        else:
            gaps = np.random.RandomState(seed % _SEEDS).gamma(self.burstiness, 1 / (rates * self.burstiness))
        times = np.cumsum(gaps)
        if self.ramp is None:
            times = times * (bursts * self.burst / self.rate / times[-1])
        return np.repeat(times, self.burst)[:count]

    def _rates(self, count: int) -> Floats:
        """The rate at each burst."""
        if self.ramp is None or self.end_rate is None:
            return np.full(count, self.rate)
        progress = np.arange(count) / max(count - 1, 1)
        if self.ramp == "linear":
            return self.rate + (self.end_rate - self.rate) * progress
        return np.asarray(self.rate * (self.end_rate / self.rate) ** progress)

    def times_s(
        self, rng: np.random.Generator, *, count: int | None = None, duration_s: float | None = None
    ) -> Floats:
        """The same with a seed that `rng` draws, as `Starts` asks; all at once draws none."""
        if count is None:
            raise BadInput("a pace has no end: give a number of requests")
        return self.draw(count, 0 if self.rate == inf else int(rng.integers(_SEEDS)))
