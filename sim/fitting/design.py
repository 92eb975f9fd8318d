"""The matrix that costs are fitted with: a row for each recorded step, a column for each coefficient.

Beside the curve's knots and the terms of `features` there are, where steps planned ahead are fitted too, a
column for what is hidden of their launches, and one for each synchronous segment, of what the host adds to
its steps: a host may be slow for a while, where a GPU is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.file import FITTED, Host
from pagecast.sim.costs.calibration.shape import TileShape
from pagecast.sim.costs.calibration.terms import TERMS, curve_weights
from pagecast.sim.fitting.ahead import AheadSteps
from pagecast.sim.fitting.features import (
    HOST_TERMS,
    LAUNCH,
    OF_EVEN_SPLITS,
    OF_GRAPHS,
    StepTable,
    choose_knots,
    computed_rows,
    term_columns,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STEPS_PER_TERM = 4
LEAST_STEPS = 100
_BATCHES, _TOKENS = (9, 33, 65, 129), (65, 513, 2049)  # between kinds of decode steps, and of others
_KINDS = len(_BATCHES) + len(_TOKENS) + 2
_HIDDEN, _HOST = "hidden launches", "host of segment"


@dataclass(frozen=True)
class Design:
    """The matrix of a fit, its target, and which run each row is of.

    Where there are steps planned ahead, `ahead` tells their rows and `kind` numbers kinds of steps, each with
    a spread of its own; else all are of one kind. `launch_ns` is what they tell of launching a step kernel by
    kernel, 0 for nothing.
    """

    knots: tuple[int, ...]
    names: tuple[str, ...]
    matrix: Floats
    ns: Floats
    run: Ints
    runs: int
    kind: Ints
    ahead: npt.NDArray[np.bool_]
    launch_ns: float = 0.0

    def keeping(self, terms: tuple[str, ...]) -> Design:
        """The design with these terms only; columns that are not terms stay."""
        kept = [i for i, name in enumerate(self.names) if name in terms or name not in TERMS]
        columns = [*range(len(self.knots)), *(len(self.knots) + i for i in kept)]
        return replace(self, names=tuple(self.names[i] for i in kept), matrix=self.matrix[:, columns])

    def take(self, rows: Ints) -> Design:
        """The design of the given rows; rows may repeat."""
        columns = {name: getattr(self, name)[rows] for name in ("matrix", "ns", "run", "kind", "ahead")}
        return replace(self, **columns)

    def blocks(self) -> list[Ints]:
        """Rows that were recorded one after another."""
        return [
            rows
            for number in range(self.runs)
            for planned in (False, True)
            if len(rows := np.flatnonzero((self.run == number) & (self.ahead == planned)))
        ]

    def bounded(self, coefficients: Floats) -> Floats:
        """The matrix with the longer side of each row only: its launches, or what the device does.

        `coefficients` tell which is longer. The host's columns stay in every row.
        """
        if LAUNCH not in self.names:
            return self.matrix
        column, device = self._sides()
        busy = self.matrix[:, device] @ coefficients[device]
        return self.sided(self.matrix[:, column] * coefficients[column] > busy)

    def sided(self, launching: npt.NDArray[np.bool_]) -> Floats:
        """The matrix with the launches of rows that are `launching`, and the device's work of the others."""
        column, device = self._sides()
        matrix = self.matrix.copy()
        matrix[np.ix_(launching, device)] = 0.0
        matrix[~launching, column] = 0.0
        return matrix

    def _sides(self) -> tuple[int, npt.NDArray[np.int64]]:
        """The column of launches, and the columns of what the device does."""
        first = len(self.knots)
        host = (*HOST_TERMS, LAUNCH)
        rest = [i for i, name in enumerate(self.names) if name not in host and not name.startswith(_HOST)]
        return first + self.names.index(LAUNCH), np.array([*range(first), *(first + i for i in rest)])

    def parted(self, coefficients: Floats) -> tuple[Floats, dict[str, float], Host | None]:
        """Splits a solution into curve and terms of synchronous steps, and the host's share.

        Without steps planned ahead the host's share is None. With them the curve is fitted as the device's
        alone; what the host adds to a synchronous step, in the mean, is added to the curve and to launches.
        """
        count = len(self.knots)
        found = dict(zip(self.names, coefficients[count:].tolist(), strict=True))
        terms = {name: value for name, value in found.items() if name in TERMS}
        if not self.ahead.any():
            return coefficients[:count], terms, None
        segments = [i for i, name in enumerate(self.names) if name.startswith(_HOST)]
        steps = self.matrix[:, [count + i for i in segments]].sum(axis=0)
        added = coefficients[[count + i for i in segments]]
        step_ns = float(steps @ added) / max(float(steps.sum()), 1.0)
        hidden = found.get(_HIDDEN, 0.0)
        if LAUNCH in terms:
            terms[LAUNCH] += step_ns
        host = Host(step_ns, terms.get("request", 0.0), hidden, 0.0, FITTED, self.launch_ns)
        return coefficients[:count] + step_ns, terms, host


