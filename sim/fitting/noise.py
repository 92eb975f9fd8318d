"""Deviations of steps, runs and loads from the fit: the source of the intervals.

Two things are watched of a recording, or of a segment of it: its total time against the fit, and its steps
with prompts against its pure decode steps. Both stray between recordings (clocks, host), and between loads
(what the terms do not say). In three recordings of one load both strayed alike, by `_REPEATED_SD`: one
variance is estimated for both, and those recordings count as what they are, two degrees of freedom for each,
and half of that for engines other than theirs.

Whoever forecasts with shipped costs has another GPU. What that adds is known for our engine, whose
asynchronous steps show it, on five H200s: one was 1.2 to 1.7% faster than the others.

The runs behind these two spreads are none of those that judge the intervals: see
`tests/sim/runs/accuracy_roles.py`.

A fit follows the runs that it is made of: they stray from it by too little, and from a fit without them by
too much. For least squares the mean of the product of both errors is the true variance (`_variance`). So a
part of the runs is left out of the fit to tell how far another load may stray.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pagecast.sim.costs.calibration.file import RECORDING, SEGMENT, Noise
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.fitting.features import StepTable
from pagecast.sim.fitting.fit import Fit
from pagecast.sim.fitting.left_out import LeftOut, error_summary
from pagecast.traces.arrays import Flags, Floats

# Three recordings of `azure_conv` by vLLM 0.24 against one fit: totals by 0.59%, kinds of step by 0.59%
# (0.54% and 0.69% with pauses cut).
_REPEATED_SD = 0.006
_REPEATED_FREEDOM = 4.0
_REPEATED_ENGINE = "vllm"
# Of step times between GPUs of one type, by the engine that showed it, and the degrees of freedom behind it.
# Sweeps on A and B, and one load on B, C and the two GPUs of a fleet: in the logarithm, 0, -0.12%, -1.65%,
# -0.41% and -0.39%.
_GPUS_SD, _GPUS_FREEDOM = {"pagecast": 0.0066}, 4.0
_CORRELATED = 20  # steps that move together: fewer of them are independent
_CALM = 3.0  # robust standard deviations beyond which a step is a pause


@dataclass(frozen=True)
class _Stray:
    """How far a part of the runs strays: from the fit, from a fit without it, and by its steps' own noise.

    `from_fit` and `left_out` are natural logarithms of measured over expected, `own` a variance.
    """

    from_fit: float
    left_out: float
    own: float


def noise_of(
    tables: list[StepTable],
    best_fit: Fit,
    shape: TileShape,
    parts: list[LeftOut],
    engine: str | None = None,
    gpus: int = 1,
) -> Noise:
    """The noise around a fit, from the runs that were fitted, whole and left out, and from no other.

    They are of `gpus` different GPUs of one type.
    """
    expected = [best_fit.predict(table, shape) for table in tables]
    spread = [np.log(table.ns / ns) for table, ns in zip(tables, expected, strict=True)]
    mixed = np.concatenate([table.mixed for table in tables])
    flat = np.concatenate([values - np.median(values) for values in spread])
    prior = _REPEATED_FREEDOM / (1 if engine == _REPEATED_ENGINE else 2)
    recordings, loads = _strays(parts, best_fit, shape)
    run, runs_freedom = _variance(recordings, max(len(tables) - 1, 0) / len(tables))
    freedom = prior + runs_freedom
    run = (prior * _REPEATED_SD**2 + runs_freedom * run) / freedom
    model, model_freedom = _variance(loads, _left_of_segments(parts))
    whole = run * (1 + 1 / len(tables))
    gpu = _GPUS_SD.get(str(engine), 0.0) ** 2 * (1 + 1 / gpus)
    both, all_of_it = whole + model, whole + model + gpu
    doubt = whole**2 / freedom + (model**2 / model_freedom if model else 0.0)
    ns = np.concatenate(expected)
    return Noise(
        decode_sd=_robust_sd(flat[~mixed]),
        prompt_sd=_robust_sd(flat[mixed]),
        correlation=_correlation(tables, spread),
        run_sd=run**0.5,
        level_sd=(run / len(tables)) ** 0.5,
        model_sd=model**0.5,
        kind_sd=both**0.5,
        freedom=all_of_it**2 / (doubt + gpu**2 / _GPUS_FREEDOM),
        prompt_share=float(ns[mixed].sum() / ns.sum()),
        gpu_sd=gpu**0.5,
        kind_freedom=both**2 / doubt,
    )


def _strays(parts: list[LeftOut], best_fit: Fit, shape: TileShape) -> tuple[list[_Stray], list[_Stray]]:
    """Those of recordings, and those of segments beyond what their recording strays by."""
    recordings = [stray for part in parts if part.what == RECORDING for stray in _of(part, best_fit, shape)]
    level: dict[int, list[StepTable]] = {}
    for part in parts:
        if part.what == SEGMENT:
            level.setdefault(part.recording, []).append(part.table)
    whole = {number: StepTable.joined(mine) for number, mine in level.items()}
    common = {number: _errors(table, best_fit.predict(table, shape)) for number, table in whole.items()}
    loads = []
    for part in parts:
        if part.what == SEGMENT:
            for stray, shared in zip(_of(part, best_fit, shape), common[part.recording], strict=False):
                loads.append(_Stray(stray.from_fit - shared, stray.left_out - shared, stray.own))
    return recordings, loads


def _of(part: LeftOut, best_fit: Fit, shape: TileShape) -> list[_Stray]:
    """How a part's total strays, and, where it has both, its prompt steps against its decode steps."""
    near = best_fit.predict(part.table, shape)
    pairs = zip(_errors(part.table, near), _errors(part.table, part.expected), strict=True)
    return [_Stray(*pair, own) for pair, own in zip(pairs, _own(part.table, near), strict=True)]


