"""Laws for lengths in tokens (and think times): fixed, uniform, log-normal, or as found in a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import Protocol

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.traces.arrays import Floats, Ints

HELP = (
    "fixed:512, uniform:64-1024, normal:mean=1000,sd=200[,min=1,max=2000], truncated:mean=1000,sd=200, "
    "lognormal:p50=1000,sigma=0.8[,max=8000], lognormal:mean=1200,sigma=0.8"
)


class Law(Protocol):
    """Anything that gives positive random numbers."""

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """`count` independent values."""
        ...


@dataclass(frozen=True)
class ConstantLength:
    """Always the same."""

    value: float

    def __str__(self) -> str:
        return f"fixed:{self.value:g}"

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """`count` times the value."""
        return np.full(count, float(self.value))


@dataclass(frozen=True)
class Uniform:
    """Whole numbers from `least` to `most`, both included."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"uniform:{self.least}-{self.most}"

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """`count` independent values."""
        return rng.integers(self.least, self.most, count, endpoint=True).astype(np.float64)


@dataclass(frozen=True)
class Normal:
    """A normal law, cut off (clipped) to `least .. most`, as guidellm has it: by default five `sd` away."""

    mean: float
    sd: float
    least: float
    most: float

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """`count` independent values."""
        values: Floats = self.mean + self.sd * rng.standard_normal(count)
        return np.asarray(values.clip(self.least, self.most), dtype=np.float64)


@dataclass(frozen=True)
class TruncatedNormal:
    """A normal law without what is below 0, rounded up, as AIPerf has it: not clipped, but drawn again."""

    mean: float
    sd: float

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """`count` independent values, which round to the next whole number above."""
        values: Floats = self.mean + self.sd * rng.standard_normal(count)
        while len(below := np.flatnonzero(values < 0)):
            values[below] = self.mean + self.sd * rng.standard_normal(len(below))
        return np.asarray(np.ceil(values) if self.sd else np.rint(values), dtype=np.float64)


@dataclass(frozen=True)
class LogNormal:
    """A log-normal law of median `p50`, cut off (clipped) to `least .. most`; `sigma` is that of the log."""

    p50: float
    sigma: float
    least: float = 0.0
    most: float = float("inf")

    @classmethod
    def from_mean(cls, mean: float, sigma: float, most: float = float("inf")) -> LogNormal:
        """The law of this mean (before clipping)."""
        return cls(mean * exp(-(sigma**2) / 2), sigma, most=most)

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """`count` independent values."""
        values: Floats = self.p50 * np.exp(self.sigma * rng.standard_normal(count))
        return np.asarray(values.clip(self.least, self.most), dtype=np.float64)


@dataclass(frozen=True)
class Empirical:
    """Draws from observed values, each as often as its weight says (equally without weights)."""

    values: tuple[float, ...]
    weights: tuple[float, ...] | None = None

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """`count` independent values."""
        values: Floats = np.asarray(self.values, dtype=np.float64)
        if self.weights is None:
            return values[rng.integers(0, len(values), count)]
        upto: Floats = np.cumsum(self.weights)
        sample: Floats = values[np.searchsorted(upto, rng.random(count) * upto[-1], side="right")]
        return sample


def tokens(law: Law, count: int, rng: np.random.Generator) -> Ints:
    """`count` lengths in whole tokens, at least 1: what a law of a wide range gives below is raised to that.

    Raises BadInput for a law that names a length below 1.
    """
    least = law.value if isinstance(law, ConstantLength) else law.least if isinstance(law, Uniform) else 1
    if least < 1:
        raise BadInput(f"lengths '{law}': {least:g} is less than 1; give at least 1")
    return np.maximum(np.rint(law.sample(count, rng)), 1).astype(np.int64)


def parse(text: str) -> Law:
    """A law as the command line writes it: `fixed:512`, `uniform:64-1024`, `lognormal:p50=1000,sigma=0.8`.

    A plain number is fixed. Raises BadInput for anything else.
    """
    kind, _, rest = text.partition(":")
    try:
        if not rest:
            return _fixed(kind)
        return _PARSERS[kind](rest)
    except (KeyError, ValueError, TypeError):
        raise BadInput(f"lengths {text!r}: not understood; write a number, or one of {HELP}") from None


def _fixed(text: str) -> Law:
    value = float(text)
    if not 0 <= value < 2**53:
        raise ValueError
    return ConstantLength(value)


def _uniform(text: str) -> Law:
    least, _, most = text.partition("-")
    law = Uniform(int(least), int(most))
    if law.least > law.most:
        raise BadInput(f"lengths 'uniform:{text}': {least} is more than {most}; give the lower first")
    if not 0 <= law.least <= law.most < 2**53:
        raise ValueError
    return law


def _fields(text: str) -> dict[str, float]:
    return {key.strip(): float(value) for key, value in (part.split("=") for part in text.split(","))}


def _normal(text: str) -> Law:
    fields = _fields(text)
    mean, sd = fields.pop("mean"), fields.pop("sd")
    least = fields.pop("min", max(mean - 5 * sd, 1.0))
    most = fields.pop("max", mean + 5 * sd)
    if fields or not (sd >= 0 and 0 <= least <= most < 2**53):
        raise ValueError
    return Normal(mean, sd, least, most)


def _truncated(text: str) -> Law:
    fields = _fields(text)
    mean, sd = fields.pop("mean"), fields.pop("sd")
    if fields or not (0 <= sd < 2**53 and 0 <= mean < 2**53):
        raise ValueError
    return TruncatedNormal(mean, sd)


def _lognormal(text: str) -> Law:
    fields = _fields(text)
    most = fields.pop("max", float("inf"))
    sigma = fields.pop("sigma")
    if not (0 <= sigma < 10 and most > 0 and len(fields) == 1 and 0 < next(iter(fields.values())) < 2**53):
        raise ValueError
    if "mean" in fields:
        return LogNormal.from_mean(fields["mean"], sigma, most)
    return LogNormal(fields["p50"], sigma, most=most)


_PARSERS: dict[str, Callable[[str], Law]] = {
    "fixed": _fixed,
    "uniform": _uniform,
    "normal": _normal,
    "truncated": _truncated,
    "lognormal": _lognormal,
}
