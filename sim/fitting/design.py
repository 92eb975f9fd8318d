"""Design matrix of a fit: a row for each recorded step, a column for each coefficient.

The columns are the curve's knots and the terms. Where steps planned ahead are fitted too, there are more: one
for the launch time that is hidden in them, and one for each synchronous segment, the host's constant in its
steps. A host may be slow for a while; a GPU is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.curve import curve_weights
from pagecast.sim.costs.calibration.file import FITTED, Host
from pagecast.sim.costs.families.common import REQUEST
from pagecast.sim.costs.families.registry import family
from pagecast.sim.costs.families.shape import TileShape
from pagecast.sim.costs.families.term import KernelFamily, Place
from pagecast.sim.fitting.ahead import AheadSteps, load_of
from pagecast.sim.fitting.features import StepTable, choose_knots, computed_rows
from pagecast.traces.arrays import Flags, Floats, Ints

STEPS_PER_TERM = 4
LEAST_STEPS = 100
_BATCHES, _TOKENS = (9, 33, 65, 129), (65, 513, 2049)  # between kinds of decode steps, and of others
_KINDS = len(_BATCHES) + len(_TOKENS) + 2


@dataclass(frozen=True)
class Design:
    """The matrix of a fit, its target, and which run each row is of.

    Columns are those of `knots`, of the terms `names`, of the hidden launches where `hides`, and one for the
    host of each of `segments` synchronous segments. `kind` numbers kinds of steps, `load` the loads of a
    sweep. `ahead` marks the rows of steps planned ahead; `launch_ns` is how long they show launching a step
    kernel by kernel to take, 0 where they don't.
    """

    kernels: KernelFamily
    knots: tuple[int, ...]
    names: tuple[str, ...]
    matrix: Floats
    ns: Floats
    run: Ints
    runs: int
    kind: Ints
    load: Ints
    ahead: Flags
    hides: bool = False
    segments: int = 0
    launch_ns: float = 0.0

    def keeping(self, terms: tuple[str, ...]) -> Design:
        """The design with these terms only."""
        first = len(self.knots)
        places = [i for i, name in enumerate(self.names) if name in terms]
        rest = range(first + len(self.names), self.matrix.shape[1])
        columns = [*range(first), *(first + i for i in places), *rest]
        return replace(self, names=tuple(self.names[i] for i in places), matrix=self.matrix[:, columns])

    def take(self, rows: Ints) -> Design:
        """The design of the given rows; rows may repeat."""
        fields = ("matrix", "ns", "run", "kind", "load", "ahead")
        return replace(self, **{name: getattr(self, name)[rows] for name in fields})

    def blocks(self) -> list[Ints]:
        """Rows that were recorded one after another."""
        return [
            rows
            for number in range(self.runs)
            for planned in (False, True)
            if len(rows := np.flatnonzero((self.run == number) & (self.ahead == planned)))
        ]

    def column(self, name: str) -> int | None:
        """The column of a term; None where it is not in the fit."""
        return len(self.knots) + self.names.index(name) if name in self.names else None

    @property
    def launch(self) -> int | None:
        """The column of launches, which the device's work of a step can't go below."""
        return next(
            (
                column
                for name in self.kernels.named(Place.LAUNCH)
                if (column := self.column(name)) is not None
            ),
            None,
        )

    def bounded(self, coefficients: Floats) -> Floats:
        """The matrix with the longer side of each row only: its launches, or what the device does.

        `coefficients` tell which is longer. The host's columns stay in every row.
        """
        column = self.launch
        if column is None:
            return self.matrix
        device = self._device()
        busy = self.matrix[:, device] @ coefficients[device]
        return self.sided(self.matrix[:, column] * coefficients[column] > busy)

    def sided(self, launching: Flags) -> Floats:
        """The matrix with the launches of rows that are `launching`, and the device's work of the others."""
        matrix = self.matrix.copy()
        matrix[np.ix_(launching, self._device())] = 0.0
        matrix[~launching, self.launch] = 0.0
        return matrix

    def _device(self) -> Ints:
        """The columns of what the device does."""
        first = len(self.knots)
        others = self.kernels.named(Place.HOST, Place.ARRIVAL, Place.LAUNCH)
        terms = [first + i for i, name in enumerate(self.names) if name not in others]
        hidden = [first + len(self.names)] if self.hides else []
        return np.array([*range(first), *terms, *hidden])

    def parted(self, coefficients: Floats) -> tuple[Floats, dict[str, float], Host | None]:
        """Splits a solution into curve and terms of synchronous steps, and the host's share.

        Without steps planned ahead the host's share is None. With them the curve is fitted as the device's
        alone; what the host adds to a synchronous step, in the mean, is added to the curve and to launches.
        """
        count, end = len(self.knots), len(self.knots) + len(self.names)
        terms = dict(zip(self.names, coefficients[count:end].tolist(), strict=True))
        if not self.ahead.any():
            return coefficients[:count], terms, None
        first = self.matrix.shape[1] - self.segments
        steps, added = self.matrix[:, first:].sum(axis=0), coefficients[first:]
        step_ns = float(steps @ added) / max(float(steps.sum()), 1.0)
        hidden = float(coefficients[end]) if self.hides else 0.0
        for name in self.kernels.named(Place.LAUNCH):
            if name in terms:
                terms[name] += step_ns
        host = Host(step_ns, terms.get(REQUEST, 0.0), hidden, 0.0, FITTED, self.launch_ns)
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
    kernels = family(shape.family)
    knots = choose_knots(np.concatenate([computed_rows(table, shape) for table in every]), _jumps(shape))
    parts = [table.units for table in tables]
    parts += [_ahead_units(groups.table, kernels) for groups in early]
    occurs = np.any([np.any(part, axis=0) for part in parts], axis=0)
    present = tuple(name for name, any_step in zip(kernels.names, occurs, strict=True) if any_step)
    count = len(knots) + len(present)
    least = max(STEPS_PER_TERM * count, LEAST_STEPS)
    if steps < least:
        raise BadInput(f"{steps} steps are too few for {count} terms: record at least {least}")
    rows = [
        np.hstack([curve_weights(computed_rows(table, shape), knots), part[:, occurs]])
        for table, part in zip(every, parts, strict=True)
    ]
    summed = [groups.summed(mine) for groups, mine in zip(early, rows[len(tables) :], strict=True)]
    matrix = np.concatenate([*rows[: len(tables)], *summed])
    absent = tuple(name for name in kernels.names if name not in present)
    return _joined(kernels, knots, present, matrix, tables, early), absent


