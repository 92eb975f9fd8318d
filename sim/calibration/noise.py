"""How far steps and runs stray from the fit: what intervals are made of.

Two recordings of one load differ as a whole (clocks, host), and their steps with prompts differ from their
pure decode steps beyond that (arithmetic against memory and launches). Both are variances between the fit's
own runs. A few runs say little of them, so each leans on `RUN_SD`, the spread of repeated recordings, which
counts as much as `_PRIOR_RUNS` runs. What a whole run's spread owes to its kinds of step is taken out of what
all its steps share: it is not counted twice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pagecast.sim.calibration.features import StepTable
from pagecast.sim.calibration.file import Noise
from pagecast.sim.calibration.fit import RUN_SD, Fit
from pagecast.sim.calibration.left_out import error_summary
from pagecast.sim.calibration.shape import Shape

Floats = npt.NDArray[np.float64]

_PRIOR_RUNS = 4
_CORRELATED = 20  # steps that move together: fewer of them are independent
_CALM = 3.0  # robust standard deviations beyond which a step is a pause, and says nothing of its kind
_LEAST_SHARED = 0.5  # of a run's variance: runs of one kind of step can't tell what is shared


def noise_of(tables: list[StepTable], found: Fit, shape: Shape) -> Noise:
    """The noise around a fit, from the runs that were fitted and no other."""
    expected = [
        found.predict(table, shape) * scale for table, scale in zip(tables, found.scales, strict=True)
    ]
    spread = [np.log(table.ns / ns) for table, ns in zip(tables, expected, strict=True)]
    mixed = np.concatenate([table.mixed for table in tables])
    flat = np.concatenate(spread)
    follows = np.concatenate([np.diff(table.index, prepend=-9) == 1 for table in tables])
    pairs = np.flatnonzero(follows)
    limit = _CALM * _robust_sd(flat)
    calm = np.clip(flat, -limit, limit)
    runs = len(tables)
    whole = _leaning(float(np.sum(np.log(found.scales) ** 2)), runs)
    kind_sd = _leaning(_between_kinds(tables, expected, limit), runs)
    ns = np.concatenate(expected)
    share = float(ns[mixed].sum() / ns.sum())
    run_sd = float(np.sqrt(max(whole**2 - (share * kind_sd) ** 2, _LEAST_SHARED * whole**2)))
    return Noise(
        decode_sd=_robust_sd(flat[~mixed]),
        prompt_sd=_robust_sd(flat[mixed]),
        correlation=float(np.corrcoef(calm[pairs], calm[pairs - 1])[0, 1]) if len(pairs) > 2 else 0.0,
        run_sd=run_sd,
        kind_sd=kind_sd * float(np.sqrt(1 + 1 / runs)),
        level_sd=run_sd / float(np.sqrt(runs)),
    )


def _leaning(seen: float, runs: int) -> float:
    """The standard deviation between runs, of which `seen` is a sum of squares, leaning on the prior."""
    return float(np.sqrt((_PRIOR_RUNS * RUN_SD**2 + seen) / (_PRIOR_RUNS + runs - 1)))


def _between_kinds(tables: list[StepTable], expected: list[Floats], limit: float) -> float:
    """Sum of squares over runs of how far prompt steps stray beyond decode steps, less their own noise."""
    apart, own = [], []
    for table, ns in zip(tables, expected, strict=True):
        strays = np.exp(np.clip(np.log(table.ns / ns), -limit, limit)) * ns
        kinds = (table.mixed, ~table.mixed)
        if not all(rows.any() for rows in kinds):
            continue
        prompts, decode = (float(np.log(strays[rows].sum() / ns[rows].sum())) for rows in kinds)
        apart.append(prompts - decode)
        own.append(sum(_error_of_total(strays[rows], ns[rows]) for rows in kinds))
    if len(apart) < 2:
        return 0.0
    middle = float(np.mean(apart))
    return max(sum((value - middle) ** 2 for value in apart) - (1 - 1 / len(apart)) * sum(own), 0.0)


def _error_of_total(strays: Floats, ns: Floats) -> float:
    """Variance of the relative error of a total, of steps of which `_CORRELATED` move together."""
    residual = strays - ns * (strays.sum() / ns.sum())
    return float(_CORRELATED * np.sum(residual**2) / ns.sum() ** 2)


def _robust_sd(values: Floats) -> float:
    return float(1.4826 * np.median(np.abs(values - np.median(values)))) if len(values) else 0.0


def region_errors(tables: list[StepTable], found: Fit, shape: Shape) -> list[dict[str, float | str | int]]:
    """The fit's error by region of batch shape: steps, share of the time, signed total, spread (percent)."""
    ns = np.concatenate([table.ns for table in tables])
    expected = np.concatenate([found.predict(table, shape) for table in tables])
    n = np.concatenate([table.n for table in tables])
    tokens = np.concatenate([table.tokens for table in tables])
    mixed = np.concatenate([table.mixed for table in tables])
    regions = {"all steps": np.ones(len(ns), bool), "pure decode": ~mixed, "with prompts": mixed}
    for low, high in ((1, 4), (5, 16), (17, 64), (65, 128), (129, 256), (257, 1 << 40)):
        regions[f"decode of {_range(low, high)} requests"] = ~mixed & (n >= low) & (n <= high)
    for low, high in ((1, 256), (257, 512), (513, 2048), (2049, 8191), (8192, 1 << 40)):
        regions[f"prompts, {_range(low, high)} tokens"] = mixed & (tokens >= low) & (tokens <= high)
    return [
        {"region": name, **error_summary(expected[rows], ns[rows], float(ns.sum()))}
        for name, rows in regions.items()
        if rows.any()
    ]


def _range(low: int, high: int) -> str:
    return f"{low} to {high}" if high < 1 << 30 else f"{low} or more"
