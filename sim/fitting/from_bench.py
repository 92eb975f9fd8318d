"""Corrections of measured operations from request-level results.

Results say when tokens came, not what a step took: many step costs give the same latencies. Three numbers are
fitted, no more, and each has a prior as wide as measured operations were off elsewhere. A least-squares fit
compares the quantiles of TPOT, E2E and TTFT of a replay with the measured ones, logarithms throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pagecast.sim.core.errors import BadInput, Unfinished
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.choose import measured
from pagecast.sim.costs.calibration.draw import UNFITTED_SD
from pagecast.sim.costs.calibration.scaled import CorrectedCosts
from pagecast.sim.costs.measured.corrections import Corrections
from pagecast.sim.costs.measured.costs import MeasuredCosts
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replay.result import Kept
from pagecast.sim.replay.simulation import replay
from pagecast.sim.runs.bench_results import BenchResults
from pagecast.sim.scenario import Scenario
from pagecast.traces.arrays import Floats

Progress = Callable[[int], None]

STEP_PRIOR_MS = 0.5  # host times of engines differ by half a millisecond or so
# What a figure may be off by with the best corrections, of another load too: what three numbers can't say.
# Near saturation TTFT follows step time many times over, so that it says less.
_MISFIT = {"tpot": 0.03, "e2e": 0.03, "ttft": 0.15}
_QUANTILES = (0.25, 0.5, 0.75, 0.9)
_STEP = (0.1, 0.02, 0.02)  # for differences
_ROUNDS = 3
REPLAYS = _ROUNDS * (len(_STEP) + 1) + 1  # for one file of results
_LEAST_REQUESTS = 20  # with each latency: a sample of all requests then holds one that has it


@dataclass(frozen=True)
class _Target:
    """Results with the figures to meet, and how far off each may be."""

    results: BenchResults
    figures: Floats
    sd: Floats


def fit_corrections(
    results: Sequence[BenchResults],
    scenario: Scenario,
    name: str,
    progress: Progress | None = None,
    *,
    base: StepCosts | None = None,
    around: Corrections | None = None,
) -> Corrections:
    """Corrections that make replays of `results` in `scenario` take as long as they did.

    `progress` is called after each replay with the number of replays done. `base`: the costs to correct
    (measured operations). `around`: corrections that are known to come near (none). Errors: BadInput for a
    scenario without measured operations, or too few requests; Unfinished with the corrections of the last
    whole round before an interrupt.
    """
    base = measured(scenario.target()) if base is None else base
    targets = [_target(each) for each in results]
    counted = _Counter(progress)

    def misses(x: Floats) -> Floats:
        costs = corrected(base, _corrections(x, name))
        return np.concatenate([counted(each, scenario, costs) for each in targets])

    middle = np.zeros(3)
    if around is not None:
        middle = np.array([1e3 * around.step_s, math.log(around.decode), math.log(around.prompt)])
    x, prior_sd = middle.copy(), prior_of(base)
    prior = 1.0 / np.array(prior_sd)
    start = misses(np.zeros(3))
    here = start if around is None else misses(x)
    jacobian, complete = np.zeros((len(here), 3)), True
    try:
        for _ in range(_ROUNDS):
            slopes = np.zeros((len(here), 3))
            for at, step in enumerate(_STEP):
                shifted_x = x.copy()
                shifted_x[at] += step
                slopes[:, at] = (misses(shifted_x) - here) / step
            matrix = np.vstack([slopes, np.diag(prior)])
            moved = x - np.linalg.lstsq(matrix, np.concatenate([here, prior * (x - middle)]), rcond=None)[0]
            there = misses(moved)
            x, here, jacobian = moved, there, slopes
    except KeyboardInterrupt:
        if not jacobian.any():  # no round has ended
            raise
        complete = False
    precision = jacobian.T @ jacobian + np.diag(prior**2)
    covariance = np.asarray(np.linalg.inv(precision), np.float64)
    sources = _sources(targets, start, here)
    fitted = _corrections(x, name, covariance, scenario.target().identity, sources, prior_sd)
    if not isinstance(base, MeasuredCosts):
        fitted = replace(fitted, base=base.corrected_name if isinstance(base, CorrectedCosts) else base.name)
    if not complete:
        raise Unfinished(fitted)
    return fitted


def corrected(base: StepCosts, corrections: Corrections) -> StepCosts:
    """Costs with corrections, in place of those that they may have."""
    if isinstance(base, MeasuredCosts | CorrectedCosts):
        return base.corrected(corrections)
    return CorrectedCosts(base, corrections)


def prior_of(costs: StepCosts) -> tuple[float, float, float]:
    """Standard deviations of step_s in ms, ln decode and ln prompt before any result."""
    if isinstance(costs, MeasuredCosts):
        sd, freedom = costs.spread.sd, costs.spread.freedom
    elif isinstance(costs, CalibratedCosts):
        sd, freedom = costs.calibration.noise.total_sd, costs.calibration.noise.freedom
    else:
        sd, freedom = UNFITTED_SD, math.inf
    factor = sd * (math.sqrt(freedom / (freedom - 2)) if 2 < freedom < math.inf else 1.0)  # Student's t
    return STEP_PRIOR_MS, factor, factor


class _Counter:
    """Misses of one target in standard deviations; counts replays."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._done = progress, 0

    def __call__(self, target: _Target, scenario: Scenario, costs: StepCosts) -> Floats:
        result = replay(target.results.trace, scenario, costs=costs, kept=Kept(steps=False))
        client = target.results.client
        requests = target.results.compared((client.seen(result) if client else result).requests)
        columns = [requests[f"{name}_s"].to_numpy(np.float64) for name in _MISFIT]
        for name, values in zip(_MISFIT, columns, strict=True):
            if not len(_known(values)):
                raise BadInput(
                    f"{target.results.name}: no request of a replay has a {name.upper()}; "
                    "give a scenario that serves these requests"
                )
        figures = _figures(*columns)
        self._done += 1
        if self._progress is not None:
            self._progress(self._done)
        return np.asarray((figures - target.figures) / target.sd)


