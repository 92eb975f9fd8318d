"""Choice of one knob by the load that it admits: block size, or HBM budget, now and at its best.

A value is judged as `plan` judges a server (`CapacityQuestion`), by both of its loads: users who wait for
their answers, and requests at a rate, between which sessions pause and their blocks are evicted. The best
admits the most; of those that admit as much, it has the shortest TTFT at that load, and of those within 5% of
it the most memory left. Few replays tell: the searches of `plan` find users and rate at the value in force,
and only values that hold at a little more load are searched too. A pool that a load never uses up stands for
larger ones (`sim.replay.room`), and what two choices need is replayed once (`Known`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from pagecast.planner_app.planner.capacity.admitted import admitted, question_of, rate_ask
from pagecast.planner_app.planner.capacity.bisection import GRID, CapacityQuestion, LoadSearch, LoadTrial
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.users import Load, requests_per_s
from pagecast.planner_app.planner.sweep.trial import at, check_memory
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import GIB
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

BLOCK_SIZE, HBM = "block_size", "gpu_memory_utilization"
BLOCK_SIZES = (16, 32, 64, 128)  # what attention kernels on NVIDIA GPUs take
BUDGETS = tuple(percent / 100 for percent in (*range(15, 95, 10), 90, 95))
_SLOWER = 1.05  # times the shortest mean TTFT, that counts as short
_MORE = 32  # parts of the users admitted, that another value must admit beyond them to be better
_RATE_STEP = 4  # steps of `GRID` to which a rate is found, and that another must take beyond it


@dataclass(frozen=True, slots=True)
class Standing:
    """What one value admits: `users` who keep the SLO, mean TTFT at the load compared, GiB of KV.

    `rate`: requests per second that keep the SLO; None where all requests come at once.
    """

    value: float
    users: int
    ttft_s: float | None
    kv_gib: float
    rate: float | None = None


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
    values: Sequence[float] = (),
    *,
    lasting: bool = True,
    known: Known | None = None,
) -> Choice:
    """The choice of `knob`, a block size or an HBM budget. Errors: BadInput where nothing can run.

    `values`: those to choose from, ascending; by default the usual ones. What is not among them is not in
    force: then the middle one is taken for that. `progress` is called with the replays made, and how many
    there will be at about. `lasting`: rates are those of `plan`, by long loads. Without, a first answer in a
    fifth of the time, by brief ones: in these a cache seems large enough that is not, so no budget below the
    one in force is tried, and rates only beside those at which the most users are served. `known`: what
    another choice for the same trace, SLO and kind of loads has found, and where this one's goes.
    """
    if knob != BLOCK_SIZE and (scenario.num_gpu_blocks is not None or scenario.kv_tokens is not None):
        raise BadInput("the KV cache has a fixed number of blocks: leave that out to choose an HBM budget")
    own: float | None = getattr(scenario, knob)
    if not values:
        check_memory(scenario)
        values = budgets(scenario) if knob == HBM else block_sizes(scenario)
        if own is None or own not in values:
            raise BadInput(f"{knob} is not set: give it to choose another")
    if own is None or own not in values:
        own = values[len(values) // 2]
    tell = progress or (lambda done, total: None)
    run = _Runs(trace, scenario, knob, slo, tell, lasting, Known() if known is None else known)
    chosen = _by_size if knob == BLOCK_SIZE else _by_budget
    return chosen(run, own, values)


@dataclass
class Known:
    """Outcomes of loads, searches for users and rates found so far, by scenario. `done`: replays made."""

    trials: dict[tuple[Scenario, Load], LoadTrial] = field(default_factory=dict)
    searches: dict[Scenario, LoadSearch] = field(default_factory=dict)
    rates: dict[Scenario, float] = field(default_factory=dict)
    done: int = 0

    def trial(self, scenario: Scenario, load: Load) -> LoadTrial | None:
        """The outcome of a load, or of its replay with a pool of another size that goes the same way."""
        if (scenario, load) in self.trials:
            return self.trials[scenario, load]
        same = (trial for (_, other), trial in self.trials.items() if other == load)
        return next((trial for trial in same if trial.room and trial.room.holds(scenario)), None)


@dataclass
class _Runs:
    """Replays of the values of a knob, each made once.

    `rate`: the trace's own, in requests per second; None where all its requests come at once. Rates are in
    multiples of it.
    """

    trace: Trace
    scenario: Scenario
    knob: str
    slo: str
    progress: Callable[[int, int], object]
    lasting: bool
    known: Known = field(default_factory=Known)
    total: int = 24
    rate: float | None = None

    def __post_init__(self) -> None:
        try:
            self.rate = requests_per_s(self.question(self.scenario).trace)
        except BadInput:
            self.rate = None

    def question(self, scenario: Scenario) -> CapacityQuestion:
        question = replace(question_of(self.trace, scenario, PlanOptions(slo=self.slo)), rooms=True)
        return question if self.rate is None else replace(question, rate=self.rate)

    def with_value(self, value: float) -> Scenario:
        """The scenario with a value, which is the one in force itself where that has it."""
        in_force = value == getattr(self.scenario, self.knob)
        return self.scenario if in_force else at(self.scenario, {self.knob: value})

    def users(self, value: float) -> int:
        """The users that a value admits; 0 where one breaks the SLO."""
        scenario, known = self.with_value(value), self.known
        search = known.searches.get(scenario)
        if search is None:
            search = known.searches[scenario] = admitted(self.question(scenario))
            for trial in search.tried:
                known.trials[scenario, _users(round(trial.amount))] = trial
            self._count(search.answer.tried)
        return search.value or 0

    def most(self, value: float, users: int) -> float:
        """The rate that a value takes, from where `users` were served; 0 where there is none.

        Not `lasting`: that at which they were served, if it takes that.
        """
        if self.rate is None:
            return 0.0
        begin = self.at(value, _users(users))
        if not self.lasting:
            rate = begin.requests_per_s / self.rate
            return rate if self.takes(value, rate) else 0.0
        scenario, known = self.with_value(value), self.known
        if scenario not in known.rates:
            question = self.question(scenario)
            search = question.search(rate_ask(question, begin))
            self._count(search.answer.tried)
            known.rates[scenario] = 0.0
            if search.value is not None and search.at is not None:
                known.rates[scenario] = rate = GRID**search.value
                known.trials[scenario, Load("rate", rate)] = search.at
        return known.rates[scenario]

    def at(self, value: float, load: Load) -> LoadTrial:
        """How a value serves a load."""
        scenario, known = self.with_value(value), self.known
        made = known.trial(scenario, load)
        if made is None:
            question = self.question(scenario)
            rate = load.kind == "rate"
            if self.lasting and rate:
                made = question.serve_long(load)
            else:
                made = question.judge(load, question.serve(load, brief=rate))
            self._count(1)
        known.trials[scenario, load] = made
        return made

    def takes(self, value: float, rate: float) -> bool:
        """Whether a value keeps the SLO at a rate; any does at none."""
        return not rate or self.at(value, Load("rate", rate)).holds

    def takes_more(self, value: float, rate: float) -> bool:
        """Whether a value may take more than the rate that another takes at most; 0 where that takes none.

        Brief loads do not tell.
        """
        if not self.lasting or self.rate is None:
            return False
        return not rate or self.takes(value, rate * GRID**_RATE_STEP)

    def admits_more(self, value: float, users: int) -> bool:
        """Whether a value may admit more users than another. It does not where fewer than that break it."""
        more = _users(_more(users))
        if self.beyond(value, users) <= more.amount:
            return False
        return self.at(value, more).holds

    def beyond(self, value: float, users: int) -> float:
        """The fewest users above so many of which is known that a value does not admit them."""
        scenario = self.with_value(value)
        failed = [
            load
            for (_, load), trial in list(self.known.trials.items())
            if load.kind != "rate" and load.amount > users and not trial.holds
        ]
        return min((load.amount for load in failed if self.known.trial(scenario, load)), default=inf)

    def keeps(self, value: float, users: int, rate: float) -> bool:
        """Whether a value keeps the SLO with so many users, and at a rate."""
        return self.at(value, _users(users)).holds and self.takes(value, rate)

    def slower(self, value: float, users: int, rate: float, than: float, times: float = _SLOWER) -> bool:
        """Whether mean TTFT at one of both loads, 0 for none, is more than so many times another value's."""
        loads = [*([_users(users)] if users else []), *([Load("rate", rate)] if rate else [])]
        return any(
            self.at(value, load).ttft_mean_s > times * self.at(than, load).ttft_mean_s for load in loads
        )

    def standing(self, value: float, users: int, load: int, rate: float | None = None) -> Standing:
        scenario = self.with_value(value)
        made = self.known.trial(scenario, _users(load))
        kv_gib = scenario.layout().block_bytes * scenario.blocks() / GIB
        shown = rate * self.rate if rate is not None and self.rate is not None else None
        return Standing(value, users, made.ttft_mean_s if made else None, kv_gib, shown)

    def _count(self, replays: int) -> None:
        self.known.done += replays
        self.progress(min(self.known.done, self.total), self.total)


