"""Errors of the fit on data left out of it: one recording, or one segment of sweeps, at a time.

Segments of one name are the same batches recorded again. A fit with the second recording would know the
first, so they are left out together. Recordings are identified by their number, since names may be equal.
Each fit selects its terms anew; it does not drop the uncertain ones, as `build.py` does for the calibration
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.file import RECORDING, SEGMENT
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.fitting.ahead import AheadSteps, load_of
from pagecast.sim.fitting.features import StepTable
from pagecast.sim.fitting.fit import Fit, fit
from pagecast.traces.arrays import Floats


@dataclass(frozen=True)
class LeftOut:
    """Steps of recording number `recording`, and the nanoseconds that a fit without them expects.

    `what`: the whole recording was left out, or `segment`, of this and of every other recording.
    """

    name: str
    what: str
    recording: int
    segment: str
    table: StepTable
    expected: Floats

    def rows(self) -> list[dict[str, Any]]:
        """Its errors in percent, of all its steps and of each kind."""
        table, rows = self.table, list[dict[str, Any]]()
        every = np.ones(len(table), bool)
        for kind, pick in (("all", every), ("pure decode", ~table.mixed), ("with prompts", table.mixed)):
            if pick.any():
                errors = error_summary(self.expected[pick], table.ns[pick], float(table.ns.sum()))
                rows.append({"run": self.name, "left out": self.what, "steps of": kind, **errors})
        return rows


def names_of(tables: list[StepTable]) -> list[str]:
    """A name for each recording that no other has: its run's, numbered where several are equal."""
    runs = [table.run for table in tables]
    return [f"{run} {runs[: i + 1].count(run)}" if runs.count(run) > 1 else run for i, run in enumerate(runs)]


def left_out(tables: list[StepTable], shape: TileShape, ahead: Sequence[AheadSteps] = ()) -> list[LeftOut]:
    """Each recording where there are several, then each segment; but what leaves too few steps to fit.

    Steps planned ahead (`ahead`) leave the fit with the synchronous ones of their recording or load.
    """
    return [*_recordings(tables, shape, ahead), *_segments(tables, shape, ahead)]


def _recordings(tables: list[StepTable], shape: TileShape, ahead: Sequence[AheadSteps]) -> list[LeftOut]:
    parts = []
    for i, (name, table) in enumerate(zip(names_of(tables), tables, strict=True)):
        early = [
            replace(groups, recording=groups.recording - (groups.recording > i))
            for groups in ahead
            if groups.recording != i
        ]
        rest = _fitted([*tables[:i], *tables[i + 1 :]], shape, early)
        if rest is not None:
            parts.append(LeftOut(name, RECORDING, i, "", table, rest.predict(table, shape)))
    return parts


def _segments(tables: list[StepTable], shape: TileShape, ahead: Sequence[AheadSteps]) -> list[LeftOut]:
    parts = [{table.segments[int(part.segment[0])]: part for part in table.parts()} for table in tables]
    if all(len(mine) < 2 for mine in parts):
        return []
    names, left_out_parts = names_of(tables), []
    for segment in dict.fromkeys(name for mine in parts for name in mine):
        others = [[part for name, part in mine.items() if name != segment] for mine in parts]
        early = [groups.without(load_of(segment)) for groups in ahead] if all(others) else []
        rest = _fitted([StepTable.joined(mine) for mine in others if mine], shape, early)
        if rest is None:
            continue
        for i, mine in enumerate(parts):
            if segment in mine and len(mine) > 1:
                name = f"{segment} of {names[i]}" if len(tables) > 1 else segment
                expected = rest.predict(mine[segment], shape)
                left_out_parts.append(LeftOut(name, SEGMENT, i, segment, mine[segment], expected))
    return left_out_parts


def _fitted(tables: list[StepTable], shape: TileShape, ahead: Sequence[AheadSteps]) -> Fit | None:
    try:
        return fit(tables, shape, ahead) if tables else None
    except BadInput:
        return None


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
