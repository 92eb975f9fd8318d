"""The choice of block size and HBM budget is no worse, by a plan's own measure, than any value tried."""

from __future__ import annotations

import pytest
from pagecast.planner_app.planner.capacity.bisection import CapacityQuestion
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.planning import plan
from pagecast.planner_app.planner.capacity.users import Load
from pagecast.planner_app.planner.slo import Slo
from pagecast.planner_app.planner.tune.choice import BLOCK_SIZE, HBM, Choice, budgets, choose
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
    choice = choose(trace, SMALL, knob, SLO, lambda done, total: told.append(done))
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
    choice = choose(trace, SMALL, BLOCK_SIZE, "ttft_p99<1us")
    assert (choice.load, choice.now.users, choice.changes) == (0, 0, False)


def test_plan_tune_and_the_cards_admit_the_same_users(trace) -> None:
    """One search behind every advice."""
    ask = PlanOptions(slo=SLO, kinds=("concurrency",), replicates=0, explain=False)
    planned = plan(trace, SMALL, ask).concurrency
    assert planned is not None
    tuned = Tuning(trace, SMALL, BLOCK_SIZE, Slo.parse(SLO)).run(SMALL.block_size)
    assert tuned["admissible_concurrency"] == planned.value
    assert choose(trace, SMALL, HBM, SLO).now.users == planned.value
