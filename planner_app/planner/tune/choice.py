"""Choice of one knob by the load that it admits: block size, or HBM budget, now and at its best.

A value is judged as `plan` judges a server, with users who wait for their answers (`CapacityQuestion`). The
best admits the most users; of those that admit as many, it has the shortest TTFT at that load, and of those
within 5% of it the most memory left. Few replays tell: the search finds the users at the value in force, and
other values are tried at that load first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from pagecast.planner_app.planner.capacity.bisection import Ask, CapacityQuestion
from pagecast.planner_app.planner.capacity.envelope import envelope
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.users import Load
from pagecast.planner_app.planner.slo import Slo
from pagecast.planner_app.planner.sweep.trial import at, check_memory
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import GIB
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

BLOCK_SIZE, HBM = "block_size", "gpu_memory_utilization"
BLOCK_SIZES = (8, 16, 32, 64, 128)
BUDGETS = tuple(percent / 100 for percent in (*range(15, 95, 10), 90, 95))
_SLOWER = 1.05  # times the shortest mean TTFT, that counts as short
_FINE = 64  # parts of the users admitted, to which a search is made
_MORE = 32  # parts of the users admitted, that another value must admit beyond them to be better
_MOST_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Standing:
    """What one value admits: `users` who keep the SLO, mean TTFT at the load compared, GiB of KV."""

    value: float
    users: int
    ttft_s: float | None
    kv_gib: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The value in force and the best of those tried. `load`: users at which times are compared."""

    knob: str
    now: Standing
    best: Standing
    load: int
    tried: tuple[float, ...]

    @property
    def changes(self) -> bool:
        """Whether another value is better than the one in force."""
        return self.best.value != self.now.value


def budgets(scenario: Scenario) -> tuple[float, ...]:
    """HBM budgets to try: those of `BUDGETS` at which the engine starts, and the one in force."""
    own = scenario.gpu_memory_utilization
    return tuple(
        value for value in sorted({*BUDGETS, *([own] if own else [])}) if _starts(scenario, HBM, value)
    )


def block_sizes(scenario: Scenario) -> tuple[float, ...]:
    """Block sizes to try: the usual ones, and the one in force."""
    values = sorted({*BLOCK_SIZES, scenario.block_size})
    return tuple(value for value in values if _starts(scenario, BLOCK_SIZE, value))


def _starts(scenario: Scenario, knob: str, value: float) -> bool:
    try:
        check_memory(at(scenario, {knob: value}))
    except BadInput:
        return False
    return True


def choose(
    trace: Trace,
    scenario: Scenario,
    knob: str,
    slo: str,
    progress: Callable[[int, int], object] | None = None,
) -> Choice:
    """The choice of `knob`, `BLOCK_SIZE` or `HBM`. Errors: BadInput where the scenario in force can't run.

    `progress` is called with the replays made, and how many there will be at about.
    """
    check_memory(scenario)
    if knob == HBM and (scenario.num_gpu_blocks is not None or scenario.kv_tokens is not None):
        raise BadInput("the KV cache has a fixed number of blocks: leave that out to choose an HBM budget")
    own: float | None = getattr(scenario, knob)
    values = budgets(scenario) if knob == HBM else block_sizes(scenario)
    if own is None or own not in values:
        raise BadInput(f"{knob} is not set: give it to choose another")
    run = _Runs(trace, scenario, knob, slo, progress or (lambda done, total: None))
    chosen = _by_budget if knob == HBM else _by_size
    return chosen(run, own, values)


@dataclass
class _Runs:
    """Replays of the values of a knob, each made once."""

    trace: Trace
    scenario: Scenario
    knob: str
    slo: str
    progress: Callable[[int, int], object]
    total: int = 16
    made: dict[tuple[float, int], tuple[bool, float]] = field(default_factory=dict)
    done: int = 0

    def question(self, value: float) -> CapacityQuestion:
        options = PlanOptions(slo=self.slo, most_requests=_MOST_REQUESTS)
        return CapacityQuestion(self.trace, at(self.scenario, {self.knob: value}), options)

    def users(self, value: float, start: int) -> int:
        """The users that a value admits, searched from `start` on; 0 where one breaks the SLO."""
        ask = Ask(
            "concurrency",
            start=max(start, 1),
            step=max(start // 16, 1),
            resolution=max(start // _FINE, 1),
            verify=False,
        )
        search = self.question(value).search(ask)
        self._count(search.answer.tried)
        return search.answer.value or 0

    def at(self, value: float, users: int) -> tuple[bool, float]:
        """Whether a value keeps the SLO with so many users, and its mean TTFT then."""
        if (value, users) not in self.made:
            question, load = self.question(value), Load("concurrency", max(users, 1))
            served = question.serve(load)
            ttft = served.measured["ttft_s"].to_numpy(np.float64)
            mean = float(ttft[np.isfinite(ttft)].mean()) if np.isfinite(ttft).any() else float("inf")
            self.made[value, users] = (question.judge(load, served).holds, mean)
            self._count(1)
        return self.made[value, users]

    def standing(self, value: float, users: int, load: int) -> Standing:
        scenario = at(self.scenario, {self.knob: value})
        made = self.made.get((value, load))
        kv_gib = scenario.layout().block_bytes * scenario.blocks() / GIB
        return Standing(value, users, made[1] if made else None, kv_gib)

    def _count(self, replays: int) -> None:
        self.done += replays
        self.progress(min(self.done, self.total), self.total)


def _start(run: _Runs) -> int:
    """Where a search begins: at what fits by arithmetic."""
    return min(
        envelope(run.trace, run.scenario, Slo.optional(run.slo)).concurrency, 4 * run.scenario.max_num_seqs
    )


def _by_budget(run: _Runs, own: float, values: Sequence[float]) -> Choice:
    """More memory never admits fewer: so the largest budget admits the most, and the least that admits as
    many is bisected."""
    users = run.users(own, _start(run))
    largest = values[-1]
    most = users if largest == own else max(run.users(largest, users or 1), users)
    near = most - max(most // _MORE, 1)
    if not most:
        own_standing = run.standing(own, 0, 0)
        return Choice(run.knob, own_standing, own_standing, 0, tuple(values))
    if near <= users:  # a difference within the search's step is none
        most = users
    load = most
    _, shortest = run.at(largest, load)

    def good(value: float) -> bool:
        holds, ttft = run.at(value, load)
        return value == largest or (holds and ttft <= _SLOWER * shortest)

    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if good(values[middle]):
            high = middle
        else:
            low = middle + 1
    best = values[high]
    run.at(own, load)
    return Choice(
        run.knob, run.standing(own, users, load), run.standing(best, most, load), load, tuple(values)
    )


def _by_size(run: _Runs, own: float, values: Sequence[float]) -> Choice:
    """Each other size is tried at the load of the one in force, and searched where it may admit more."""
    users = run.users(own, _start(run))
    standing = run.standing(own, users, users)
    if not users:
        return Choice(run.knob, standing, standing, 0, tuple(values))
    run.at(own, users)
    standing = run.standing(own, users, users)
    best, more = standing, users + max(users // _MORE, 1)
    for value in values:
        if value == own or not run.at(value, users)[0]:
            continue
        admitted = users
        if run.at(value, more)[0]:
            admitted = max(run.users(value, more), more)
        shorter = run.at(value, users)[1] * _SLOWER < (best.ttft_s or 0.0)
        if admitted > best.users or (admitted == best.users and shorter):
            best = run.standing(value, admitted, users)
    return Choice(run.knob, standing, best, users, tuple(values))
