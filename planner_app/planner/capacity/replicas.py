"""Number of replicas for a request rate: the rate divided by one replica's highest rate, rounded up.

A router that spreads sessions evenly, and keeps each on one replica, gives each the same traffic, thinner.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

_EXACT = 1e-9  # rates are floats: three times a third is one


@dataclass(frozen=True, slots=True)
class Replicas:
    """`count` replicas, of `gpus` GPUs together, take `requests_per_s`; each takes `each` at most.

    `low` and `high` go by the interval of `each`: None where that has none, `high` as well where it may be 0.
    """

    requests_per_s: float
    each: float
    count: int
    low: int | None
    high: int | None
    gpus: int

    def to_dict(self) -> dict[str, Any]:
        """As printed in JSON."""
        return {
            "requests_per_s": self.requests_per_s,
            "each": self.each,
            "count": self.count,
            "low": self.low,
            "high": self.high,
            "gpus": self.gpus,
        }

    @property
    def says(self) -> str:
        """One sentence."""
        alone = f"{_number(self.requests_per_s)} requests/s take {_counted(self.count, 'replica')}"
        if self.low is not None:
            most = "more than can be told" if self.high is None else f"{self.high:,}"
            alone += f" (90%: {self.low:,} to {most})" if self.low != self.high else ""
        gpus = f", {_counted(self.gpus, 'GPU')}" if self.gpus != self.count else ""
        return f"{alone}{gpus}, {_number(self.each)} requests/s each at most"


def replicas(
    requests_per_s: float, each: float, interval: tuple[float | None, float | None], gpus_each: int
) -> Replicas:
    """The replicas for a rate, from the highest rate of one, above 0, and its interval."""
    low, high = interval
    count = _times(requests_per_s, each)
    fewest = None if high is None else _times(requests_per_s, high)
    most = _times(requests_per_s, low) if low else None
    return Replicas(requests_per_s, each, count, fewest, most, count * gpus_each)


def _times(whole: float, part: float) -> int:
    return max(1, ceil(whole / part - _EXACT))


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("s" if count != 1 else "")