def _target(results: BenchResults) -> _Target:
    if len(results.trace) < _LEAST_REQUESTS:
        raise BadInput(
            f"{results.name}: {len(results.trace)} requests say too little; give at least {_LEAST_REQUESTS}"
        )
    columns = results.tpot_s, results.e2e_s, results.ttft_s
    for name, values in zip(_MISFIT, columns, strict=True):
        known = len(_known(values))
        if known < _LEAST_REQUESTS:
            raise BadInput(
                f"{results.name}: a {name.upper()} above 0 is known of {known} requests; "
                f"give at least {_LEAST_REQUESTS} that were served, of more than one token"
            )
    figures = _figures(*columns)
    random = np.random.default_rng(0)
    rows = len(results.trace)
    draws = []
    for _ in range(100):
        sample = random.integers(0, rows, rows)
        draws.append(_figures(*(column[sample] for column in columns)))
    misfit = np.repeat(list(_MISFIT.values()), len(_QUANTILES) + 1)
    # Quantiles of one latency move together: they count as one figure, not as many.
    sd = np.hypot(np.std(draws, axis=0), misfit) * math.sqrt(len(_QUANTILES) + 1)
    return _Target(results, figures, sd)


def _known(latencies: Floats) -> Floats:
    """Those that were measured; of tokens that came all at once no time per token was."""
    return latencies[np.isfinite(latencies) & (latencies > 0)]


def _figures(*columns: Floats) -> Floats:
    """Logarithms of the mean and of quantiles of each latency."""
    logarithms: list[float] = []
    for column in columns:
        values = _known(column)
        logarithms += [math.log(float(values.mean())), *np.log(np.quantile(values, _QUANTILES)).tolist()]
    return np.array(logarithms)


def _corrections(
    x: Floats,
    name: str,
    covariance: Floats | None = None,
    made_for: dict[str, Any] | None = None,
    sources: tuple[dict[str, Any], ...] = (),
    prior_sd: tuple[float, ...] = (),
) -> Corrections:
    rows = () if covariance is None else tuple(tuple(map(float, row)) for row in covariance)
    step_s, decode, prompt = float(x[0]) / 1e3, math.exp(x[1]), math.exp(x[2])
    return Corrections(name, step_s, decode, prompt, rows, prior_sd, made_for or {}, sources)


def _sources(targets: list[_Target], start: Floats, end: Floats) -> tuple[dict[str, Any], ...]:
    """Errors in the mean of each latency, in percent, before and after."""
    rows = []
    width = len(_MISFIT) * (len(_QUANTILES) + 1)
    for at, target in enumerate(targets):
        row: dict[str, Any] = {"name": target.results.name, "requests": len(target.results.trace)}
        for number, key in enumerate(_MISFIT):
            place = number * (len(_QUANTILES) + 1)
            for when, misses in (("before", start), ("after", end)):
                off = misses[at * width + place] * target.sd[place]
                row[f"{key}_percent_{when}"] = 100 * math.expm1(off)
        rows.append(row)
    return tuple(rows)
