"""Choice of one knob by the load that it admits: block size, or HBM budget, now and at its best.

A value is judged as `plan` judges a server, with users who wait for their answers (`CapacityQuestion`). The
best admits the most users; of those that admit as many, it has the shortest TTFT at that load, and of those
within 5% of it the most memory left. Few replays tell: the search of `plan` finds the users at the value in
force, and only values that hold at a little more load are searched too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagecast.planner_app.planner.capacity.admitted import admitted, question_of
from pagecast.planner_app.planner.capacity.bisection import CapacityQuestion, LoadTrial
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.users import Load
from pagecast.planner_app.planner.sweep.trial import at, check_memory
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import GIB
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

BLOCK_SIZE, HBM = "block_size", "gpu_memory_utilization"
BLOCK_SIZES = (8, 16, 32, 64, 128)
BUDGETS = tuple(percent / 100 for percent in (*range(15, 95, 10), 90, 95))
_SLOWER = 1.05  # times the shortest mean TTFT, that counts as short
_MORE = 32  # parts of the users admitted, that another value must admit beyond them to be better


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
    made: dict[tuple[float, int], LoadTrial] = field(default_factory=dict)
    done: int = 0

    def question(self, value: float) -> CapacityQuestion:
        ask = PlanOptions(slo=self.slo)
        return question_of(self.trace, at(self.scenario, {self.knob: value}), ask)

    def users(self, value: float) -> int:
        """The users that a value admits; 0 where one breaks the SLO."""
        search = admitted(self.question(value))
        self._count(search.answer.tried)
        if search.at is not None:
            self.made[value, round(search.at.amount)] = search.at
        return search.value or 0

    def at(self, value: float, users: int) -> LoadTrial:
        """How a value serves so many users."""
        if (value, users) not in self.made:
            question, load = self.question(value), Load("concurrency", max(users, 1))
            self.made[value, users] = question.judge(load, question.serve(load))
            self._count(1)
        return self.made[value, users]

    def standing(self, value: float, users: int, load: int) -> Standing:
        scenario = at(self.scenario, {self.knob: value})
        made = self.made.get((value, load))
        kv_gib = scenario.layout().block_bytes * scenario.blocks() / GIB
        return Standing(value, users, made.ttft_mean_s if made else None, kv_gib)

    def _count(self, replays: int) -> None:
        self.done += replays
        self.progress(min(self.done, self.total), self.total)


def _more(users: int) -> int:
    """So many more users that a value which admits them is better."""
    return users + max(users // _MORE, 1)


def _by_budget(run: _Runs, own: float, values: Sequence[float]) -> Choice:
    """More memory never admits fewer: so the largest budget admits the most, and the least that admits as
    many is bisected."""
    users = load = run.users(own)
    largest = values[-1]
    if largest != own and (not users or run.at(largest, _more(users)).holds):
        load = max(run.users(largest), users)
    if not load:
        own_standing = run.standing(own, 0, 0)
        return Choice(run.knob, own_standing, own_standing, 0, tuple(values))
    shortest = run.at(largest, load).ttft_mean_s

    def good(value: float) -> bool:
        trial = run.at(value, load)
        return value == largest or (trial.holds and trial.ttft_mean_s <= _SLOWER * shortest)

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
        run.knob, run.standing(own, users, load), run.standing(best, load, load), load, tuple(values)
    )


def _by_size(run: _Runs, own: float, values: Sequence[float]) -> Choice:
    """Each other size is tried at the load of the one in force, and searched where it may admit more."""
    users = run.users(own)
    best = standing = run.standing(own, users, users)
    if not users:
        return Choice(run.knob, standing, standing, 0, tuple(values))
    for value in values:
        if value == own or not run.at(value, users).holds:
            continue
        admits = users
        if run.at(value, _more(users)).holds:
            admits = max(run.users(value), _more(users))
        shorter = run.at(value, users).ttft_mean_s * _SLOWER < (best.ttft_s or 0.0)
        if admits > best.users or (admits == best.users and shorter):
            best = run.standing(value, admits, users)
    return Choice(run.knob, standing, best, users, tuple(values))
