"""Verdicts of the gate: a scenario's figures against bounds, an SLO, and a baseline.

Bounds and SLOs are judged by the forecast itself. A regression is judged by paired differences: draw i of
today against draw i of the baseline, with the same costs and workload. It fails only if the whole 90%
interval of the mean difference is beyond the allowance. So a change of exactly the allowance fails by chance
in one of twenty cases, and no change at all never fails. With `undecided: fail` it fails if any of the
interval is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import copysign, inf, isinf, sqrt
from typing import Any

import numpy as np
from pagecast.planner_app.planner.directions import more_is_better
from pagecast.planner_app.planner.gate.check_file import Bound, CheckFile
from pagecast.planner_app.planner.gate.figures import (
    UNSERVED,
    FigureDraws,
    draws_of,
    leaves_out_unserved,
    value_of,
)
from pagecast.planner_app.wording.figures import shown
from pagecast.planner_app.wording.quantities import counted
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import Result
from scipy import stats

CONFIDENCE = 0.9
ONE = "1 replay"  # which a bound or an SLO is judged by
_COUNTED_BY = "check.slo and a limit or regression of `unserved` count them"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was asked, and whether it holds. `kind`: limit, slo or regression.

    `value`, `asked` (of a regression: the baseline's, and what it may be worse by) and `why` (how far it is
    from that) are as people read them; `numbers` has the same as numbers, in the figure's own unit (seconds,
    tokens, counts, shares), None for what there is not. `of` tells what the value is a mean of: the
    one replay, or draws of costs and workload, which make another figure even where the name is the same.
    `undecided`: the interval of a regression reaches beyond what is allowed, but not all of it does.
    """

    kind: str
    name: str
    value: str
    asked: str
    holds: bool
    why: str = ""
    of: str = ONE
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    undecided: bool = False

    def as_dict(self) -> dict[str, Any]:
        """As printed in JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Change:
    """The mean paired difference of a figure over `draws` pairs, in percent of the baseline's mean, with its
    90% interval."""

    before: float
    after: float
    percent: float
    low: float
    high: float
    draws: int


def verdict(findings: Sequence[Finding], uncompared: int = 0) -> str:
    """How many checks failed, or that all hold, and how many are undecided.

    `uncompared`: regressions that the file asks about, and that were left out.
    """
    count = len(findings)
    if uncompared:
        left = f"{counted(uncompared, 'regression check')} not compared"
        return f"{verdict(findings)}, {left}"
    if not count:
        return "nothing was checked"
    broken = sum(not finding.holds for finding in findings)
    text = "the only check holds" if count == 1 else f"all {count} checks hold"
    if broken:
        text = f"{broken} of {count} checks failed"
    undecided = sum(finding.undecided for finding in findings)
    return f"{text}, {undecided} undecided" if undecided else text


def levels(file: CheckFile, result: Result) -> list[Finding]:
    """Every term of the file's SLO."""
    if file.slo is None:
        return []
    findings = []
    for text, value, bound, holds in file.slo.verdict(result).terms:
        sign = next(sign for sign in ("<=", ">=", "<", ">") if sign in text[text.rfind(")") + 1 :])
        name, _, bound_text = text.rpartition(sign)
        is_share = name.startswith(("goodput", "served"))
        told = None if value is None else f"{value:.1%}" if is_share else shown("time_s", value)
        asked = f"{sign}{100 * bound:g}%" if is_share else f"{sign}{bound_text}"
        why = "" if value is None else "" if holds else _off(value, bound)
        numbers = {"value": value, "min" if sign.startswith(">") else "max": bound}
        findings.append(Finding("slo", name, told or "-", asked, bool(holds), why, numbers=numbers))
    return findings


def limits(file: CheckFile, figures: Mapping[str, float]) -> list[Finding]:
    """Every bound of the file, in its order."""
    return [_limit(name, bound, value_of(name, figures)) for name, bound in file.check.limits.items()]


def _limit(name: str, bound: Bound, value: float) -> Finding:
    bound_text = ", ".join(
        f"{sign}{shown(name, limit)}"
        for sign, limit in ((">=", bound.min), ("<=", bound.max))
        if limit is not None
    )
    numbers = {"value": None if np.isnan(value) else value, "min": bound.min, "max": bound.max}
    if np.isnan(value):
        return Finding(
            "limit", name, "-", bound_text, False, "this replay has no such figure", numbers=numbers
        )
    least = -np.inf if bound.min is None else bound.min
    most = np.inf if bound.max is None else bound.max
    holds = bool(least <= value <= most)
    why = "" if holds else _off(value, least if value < least else most)
    return Finding("limit", name, shown(name, value), bound_text, holds, why, numbers=numbers)


