"""Number of replicas for a request rate: the rate divided by one replica's highest rate, rounded up.

A router that spreads sessions evenly, and keeps each on one replica, gives each the same traffic, thinner.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from pagecast.planner_app.wording.quantities import counted

_EXACT = 1e-9  # rates are floats: three times a third is one
_TIGHT = 0.1  # a spare capacity below this share of the rate is worth a note


@dataclass(frozen=True, slots=True)
class Replicas:
    """`count` replicas, of `gpus` GPUs together, take `requests_per_s`; each takes `each` at most.

    `low` and `high` go by the interval of `each`: None where that has none, `high` as well where it may be 0.
    `each_low` is the low end of that interval, which `high` replicas go by.
    """

    requests_per_s: float
    each: float
    count: int
    low: int | None
    high: int | None
    gpus: int
    each_low: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As printed in JSON."""
        return {
            "requests_per_s": self.requests_per_s,
            "each": self.each,
            "count": self.count,
            "low": self.low,
            "high": self.high,
            "gpus": self.gpus,
            "each_low": self.each_low,
            "spare_at_low": self.spare_at_low,
        }

    @property
    def spare_at_low(self) -> float | None:
        """Spare of `high` replicas at the low end of the interval, as a share of the rate."""
        if self.high is None or not self.each_low:
            return None
        return max(self.high * self.each_low / self.requests_per_s - 1, 0.0)

    @property
    def sentence(self) -> str:
        """One sentence."""
        alone = f"{_number(self.requests_per_s)} requests/s take {counted(self.count, 'replica')}"
        if self.low is not None:
            most = "more than can be told" if self.high is None else f"{self.high:,}"
            alone += f" (90%: {self.low:,} to {most})" if self.low != self.high else ""
        gpus = f", {counted(self.gpus, 'GPU')}" if self.gpus != self.count else ""
        return f"{alone}{gpus}, {_number(self.each)} requests/s each at most{self._at_low}"

    @property
    def _at_low(self) -> str:
        """The count at the low end of the interval, and how much of its capacity is spare."""
        if self.each_low is None:
            return ""
        if self.high is None:
            return "; any number may be too few at the low end (0/s)"
        return f"; {self.high:,} at the low end ({_number(self.each_low)}/s, {self.spare_at_low:.0%} spare)"

    @property
    def warning(self) -> str:
        """A sentence where the low end of the interval needs more replicas, or leaves little spare."""
        if self.spare_at_low is None or self.high is None:
            return ""
        at_low = "at the low end of the highest rate's interval"
        if self.high > self.count:
            return (
                f"{at_low}, {self.requests_per_s:.3g} requests/s take {counted(self.high, 'replica')}, "
                f"not {self.count:,}: plan for {self.high:,}, or make the interval narrower (a calibration, "
                "a longer trace)"
            )
        if self.spare_at_low < _TIGHT:
            return (
                f"{at_low}, {counted(self.high, 'replica')} can take only {self.spare_at_low:.0%} more than "
                f"{self.requests_per_s:.3g} requests/s: add a replica for bursts and growth"
            )
        return ""


def replicas(
    requests_per_s: float, each: float, interval: tuple[float | None, float | None], gpus_each: int
) -> Replicas:
    """The replicas for a rate, from the highest rate of one, above 0, and its interval."""
    low, high = interval
    count = _times(requests_per_s, each)
    fewest = None if high is None else _times(requests_per_s, high)
    most = _times(requests_per_s, low) if low else None
    return Replicas(requests_per_s, each, count, fewest, most, count * gpus_each, low)


def _times(whole: float, part: float) -> int:
    return max(1, ceil(whole / part - _EXACT))


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
