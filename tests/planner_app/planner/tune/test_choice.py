"""The choice of block size and HBM budget is no worse, by a plan's own measure, than any value tried."""

from __future__ import annotations

import pytest
from pagecast.planner_app.planner.capacity.bisection import CapacityQuestion, LoadTrial
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.planning import plan
from pagecast.planner_app.planner.capacity.users import Load
from pagecast.planner_app.planner.slo import Slo
from pagecast.planner_app.planner.tune import choice
from pagecast.planner_app.planner.tune.choice import BLOCK_SIZE, HBM, Choice, Standing, budgets, choose
from pagecast.planner_app.planner.tune.setting import Tuning
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

SLO = "ttft_p90<2s,tpot_p90<60ms"  # statistics that so few requests carry
SMALL = Scenario.make(
    {
        "gpu": "L4",
        "model": "Qwen/Qwen3-4B",
        "max_num_seqs": 32,
        "costs": "roofline",
        "gpu_memory_utilization": 0.9,
    }
)


@pytest.fixture(scope="module")
def trace():
    return read("chat", limit=150)


def holds(choice: Choice, value: float, users: int, trace) -> bool:
    """Whether `plan`'s own measure says that a value keeps the SLO with so many users."""
    scenario = SMALL.changed(**{choice.knob: int(value) if choice.knob == BLOCK_SIZE else value})
    question = CapacityQuestion(trace, scenario, PlanOptions(slo=SLO))
    load = Load("concurrency", users)
    return question.judge(load, question.serve(load)).holds


@pytest.mark.parametrize("knob", [BLOCK_SIZE, HBM])
def test_the_best_admits_no_fewer_than_any_value_that_was_tried(knob: str, trace) -> None:
    told: list[int] = []
    choice = choose(trace, SMALL, knob, SLO, lambda done, total: told.append(done), lasting=False)
    assert choice.best.users >= choice.now.users > 0
    assert told == sorted(told) and told[-1] <= 24
    assert holds(choice, choice.best.value, choice.best.users, trace)
    step = max(choice.best.users // 16, 1)
    for value in choice.tried:
        assert not holds(choice, value, choice.best.users + 2 * step, trace), value


def test_budgets_at_which_the_engine_does_not_start_are_not_tried() -> None:
    assert max(budgets(SMALL)) <= 0.95 and 0.9 in budgets(SMALL)
    with pytest.raises(BadInput, match="fixed number of blocks"):
        choose(read("chat", limit=20), Scenario(num_gpu_blocks=500), HBM, SLO)


def test_where_one_user_breaks_the_slo_nothing_is_best(trace) -> None:
    choice = choose(trace, SMALL, BLOCK_SIZE, "ttft_p99<1us", lasting=False)
    assert (choice.load, choice.now.users, choice.changes) == (0, 0, False)


def test_plan_tune_and_the_cards_admit_the_same_users(trace) -> None:
    """One search behind every advice."""
    ask = PlanOptions(slo=SLO, kinds=("concurrency",), replicates=0, explain=False)
    planned = plan(trace, SMALL, ask).concurrency
    assert planned is not None
    tuned = Tuning(trace, SMALL, BLOCK_SIZE, Slo.parse(SLO)).run(SMALL.block_size)
    assert tuned["admissible_concurrency"] == planned.value
    assert choose(trace, SMALL, HBM, SLO, lasting=False).now.users == planned.value


class Told(choice._Runs):
    """Values of which is told what they admit: users, and requests per second in the trace's own."""

    def __init__(self, told: dict[float, tuple[int, float]]) -> None:
        self.told, self.rate, self.knob, self.lasting = told, 10.0, "", True

    def users(self, value: float) -> int:
        return self.told[value][0]

    def most(self, value: float, users: int) -> float:
        return self.told[value][1]

    def beyond(self, value: float, users: int) -> float:
        return self.told[value][0] + 0.5

    def at(self, value: float, load: Load) -> LoadTrial:
        admits = self.told[value][0 if load.kind == "concurrency" else 1]
        return LoadTrial(load.amount, load.amount <= admits, (), 0.0, 1.0, 1.0, ttft_mean_s=1.0)

    def standing(self, value: float, users: int, load: int, rate: float | None = None) -> Standing:
        return Standing(value, users, 1.0, 100 * value, None if rate is None else rate * 10.0)


def test_a_budget_that_admits_as_many_users_at_a_lower_rate_is_not_best() -> None:
    """Sessions that pause lose their blocks, of which users who never pause show nothing."""
    told = {0.3: (200, 1.0), 0.5: (300, 2.7), 0.7: (300, 3.1), 0.9: (300, 3.1)}
    best = choice._by_budget(Told(told), 0.9, sorted(told))
    assert (best.best.value, best.best.rate) == (0.7, 31.0)
    worse = choice._by_budget(Told(told), 0.5, sorted(told))
    assert (worse.now.rate, worse.best.value) == (27.0, 0.7)


def test_a_budget_in_force_that_takes_more_than_larger_ones_is_not_left_for_less() -> None:
    """By chance: what is best is compared with the value in force, not only with the largest."""
    told = {0.5: (300, 3.1), 0.8: (300, 3.1), 0.9: (300, 3.3), 0.95: (300, 3.1)}
    assert choice._by_budget(Told(told), 0.9, sorted(told)).best.value == 0.9
    more_users = {**told, 0.95: (400, 3.1)}
    assert choice._by_budget(Told(more_users), 0.9, sorted(told)).best.value == 0.9


def test_a_first_answer_does_not_advise_less_memory(trace) -> None:
    """Brief loads do not fill a cache, and do not tell rates apart."""
    first = choose(trace, SMALL, HBM, SLO, lasting=False)
    assert first.best.value in (SMALL.gpu_memory_utilization, budgets(SMALL)[-1])
    none = Told({0.5: (300, 0.0), 0.9: (300, 0.0), 0.95: (300, 3.0)})
    none.lasting = False
    assert not choice._by_budget(none, 0.9, (0.5, 0.9, 0.95)).changes


def test_a_block_size_that_takes_more_of_one_load_and_less_of_the_other_is_not_best() -> None:
    told = {16: (300, 3.0), 32: (300, 3.3), 64: (340, 2.0), 128: (200, 4.0)}
    assert choice._by_size(Told(told), 16, sorted(told)).best.value == 32
    assert choice._by_size(Told({16: (300, 3.0), 32: (300, 3.0)}), 16, (16, 32)).best.value == 16