def _jumps(shape: TileShape) -> tuple[int, ...]:
    """Token counts at which the curve may jump: where steps with prompts have CUDA graphs of their own."""
    own = shape.prompt_sizes != shape.graph_sizes
    return (*shape.graph_sizes, *shape.prompt_sizes) if own else ()


def _joined(
    kernels: KernelFamily,
    knots: tuple[int, ...],
    names: tuple[str, ...],
    matrix: Floats,
    tables: list[StepTable],
    early: list[AheadSteps],
) -> Design:
    run = [np.full(len(table), i) for i, table in enumerate(tables)]
    run += [np.full(len(groups.ns), groups.recording) for groups in early]
    kinds = [_kinds(table) for table in tables]
    kinds += [groups.most(_kinds(groups.table)) + _KINDS for groups in early]
    size = len(matrix)
    plain = Design(
        kernels=kernels,
        knots=knots,
        names=names,
        matrix=matrix,
        ns=np.concatenate([*(table.ns for table in tables), *(groups.ns for groups in early)]),
        run=np.concatenate(run).astype(np.int64),
        runs=max(len(tables), *(groups.recording + 1 for groups in early), 1),
        kind=np.concatenate(kinds),
        load=_loads(tables, early),
        ahead=np.arange(size) >= sum(map(len, tables)),
    )
    return _beside(plain, tables, early) if early else plain


def _loads(tables: list[StepTable], early: list[AheadSteps]) -> Ints:
    """A number for each row's load: segments of one load have one number in all recordings."""
    names: dict[str, int] = {}
    numbers = []
    for table in (*tables, *(groups.table for groups in early)):
        of_segment = [names.setdefault(load_of(name), len(names)) for name in table.segments]
        numbers.append(np.array(of_segment, np.int64)[table.segment])
    loads = numbers[: len(tables)]
    loads += [groups.most(mine) for groups, mine in zip(early, numbers[len(tables) :], strict=True)]
    return np.concatenate(loads)


def _ahead_units(table: StepTable, kernels: KernelFamily) -> Floats:
    """The units of steps planned ahead, which hide the host's time for requests, arrivals and launches.

    A synchronous step that is launched kernel by kernel has no request units: that host time is in its other
    terms. Planned ahead it is hidden, so here its request units are negative and take it off.
    """
    units = table.units.copy()
    units[:, kernels.names.index(REQUEST)] -= table.n + table.chunks
    for name in kernels.named(Place.ARRIVAL, Place.LAUNCH):
        units[:, kernels.names.index(name)] = 0.0
    return units


def _beside(plain: Design, tables: list[StepTable], early: list[AheadSteps]) -> Design:
    """The design with columns for what the host adds to synchronous steps and what is hidden of others."""
    size, steps = len(plain.ns), sum(map(len, tables))
    prompts = [groups.summed(groups.table.mixed.astype(np.float64)) for groups in early]
    hidden = -np.concatenate([np.zeros(steps), *prompts])
    hosts, begin = list[Floats](), 0
    for table in tables:
        for number in np.unique(table.segment):
            column = np.zeros(size)
            column[begin : begin + len(table)] = table.segment == number
            hosts.append(column)
        begin += len(table)
    launches = [groups.launch_ns for groups in early if groups.launch_ns]
    columns = [hidden, *hosts] if hidden.any() else hosts
    return replace(
        plain,
        matrix=np.hstack([plain.matrix, *(column[:, None] for column in columns)]),
        hides=bool(hidden.any()),
        segments=len(hosts),
        launch_ns=float(np.median(launches)) if launches else 0.0,
    )


def _kinds(table: StepTable) -> Ints:
    """Numbers of kinds of steps: decode steps by requests, others by tokens."""
    decode = np.digitize(table.n, _BATCHES)
    return np.where(table.mixed, len(_BATCHES) + 1 + np.digitize(table.tokens, _TOKENS), decode)