def _off(value: float, bound: float) -> str:
    if isinf(value):
        return "requests were not served"
    return f"{_percent(100 * (value / bound - 1))}%" if bound else ""


def regressions(file: CheckFile, before: FigureDraws, after: FigureDraws) -> list[Finding]:
    """Every figure that may not get worse, against the baseline's. Errors: BadInput for one it lacks."""
    findings = []
    for name, allowed in file.check.regression.items():
        old, new = (draws_of(name, draws) for draws in (before, after))
        if old is None or new is None:
            raise BadInput(f"the baseline has no figure {name!r}; write it again with --write-baseline")
        change = paired(old, new)
        findings.append(_regression(name, allowed, change, file.check.undecided == "fail"))
    return findings


def unserved_in_limits(file: CheckFile, figures: Mapping[str, float]) -> list[str]:
    """A note where limits of TTFT, E2E or queue time were judged while requests were unserved."""
    names = [name for name in file.check.limits if leaves_out_unserved(name)]
    count = int(figures[UNSERVED])
    if not names or not count:
        return []
    return [f"limits of {', '.join(names)} leave out {counted(count, 'unserved request')}: {_COUNTED_BY}"]


def unserved_in_regressions(file: CheckFile, before: FigureDraws, after: FigureDraws) -> list[str]:
    """The same of regressions, where requests were unserved in draws of today's or of the baseline's."""
    names = [name for name in file.check.regression if leaves_out_unserved(name)]
    means = [_mean(draws_of(UNSERVED, draws)) for draws in (before, after)]
    if not names or not any(means):
        return []
    old, new = (shown(UNSERVED, mean) if mean is not None else "an unknown number" for mean in means)
    return [
        f"regressions of {', '.join(names)} leave out unserved requests, {new} per draw and {old} in the "
        f"baseline: {_COUNTED_BY}"
    ]


def _mean(draws: Sequence[float | None] | None) -> float | None:
    values = [value for value in draws or () if value is not None]
    return float(np.mean(values)) if values else None


def paired(before: Sequence[float | None], after: Sequence[float | None]) -> Change | None:
    """The change of the draws that both have; None where fewer than two do."""
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a is not None and b is not None]
    if len(pairs) < 2:
        return None
    old, new = np.array(pairs, np.float64).T
    difference = new - old
    mean, base = float(difference.mean()), float(old.mean())
    error = float(difference.std(ddof=1)) / sqrt(len(pairs))
    half = error * float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(pairs) - 1))

    def percent(value: float) -> float:
        if base:
            return 100 * value / abs(base)
        return copysign(inf, value) if value else 0.0

    low, high = percent(mean - half), percent(mean + half)
    return Change(base, float(new.mean()), percent(mean), low, high, len(pairs))


def _regression(name: str, allowed: float, change: Change | None, strict: bool) -> Finding:
    """The finding on one figure. `strict`: it fails where its interval reaches beyond what is allowed."""
    higher = more_is_better(name)
    if change is None:
        bound_text = f"worse by at most {allowed:g}%"
        reason = "too few draws have such a figure to compare"
        return Finding(
            "regression", name, "-", bound_text, False, reason, numbers={"allowed_percent": allowed}
        )
    bound_text = f"{shown(name, change.before)} {'-' if higher else '+'}{allowed:g}%"
    least, most = (-change.high, -change.low) if higher else (change.low, change.high)
    why = f"{_percent(change.percent)}% ({_percent(change.low)} to {_percent(change.high)})"
    undecided = least <= allowed < most
    if undecided:
        why += "; undecided: raise `draws`"
    numbers: dict[str, float | None] = {
        "value": change.after,
        "baseline": change.before,
        "allowed_percent": allowed,
        "change_percent": change.percent,
        "low_percent": change.low,
        "high_percent": change.high,
        "draws": change.draws,
    }
    of = f"{change.draws} draws"
    holds = least <= allowed and not (strict and undecided)
    value = shown(name, change.after)
    return Finding("regression", name, value, bound_text, holds, why, of, numbers, undecided)


def _percent(value: float) -> str:
    return f"{value:+.1f}" if abs(value) < 9.95 else f"{value:+.0f}"