def _kinds(table: StepTable) -> list[Flags]:
    return [rows for rows in (table.mixed, ~table.mixed) if rows.any()]


def _errors(table: StepTable, expected: Floats) -> list[float]:
    kinds = [float(np.log(table.ns[rows].sum() / expected[rows].sum())) for rows in _kinds(table)]
    total = float(np.log(table.ns.sum() / expected.sum()))
    return [total, kinds[0] - kinds[1]] if len(kinds) == 2 else [total]


def _own(table: StepTable, expected: Floats) -> list[float]:
    """Variance of the same by the noise of single steps, of which `_CORRELATED` move together."""

    def of_total(rows: Flags) -> float:
        ns = expected[rows]
        residual = table.ns[rows] - ns * (table.ns[rows].sum() / ns.sum())
        return float(_CORRELATED * np.sum(residual**2) / ns.sum() ** 2)

    kinds = [of_total(rows) for rows in _kinds(table)]
    total = of_total(np.ones(len(table), bool))
    return [total, sum(kinds)] if len(kinds) == 2 else [total]


def _variance(strays: list[_Stray], left: float) -> tuple[float, float]:
    """Variance between parts beyond their own noise, and the degrees of freedom behind it.

    `left` is the share of degrees that a mean leaves. Parts of much noise of their own count for less, as in
    the moment estimate of random effects (DerSimonian and Laird, 1986).
    """
    if not strays:
        return 0.0, 0.0
    weights = np.array([1 / (_REPEATED_SD**2 + stray.own) for stray in strays])
    beyond = np.array([stray.from_fit * stray.left_out - stray.own for stray in strays])
    freedom = left * float(weights.sum() ** 2 / np.sum(weights**2))
    return max(float(weights @ beyond / weights.sum()), 0.0), freedom


def _left_of_segments(parts: list[LeftOut]) -> float:
    """The share of degrees of freedom that segments have: one for each load but the mean's.

    Segments of one name, recorded several times, are one load.
    """
    segments = [part.segment for part in parts if part.what == SEGMENT]
    return (len(set(segments)) - 1) / len(segments) if segments else 0.0


def _correlation(tables: list[StepTable], spread: list[Floats]) -> float:
    """Of steps with prompts with those before them, pauses cut; not below 0, which chance alone may show."""
    pairs: list[Floats] = []
    for table, values in zip(tables, spread, strict=True):
        rows = np.flatnonzero(table.mixed)
        strays = values[rows] - np.median(values[rows]) if len(rows) else values[rows]
        limit = _CALM * _robust_sd(strays)
        calm, same = np.clip(strays, -limit, limit), np.diff(table.segment[rows]) == 0
        pairs.append(np.stack([calm[1:][same], calm[:-1][same]]) if len(rows) > 1 else np.empty((2, 0)))
    later, before = np.concatenate(pairs, axis=1)
    if len(later) < 3 or not (later.std() and before.std()):
        return 0.0
    return max(float(np.corrcoef(later, before)[0, 1]), 0.0)


def _robust_sd(values: Floats) -> float:
    return float(1.4826 * np.median(np.abs(values - np.median(values)))) if len(values) else 0.0


def region_errors(
    tables: list[StepTable], best_fit: Fit, shape: TileShape
) -> list[dict[str, float | str | int]]:
    """The fit's error by region of batch shape: steps, share of the time, signed total, spread (percent)."""
    ns = np.concatenate([table.ns for table in tables])
    expected = np.concatenate([best_fit.predict(table, shape) for table in tables])
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
