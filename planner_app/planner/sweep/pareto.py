"""The Pareto front of a sweep's trials, and the effect of each knob."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from pagecast.traces.arrays import Flags, Floats

_CLASSES = 5  # into which the values of a continuous knob are put


def front(costs: Floats) -> Flags:
    """Which rows of `costs` (trials x objectives, less is better) are dominated by no other row.

    A row is dominated by one that is as good in every objective and better in one; equal rows stay. NaN, a
    figure that does not exist, counts as the worst.
    """
    costs = np.where(np.isnan(costs), np.inf, costs)
    keep = np.ones(len(costs), dtype=np.bool_)
    for index, row in enumerate(costs):
        worse = np.all(costs >= row, axis=1) & np.any(costs > row, axis=1)
        if keep[index]:
            keep &= ~worse
    return keep


def sensitivity(table: pd.DataFrame, knobs: Sequence[str], figures: Sequence[str]) -> pd.DataFrame:
    """How much each knob moves each figure: one row per knob and figure.

    Columns: `knob`, `figure`, `share` (of the figure's variance over all trials, on a logarithmic scale
    where it is above zero, how much the knob explains alone: 1 means that nothing else matters), `low` and
    `high` (the least and greatest mean of the figure over the trials with one value of the knob), `at_low`
    and `at_high` (those values). On a grid every value meets all values of the others, so that the means are
    fair; in a search they are as fair as its draws. Values of a continuous knob are put into five classes,
    named by their mean.
    """
    rows = []
    for knob in knobs:
        groups = _groups(table[knob])
        for figure in figures:
            values = table[figure].to_numpy(np.float64)
            finite = ~np.isnan(values)
            if finite.sum() < 2 or groups[finite].nunique() < 2:
                continue
            rows.append({"knob": knob, "figure": figure, **_effect(groups[finite], values[finite])})
    return pd.DataFrame(rows, columns=["knob", "figure", "share", "low", "at_low", "high", "at_high"])


def _groups(values: pd.Series) -> pd.Series:
    """The groups of a knob's values: each value, or for many numbers the mean of its class."""
    if pd.api.types.is_float_dtype(values) and values.nunique() > 2 * _CLASSES:
        cut = pd.qcut(values, _CLASSES, duplicates="drop")
        values = values.groupby(cut, observed=True).transform("mean").round(4)
    elif pd.api.types.is_integer_dtype(values) and values.nunique() > 2 * _CLASSES:
        cut = pd.qcut(values, _CLASSES, duplicates="drop")
        values = values.groupby(cut, observed=True).transform("mean").round().astype("int64")
    return values.map(lambda value: "none" if value is None or value != value else value).astype(object)


def _effect(groups: pd.Series, values: Floats) -> dict[str, object]:
    scale = np.log(values) if (values > 0).all() else values
    means = pd.Series(scale, index=groups.index).groupby(groups, sort=False)
    spread = float(((scale - scale.mean()) ** 2).sum())
    between = float((means.count() * (means.mean() - scale.mean()) ** 2).sum())
    plain = pd.Series(values, index=groups.index).groupby(groups, sort=False).mean()
    return {
        "share": between / spread if spread > 1e-18 else 0.0,
        "low": float(plain.min()),
        "at_low": plain.idxmin(),
        "high": float(plain.max()),
        "at_high": plain.idxmax(),
    }
