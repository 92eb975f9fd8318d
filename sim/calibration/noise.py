"""How far steps and runs stray from the fit: what intervals are made of."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pagecast.sim.calibration.features import StepTable
from pagecast.sim.calibration.file import Noise
from pagecast.sim.calibration.fit import RUN_SD, Fit
from pagecast.sim.calibration.shape import Shape

Floats = npt.NDArray[np.float64]

_PRIOR_RUNS = 4


def noise_of(tables: list[StepTable], found: Fit, shape: Shape) -> Noise:
    """The noise around a fit. With few runs their spread leans on `RUN_SD`, known from recordings."""
    logs = [np.log(table.ns / found.predict(table, shape)) for table in tables]
    spread = [log - np.log(scale) for log, scale in zip(logs, found.scales, strict=True)]
    mixed = np.concatenate([table.mixed for table in tables])
    flat = np.concatenate(spread)
    follows = np.concatenate([np.diff(table.index, prepend=-9) == 1 for table in tables])
    pairs = np.flatnonzero(follows)
    limit = 3 * _robust_sd(flat)
    calm = np.clip(flat, -limit, limit)
    runs = len(tables)
    # A few runs say little of their own spread: the prior counts as much as four of them.
    seen = float(np.sum(np.log(found.scales) ** 2))
    run_sd = float(np.sqrt((_PRIOR_RUNS * RUN_SD**2 + seen) / (_PRIOR_RUNS + runs - 1)))
    return Noise(
        decode_sd=_robust_sd(flat[~mixed]),
        prompt_sd=_robust_sd(flat[mixed]),
        correlation=float(np.corrcoef(calm[pairs], calm[pairs - 1])[0, 1]) if len(pairs) > 2 else 0.0,
        run_sd=run_sd,
        kind_sd=run_sd,
        level_sd=run_sd / float(np.sqrt(runs)),
    )


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


def error_summary(expected: Floats, measured: Floats, whole_ns: float) -> dict[str, float | int]:
    """Steps, share of the time, error of the total and percentiles of the single steps', in percent."""
    relative = np.abs(expected / measured - 1)
    return {
        "steps": len(measured),
        "time_percent": round(100 * float(measured.sum()) / whole_ns, 2),
        "error_percent": round(100 * (float(expected.sum()) / float(measured.sum()) - 1), 2),
        "p50_percent": round(100 * float(np.median(relative)), 2),
        "p90_percent": round(100 * float(np.percentile(relative, 90)), 2),
    }


def _range(low: int, high: int) -> str:
    return f"{low} to {high}" if high < 1 << 30 else f"{low} or more"
