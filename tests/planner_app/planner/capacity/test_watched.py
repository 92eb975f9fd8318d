"""Replays that stop early: their answers are those of replays to the end."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from pagecast.planner_app.planner.capacity.bisection import CapacityQuestion
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.planning import plan
from pagecast.planner_app.planner.capacity.users import Load, requests_per_s
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace, table

from ....sim.replay.test_room import drawn_scenarios, drawn_trace

TERMS = (
    "ttft_p99<{}ms",
    "ttft_p50<={}ms",
    "ttft_mean<{}ms",
    "e2e_p90<{}ms",
    "e2e_max<{}ms",
    "tpot_p95<{}ms",
    "queue_p90<{}ms",
    "goodput(ttft<{}ms,e2e<3s)>0.9",
)


@st.composite
def plans(draw):
    """A trace of a few sessions or requests, a small server and an SLO, some of it out of reach."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    turns, count = draw(st.integers(1, 3)), draw(st.integers(4, 12))
    row = np.arange(turns * count)
    begins = np.repeat(np.cumsum(generator.exponential(0.4, count)), turns)
    columns = {
        "arrival_s": np.where(row % turns, np.nan, begins),
        "after": np.where(row % turns, row - 1, -1),
        "gap_s": generator.exponential(draw(st.sampled_from([0.0, 0.5])), len(row)),
        "session": (row // turns).astype(str),
        "input_tokens": generator.integers(10, 600, len(row)),
        "output_tokens": generator.integers(1, 60, len(row)),
    }
    if draw(st.booleans()):
        columns["cancel_after_s"] = np.where(generator.random(len(row)) < 0.1, 0.05, np.nan)
    scenario = Scenario(
        costs="roofline",
        num_gpu_blocks=draw(st.sampled_from([45, 90, 400])),
        max_num_seqs=draw(st.integers(1, 6)),
        shed_ttft_s=draw(st.sampled_from([None, None, 0.2])),
    )
    bounds = st.sampled_from([1, 6, 8, 10, 30, 100, 400, 2000])
    slo = ",".join(draw(st.sampled_from(TERMS)).format(draw(bounds)) for _ in range(draw(st.integers(1, 2))))
    ask = PlanOptions(
        slo=slo,
        kinds=("concurrency", "rate"),
        replicates=0,
        explain=False,
        most_requests=draw(st.sampled_from([40, 80])),
        max_preemption_rate=draw(st.sampled_from([0.0, 0.01, 10.0])),
        most_users=24,
    )
    return Trace("random", table(columns)), scenario, ask


def answers(result):
    """The answers with the figures at them; those of loads that fail are told of fewer requests."""
    return {kind: (answer.value, answer.at_limit, answer.at) for kind, answer in result.answers.items()}


def stopped_early_and_not(case):
    trace, scenario, ask = case
    asks = (ask.model_copy(update={"early_stops": on}) for on in (True, False))
    return (answers(plan(trace, scenario, each)) for each in asks)


@settings(max_examples=8)
@given(plans())
def test_early_stops_change_no_answer(case):
    early, whole = stopped_early_and_not(case)
    assert early == whole


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_early_stops_change_no_answer_of_300_plans(part):
    plans_that_agree = 0

    @seed(part)
    @settings(max_examples=50, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(plans())
    def agree(case):
        nonlocal plans_that_agree
        early, whole = stopped_early_and_not(case)
        assert early == whole
        plans_that_agree += 1

    agree()
    assert plans_that_agree >= 50


def outcomes_that_stand_for_others(number):
    """How often the room of a load that may stop early held for a larger pool, whose outcome is the same."""
    generator = np.random.default_rng(number)
    trace = drawn_trace(generator, number)
    first, *_, last = drawn_scenarios(generator)
    slo = str(generator.choice(TERMS)).format(generator.choice([1, 10, 100, 400]))
    held = 0
    for load in (
        Load("concurrency", int(generator.integers(1, 12))),
        Load("rate", float(generator.choice([1, 8]))),
    ):
        trials = []
        for scenario in (first, last):
            ask = PlanOptions(slo=slo, most_requests=80)
            try:
                question = CapacityQuestion(trace, scenario, ask, requests_per_s(trace), rooms=True)
            except BadInput:  # all at once
                return held
            long = load.kind == "rate"
            trials.append(question.serve_long(load) if long else question.judge(load, question.serve(load)))
        if trials[0].room is not None and trials[0].room.holds(last):
            held += 1
            assert trials[0] == trials[1]
    return held


def test_a_load_whose_room_holds_for_a_larger_pool_goes_the_same_way_there():
    assert sum(map(outcomes_that_stand_for_others, range(6))) >= 2


@pytest.mark.slow
def test_300_loads_whose_room_holds_for_a_larger_pool_go_the_same_way_there():
    assert sum(map(outcomes_that_stand_for_others, range(2000, 2300))) >= 150
