"""An SLO as text, `ttft_p99<2s,tpot_p95<50ms,goodput(ttft<2s,tpot<50ms)>0.99`, and its verdict.

A term bounds a statistic of a latency, or the share of good requests: those that completed and kept every
bound in the brackets. TTFT, E2E and queue time are those of every request that was offered, and of one that
was not served they are infinite (`served.py`); a replay's summary leaves such requests out. Other latencies
are of the requests that reached them. The share is of all requests, so rejected and cancelled ones count
against it. A request of one token has no TPOT, and keeps any bound of it.

A new latency is a name in `LATENCIES` and a column `NAME_s` of a result's requests. A new kind of term is a
class with `judge`, and a case in `_term` that reads it.

    >>> from pagecast.planner_app.planner.slo import Slo
    >>> [term.text for term in Slo.parse("ttft_p99<2s, goodput(tpot<50ms)>0.99").terms]
    ['ttft_p99<2s', 'goodput(tpot<50ms)>0.99']
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

import numpy as np
import pandas as pd
from pagecast.planner_app.planner.served import ENDLESS, RequestCounts, latencies
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import Result
from pagecast.traces.arrays import Flags, Floats

LATENCIES = ("ttft", "tpot", "e2e", "queue", "prefill", "decode")
_ITL = "itl"  # replays have its statistics, but no value for each request
SERVED = 0.95  # least share of the offered requests that must get a first token, whatever an SLO bounds
SHARES = ("goodput", "kept_up", "served")  # terms that are parts of requests, and bounded from below
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_ALLOWED = (
    f"a term is like ttft_p99<2s or goodput(ttft<2s,tpot<50ms)>0.99, of {', '.join(LATENCIES)}, "
    f"with mean, max or p1 to p99.99, and a time in {', '.join(UNITS_S)}"
)
_COMPARED = re.compile(r"(?P<name>[^<>=]*)(?P<sign><=|>=|<|>)(?P<bound>[^<>=]*)")
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(us|ms|s|min)")
_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")
_GOODPUT = re.compile(r"goodput\((.*)\)((?:>=|>)[^<>=]*)")

Figures = Mapping[str, float]  # as `summary_figures` gives them: `ttft_s.p99` and so on


class TermVerdict(NamedTuple):
    """A term, what it came to (None: no request has it), its bound (seconds or share), whether it holds.

    A value is infinite where too many requests were not served.
    """

    text: str
    value: float | None
    bound: float
    holds: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an SLO holds, and each of its terms."""

    holds: bool
    terms: tuple[TermVerdict, ...]

    @property
    def broken(self) -> tuple[TermVerdict, ...]:
        """The terms that don't hold."""
        return tuple(term for term in self.terms if not term.holds)


@dataclass(frozen=True, slots=True)
class Latency:
    """`ttft_p99<2s`: `statistic` is `mean`, `max` or a percentile such as `p99`."""

    text: str
    latency: str
    statistic: str
    bound_s: float
    inclusive: bool

    def judge(self, source: pd.DataFrame | Figures) -> TermVerdict:
        """The term against requests, or against figures that hold its statistic."""
        value = self._value(source)
        holds = value is not None and _below(value, self.bound_s, self.inclusive)
        if value is None:  # answers of one token have no TPOT to keep; where nobody was served, none was kept
            holds = _completed(source) > 0
        return TermVerdict(self.text, value, self.bound_s, holds)

    def _value(self, source: pd.DataFrame | Figures) -> float | None:
        if not isinstance(source, pd.DataFrame):
            name = f"{self.latency}_s.{self.statistic}"
            if name not in source:
                raise BadInput(f"SLO term {self.text!r} needs the replay's requests: no summary has {name}")
            if self.latency in ENDLESS and (source.get("rejected") or source.get("cancelled")):
                raise BadInput(
                    f"SLO term {self.text!r} needs the replay's requests: no summary tells who was served"
                )
            return source[name] if np.isfinite(source[name]) else None
        values = latencies(source, self.latency)
        if not len(values):
            return None
        if self.statistic in ("mean", "max"):
            return float(values.mean() if self.statistic == "mean" else values.max())
        return _percentile(values, float(self.statistic[1:]))