def design(
    tables: list[StepTable], shape: TileShape, ahead: Sequence[AheadSteps] = ()
) -> tuple[Design, tuple[str, ...]]:
    """The matrix with every term that occurs, and the names of those that don't. Errors: BadInput.

    `tables` are synchronous runs. `ahead` are groups of steps planned ahead: see `AheadSteps.recording`.
    """
    early = [groups for groups in ahead if len(groups.ns)]
    if sum(len(groups.ns) for groups in early) < LEAST_STEPS:
        early = []  # too few to tell a host from a device
    every = [*tables, *(groups.table for groups in early)]
    steps = sum(map(len, tables))
    if not steps:
        raise BadInput("no step with work after it: nothing to fit")
    sizes = () if shape.prompt_graphs else (*shape.graph_sizes, *shape.prompt_sizes)
    knots = choose_knots(np.concatenate([computed_rows(table, shape) for table in every]), sizes)
    parts = [term_columns(table, shape) for table in tables]
    parts += [_ahead_columns(groups.table, shape) for groups in early]
    present = tuple(name for name in TERMS if any(np.any(part[name]) for part in parts))
    count = len(knots) + len(present)
    least = max(STEPS_PER_TERM * count, LEAST_STEPS)
    if steps < least:
        raise BadInput(f"{steps} steps are too few for {count} terms: record at least {least}")
    rows = [_rows(table, shape, knots, part, present) for table, part in zip(every, parts, strict=True)]
    summed = [groups.summed(mine) for groups, mine in zip(early, rows[len(tables) :], strict=True)]
    matrix = np.concatenate([*rows[: len(tables)], *summed])
    return _joined(knots, present, matrix, tables, early), _absent(present, shape)


def _absent(present: tuple[str, ...], shape: TileShape) -> tuple[str, ...]:
    """Terms that never occur, but for those that other engines have."""
    of_others = {LAUNCH} if shape.prompt_graphs else {*OF_GRAPHS}
    of_others |= {*OF_EVEN_SPLITS} if shape.tile_schedule else set()
    return tuple(name for name in TERMS if name not in present and name not in of_others)


def _joined(
    knots: tuple[int, ...],
    names: tuple[str, ...],
    matrix: Floats,
    tables: list[StepTable],
    early: list[AheadSteps],
) -> Design:
    run = [np.full(len(table), i) for i, table in enumerate(tables)]
    run += [np.full(len(groups.ns), groups.recording) for groups in early]
    size = len(matrix)
    plain = Design(
        knots=knots,
        names=names,
        matrix=matrix,
        ns=np.concatenate([*(table.ns for table in tables), *(groups.ns for groups in early)]),
        run=np.concatenate(run).astype(np.int64),
        runs=max(len(tables), *(groups.recording + 1 for groups in early), 1),
        kind=np.zeros(size, np.int64),
        ahead=np.zeros(size, bool),
    )
    return _beside(plain, tables, early) if early else plain


def _rows(
    table: StepTable,
    shape: TileShape,
    knots: tuple[int, ...],
    columns: dict[str, Floats],
    names: tuple[str, ...],
) -> Floats:
    """A row of the matrix for each step."""
    terms = (columns[name][:, None] for name in names)
    return np.hstack([curve_weights(computed_rows(table, shape), knots), *terms])


def _ahead_columns(table: StepTable, shape: TileShape) -> dict[str, Floats]:
    """As `term_columns`, of steps planned ahead, which hide the host's requests, arrivals and launches.

    Steps launched kernel by kernel count no request even where they are synchronous: its host time is in
    their other terms. So here their column is negative, which takes it off.
    """
    columns = term_columns(table, shape)
    columns["request"] = columns["request"] - (table.n + table.chunks)
    return columns | {name: np.zeros(len(table)) for name in ("arrival", "arriving_token", LAUNCH)}


def _beside(plain: Design, tables: list[StepTable], early: list[AheadSteps]) -> Design:
    """The design with columns for what the host adds to synchronous steps and what is hidden of others."""
    size, steps = len(plain.ns), sum(map(len, tables))
    kinds = [_kinds(table) for table in tables]
    kinds += [groups.most(_kinds(groups.table)) + _KINDS for groups in early]
    prompts = [groups.summed(groups.table.mixed.astype(np.float64)) for groups in early]
    columns, begin = [-np.concatenate([np.zeros(steps), *prompts])], 0
    for table in tables:
        for number in np.unique(table.segment):
            column = np.zeros(size)
            column[begin : begin + len(table)] = table.segment == number
            columns.append(column)
        begin += len(table)
    names = (_HIDDEN, *(f"{_HOST} {i}" for i in range(len(columns) - 1)))
    used = [i for i, column in enumerate(columns) if column.any()]
    launches = [groups.launch_ns for groups in early if groups.launch_ns]
    return replace(
        plain,
        names=(*plain.names, *(names[i] for i in used)),
        matrix=np.hstack([plain.matrix, *(columns[i][:, None] for i in used)]),
        kind=np.concatenate(kinds),
        ahead=np.arange(size) >= steps,
        launch_ns=float(np.median(launches)) if launches else 0.0,
    )


def _kinds(table: StepTable) -> Ints:
    """Numbers of kinds of steps: decode steps by requests, others by tokens."""
    decode = np.digitize(table.n, _BATCHES)
    return np.where(table.mixed, len(_BATCHES) + 1 + np.digitize(table.tokens, _TOKENS), decode)