def _users(count: int) -> Load:
    return Load("concurrency", max(count, 1))


def _more(users: int) -> int:
    """So many more users that a value which admits them is better."""
    return users + max(users // _MORE, 1)


def _by_budget(run: _Runs, own: float, values: Sequence[float]) -> Choice:
    """More memory tends to admit more: so the most is that of the largest budget, or of the one in force
    where the largest takes less of a load, and the least budget that takes as much is bisected."""
    users = run.users(own)
    rate = run.most(own, users) if users else 0.0
    top, load, takes = own, users, rate
    largest = values[-1]
    if largest != own:
        more_users = not users or run.admits_more(largest, users)
        more_rate = run.takes_more(largest, rate)
        if (more_users or more_rate) and (not users or run.keeps(largest, users, rate)):
            top = largest
            load = max(run.users(largest), users) if more_users else users
            takes = max(run.most(largest, load), rate) if load else 0.0
    if not load:
        own_standing = run.standing(own, 0, 0)
        return Choice(run.knob, own_standing, own_standing, 0, tuple(values))

    def enough(value: float) -> bool:
        return run.keeps(value, load, takes) and not run.slower(value, load, takes, top)

    def good(value: float) -> bool:
        # By the rate, where there is one: between turns that pause, more is in the cache than users have.
        fast = run.takes(value, takes) and not run.slower(value, 0, takes, top)
        return fast if takes else enough(value)

    best = values.index(top)
    if run.lasting:
        best = _least(values, best, good)
        while values[best] != top and not enough(values[best]):
            best += 1
    run.at(own, _users(load))
    return Choice(
        run.knob,
        run.standing(own, users, load, rate),
        run.standing(values[best], load, load, takes),
        load,
        tuple(values) if run.lasting else tuple(sorted({own, largest})),
    )


def _least(values: Sequence[float], best: int, good: Callable[[float], bool]) -> int:
    """The place of the least value that is good, up to that of one which is."""
    low = 0
    while low < best:
        middle = (low + best) // 2
        if good(values[middle]):
            best = middle
        else:
            low = middle + 1
    return best


def _by_size(run: _Runs, own: float, values: Sequence[float]) -> Choice:
    """Each other size is tried at the load of the one in force, and searched where it may admit more.

    A size that takes less of either load than the one in force is no better, however much of the other.
    """
    users = run.users(own)
    if not users:
        standing = run.standing(own, 0, 0)
        return Choice(run.knob, standing, standing, 0, tuple(values))
    rate = run.most(own, users)
    now = best = run.standing(own, users, users, rate)
    gained = 1.0  # of users times of rate
    for value in (value for value in values if value != own):
        if not run.keeps(value, users, rate):
            continue
        more_users = run.admits_more(value, users)
        more_rate = rate > 0 and run.takes_more(value, rate)
        admits = max(run.users(value), _more(users)) if more_users else users
        takes = max(run.most(value, users), rate) if more_rate else rate
        gains = admits / users * (takes / rate if rate else 1.0)
        if gains > gained or (
            gains == gained and not run.slower(value, users, rate, best.value, 1 / _SLOWER)
        ):
            best, gained = run.standing(value, admits, users, takes), gains
    return Choice(run.knob, now, best, users, tuple(values))