@dataclass(frozen=True, slots=True)
class Goodput:
    """`goodput(ttft<2s,tpot<50ms)>0.99`: `bounds` holds (latency, seconds, whether the bound is kept)."""

    text: str
    bounds: tuple[tuple[str, float, bool], ...]
    bound: float
    inclusive: bool

    def judge(self, source: pd.DataFrame | Figures) -> TermVerdict:
        """The term against requests. Errors: BadInput for figures, which don't tell."""
        if not isinstance(source, pd.DataFrame):
            raise BadInput(f"SLO term {self.text!r} needs the replay's requests: a summary does not tell")
        if not len(source):
            return TermVerdict(self.text, None, self.bound, False)
        share = float(self.good(source).mean())
        holds = share >= self.bound if self.inclusive else share > self.bound
        return TermVerdict(self.text, share, self.bound, holds)

    def good(self, requests: pd.DataFrame) -> Flags:
        """Which requests are good."""
        good = requests["state"].to_numpy() == "completed"
        for latency, bound_s, inclusive in self.bounds:
            values = requests[f"{latency}_s"].to_numpy(np.float64)
            below = values <= bound_s if inclusive else values < bound_s
            good &= below | np.isnan(values)
        return np.asarray(good, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Slo:
    """An SLO: all its terms must hold."""

    text: str
    terms: tuple[Latency | Goodput, ...]

    @classmethod
    def optional(cls, text: str) -> Slo:
        """The same as `parse`; an empty text is a level of no terms. Errors: BadInput."""
        return cls.parse(text) if text.strip() else cls("", ())

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Reads an SLO. Errors: BadInput naming the term and what is allowed."""
        if ";" in text:
            raise BadInput(f"SLO {text!r}: separate terms by commas")
        parts = [part.strip() for part in re.split(r",(?![^(]*\))", text)]
        if not any(parts):
            raise BadInput(f"the SLO is empty; {_ALLOWED}")
        return cls(",".join(parts), tuple(_term(part) for part in parts))

    def verdict(self, source: Result | pd.DataFrame | Figures) -> Verdict:
        """Judges a replay, a table of its requests, or figures. Errors: BadInput where figures don't tell.

        Where requests were not served, the share that was is a term as well, unless goodput bounds it.
        """
        table = source.requests if isinstance(source, Result) else source
        terms = tuple(term.judge(table) for term in self.terms)
        bounds_share = any(isinstance(term, Goodput) for term in self.terms)
        if terms and not bounds_share and isinstance(table, pd.DataFrame):
            terms += served_terms(table)
        return Verdict(all(term.holds for term in terms), terms)

    def good(self, requests: pd.DataFrame) -> Flags:
        """Which requests completed and keep every bound of the level, percentiles' bounds included.

        Their share is the goodput of a replay: a level of `ttft_p99<2s` asks each request for less than 2 s.
        """
        bounds: list[tuple[str, float, bool]] = []
        for term in self.terms:
            if isinstance(term, Goodput):
                bounds += term.bounds
            else:
                bounds.append((term.latency, term.bound_s, term.inclusive))
        return Goodput(self.text, tuple(bounds), 0.0, True).good(requests)


def served_terms(requests: pd.DataFrame) -> tuple[TermVerdict, ...]:
    """The term on the share of the offered requests that were served; none where all were."""
    counts = RequestCounts.of(requests)
    if not counts.unserved:
        return ()
    share = counts.served_share
    return (TermVerdict(f"served>={SERVED}", share, SERVED, share >= SERVED),)


def excess(term: TermVerdict) -> float:
    """A term's value in multiples of its bound; for a share, the part that misses over the part that may."""
    if term.value is None:
        return 0.0 if term.holds else inf
    value, bound = term.value, term.bound
    if term.text.startswith(SHARES):
        value, bound = max(1 - value, 0.0), 1 - bound
    if bound <= 0:
        return 0.0 if value <= 0 else inf
    return value / bound


def _percentile(values: Floats, percent: float) -> float:
    """The linear percentile; infinite where a value that it lies between is."""
    finite = values[np.isfinite(values)]
    place = round((len(values) - 1) * percent / 100, 9)
    if ceil(place) >= len(finite):
        return inf
    return float(np.percentile(np.where(np.isinf(values), finite.max(), values), percent))


def _completed(source: pd.DataFrame | Figures) -> float:
    if isinstance(source, pd.DataFrame):
        return float((source["state"] == "completed").sum())
    return source.get("completed", 0.0)


def _below(value: float, bound: float, inclusive: bool) -> bool:
    return value <= bound if inclusive else value < bound


def _term(text: str) -> Latency | Goodput:
    plain = re.sub(r"\s+", "", text)
    if plain.startswith("goodput"):
        return _goodput(text, plain)
    name, bound_s, inclusive = _compared(text, plain)
    latency, _, statistic = name.partition("_")
    if latency not in LATENCIES:
        raise _no_latency(text, latency, statistic)
    if statistic not in ("mean", "max") and not _is_percentile(statistic):
        raise _bad(text, f"{statistic!r} is no statistic" if statistic else "it lacks a statistic")
    return Latency(plain, latency, statistic, bound_s, inclusive)


def _goodput(text: str, plain: str) -> Goodput:
    match = _GOODPUT.fullmatch(plain)
    if match is None:
        raise _bad(text, "a share of good requests is goodput(...)> and a number")
    bounds = []
    for part in match[1].split(","):
        latency, bound_s, inclusive = _compared(text, part)
        if latency == _ITL:
            raise _no_latency(text, latency, "")
        if latency not in LATENCIES:
            raise _bad(text, f"in brackets stand plain latencies, not {latency!r}")
        bounds.append((latency, bound_s, inclusive))
    inclusive, number = match[2].startswith(">="), match[2].lstrip(">=")
    percent, number = number.endswith("%"), number.removesuffix("%")
    share = float(number) / (100 if percent else 1) if _NUMBER.fullmatch(number) else -1.0
    if not 0 <= share <= 1 or (share == 1 and not inclusive):
        raise _bad(text, "the share must lie between 0 and 1, as in >0.99, >99% or >=1")
    return Goodput(plain, tuple(bounds), share, inclusive)


def _compared(text: str, part: str) -> tuple[str, float, bool]:
    """The name, the bound in seconds, and whether the bound itself is kept, of `ttft<2s`."""
    match = _COMPARED.fullmatch(part)
    if match is None:
        raise _bad(text, f"{part!r} compares nothing")
    if match["sign"].startswith(">"):
        raise _bad(text, "a latency is bounded from above, with <")
    quantity = _QUANTITY.fullmatch(match["bound"])
    if quantity is None:
        raise _bad(text, f"{match['bound']!r} is no time with a unit")
    bound_s = float(quantity[1]) * UNITS_S[quantity[2]]
    if bound_s <= 0:
        raise _bad(text, "the bound must be above 0")
    return match["name"], bound_s, match["sign"] == "<="


def _is_percentile(statistic: str) -> bool:
    match = re.fullmatch(r"p(\d+(?:\.\d+)?)", statistic)
    return match is not None and 0 < float(match[1]) < 100


def _no_latency(text: str, name: str, rest: str) -> BadInput:
    """The error on a term that begins with no latency."""
    if name == _ITL:
        return BadInput(f"SLO term {text!r}: ITL can't be bounded; tpot can, as in tpot_p99<40ms")
    if rest in LATENCIES and (name in ("mean", "max") or _is_percentile(name)):
        return BadInput(f"SLO term {text!r}: did you mean {rest}_{name}?")
    return _bad(text, f"{name!r} is no latency")


def _bad(term: str, what: str) -> BadInput:
    return BadInput(f"SLO term {term!r}: {what}; {_ALLOWED}")
