"""Arrival times: renewal processes of a given rate and burstiness.

>>> import numpy as np
>>> from pagecast.traces.arrivals import ArrivalProcess
>>> process = ArrivalProcess("poisson", rate=5.0)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gamma
from typing import Protocol

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.traces.arrays import Floats

KINDS = ("poisson", "gamma", "weibull", "even")
MAX_ARRIVALS = 20_000_000


class Starts(Protocol):
    """Anything that tells when requests or sessions start, `rate` per second."""

    @property
    def rate(self) -> float: ...

    def times_s(
        self, rng: np.random.Generator, *, count: int | None = None, duration_s: float | None = None
    ) -> Floats:
        """Times from 0 on: `count` of them, or all before `duration_s`."""
        ...


@dataclass(frozen=True)
class ArrivalProcess:
    """Independent times between arrivals with mean `1 / rate` seconds and coefficient of variation `cv`.

    `kind` is `poisson` (cv 1), `gamma`, `weibull` (cv 0.05 to 30) or `even` (cv 0). The process runs
    since ever when it is first looked at: the time to the first arrival has the stationary law, so that
    the expected number of arrivals in T seconds is `rate * T` for every kind and cv, short T included.

    Raises BadInput for an unknown kind, a rate that is not positive, or a cv that the kind can't have.
    """

    kind: str
    rate: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"arrivals {self.kind!r}: no such kind; choose {', '.join(KINDS)}")
        if not (np.isfinite(self.rate) and self.rate > 0):
            raise BadInput(f"arrival rate {self.rate:g}: give a positive number of arrivals per second")
        if self.kind in ("gamma", "weibull") and not 0.05 <= self.cv <= 30:
            raise BadInput(f"arrival cv {self.cv:g}: give a number from 0.05 to 30")

    @cached_property
    def _shape(self) -> float:
        if self.kind == "gamma":
            return 1 / self.cv**2
        return weibull_shape(self.cv) if self.kind == "weibull" else 1.0

    def gaps_s(self, count: int, rng: np.random.Generator) -> Floats:
        """`count` times between arrivals, in seconds."""
        mean, shape = 1 / self.rate, self._shape
        if self.kind == "even":
            return np.full(count, mean)
        if self.kind == "gamma":
            return rng.gamma(shape, mean / shape, count)
        if self.kind == "weibull":
            return mean / gamma(1 + 1 / shape) * rng.weibull(shape, count)
        return rng.exponential(mean, count)

    def first_s(self, rng: np.random.Generator) -> float:
        """Time to the first arrival: a uniform share of a gap picked in proportion to its length."""
        mean, shape = 1 / self.rate, self._shape
        if self.kind == "poisson":
            return float(rng.exponential(mean))
        share = float(rng.uniform())
        if self.kind == "gamma":
            return share * float(rng.gamma(shape + 1, mean / shape))
        if self.kind == "weibull":
            scale = mean / gamma(1 + 1 / shape)
            return share * scale * float(rng.gamma(1 + 1 / shape) ** (1 / shape))
        return share * mean

    def times_s(
        self, rng: np.random.Generator, *, count: int | None = None, duration_s: float | None = None
    ) -> Floats:
        """Arrival times from 0 on: `count` of them, or all before `duration_s` (the fewer if both)."""
        if count is None and duration_s is None:
            raise BadInput("arrivals without end: give a number of requests or a duration")
        expected_count = min(self.rate * duration_s if duration_s is not None else np.inf, count or np.inf)
        if expected_count > MAX_ARRIVALS:
            raise BadInput(
                f"{expected_count:.3g} arrivals are more than the {MAX_ARRIVALS:,} that are made at once; "
                "lower the rate, the duration or the number of requests"
            )
        most = count if count is not None else np.inf
        until = duration_s if duration_s is not None else np.inf
        last = self.first_s(rng)
        parts, total = [np.array([last])], 1
        while last < until and total < most:
            wish = self.rate * (until - last) * 1.05 + 16 if np.isfinite(until) else most - total
            gaps = self.gaps_s(int(min(wish, most - total)), rng)
            parts.append(last + np.cumsum(gaps))
            total += len(gaps)
            last = float(parts[-1][-1])
        times = np.concatenate(parts)
        return times[times < until][:count]


def weibull_shape(cv: float) -> float:
    """The shape of a Weibull law with this coefficient of variation."""
    from scipy.optimize import brentq  # half a second that most commands don't need

    def excess(shape: float) -> float:
        return gamma(1 + 2 / shape) / gamma(1 + 1 / shape) ** 2 - 1 - cv**2

    return float(brentq(excess, 0.12, 30.0))
