"""Numbers of users with load shedding: those who are rejected back off, and the load settles."""

from functools import partial

import numpy as np
import pytest
from pagecast.planner_app.planner.capacity.bisection import CapacityQuestion
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.planning import plan
from pagecast.planner_app.planner.capacity.users import Load, LoadSize, enough_for, serve
from pagecast.planner_app.planner.served import RequestCounts
from pagecast.planner_app.planner.slo import Slo
from pagecast.planner_app.planner.tune.setting import Tuning
from pagecast.sim.replay import replay
from pagecast.sim.replay.clients import ClosedLoop
from pagecast.sim.replica.arrivals import NS
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace, table

SLO = Slo.parse("ttft_p99<2s")
SCENARIO = Scenario(num_gpu_blocks=2000, max_num_seqs=16, costs="roofline")
COUNT = 400


def of_lengths(**columns):
    """Requests of different lengths."""
    lengths = np.random.default_rng(1).integers(50, 400, COUNT)
    base = {"arrival_s": np.arange(COUNT) * 0.1, "input_tokens": 2 * lengths, "output_tokens": lengths}
    return Trace("lengths", table({**base, **columns}))


def shedding(seconds):
    return SCENARIO.changed(shed_ttft_s=seconds)


def planned(scenario, kind="concurrency", **options):
    options = {"most_requests": COUNT, "replicates": 0, "explain": False, "most_users": 64} | options
    return plan(of_lengths(), scenario, PlanOptions(slo=SLO.text, kinds=[kind], **options))


class Ramp(ClosedLoop):
    """Users who begin one after another."""

    def __init__(self, trace, users, over_s=20.0):
        super().__init__(trace, users)
        starts = np.linspace(0, over_s, len(self._times))
        self._times = [round(start * NS) for start in starts]
        self._look_ahead()


def holds_for_long(users, scenario):
    """Whether a number of users keeps the SLO on a load five times as long, to which they come one by one."""
    work = enough_for(of_lengths(), users, LoadSize(COUNT), 5)
    requests = replay(work, scenario, arrivals=partial(Ramp, users=users)).requests
    arrival = requests["arrival_s"]
    return SLO.verdict(requests[arrival.between(0.3 * arrival.max(), 0.9 * arrival.max())]).holds


@pytest.mark.parametrize("limit_s", [0.3, 1.0])
def test_the_number_of_users_with_shedding_is_where_the_slo_breaks(limit_s):
    """It was a few users: whoever was rejected at the start used the whole trace up at once."""
    scenario = shedding(limit_s)
    result = planned(scenario)
    answer = result.concurrency
    assert answer.value > 10
    assert answer.at.holds
    assert not answer.beyond.holds
    assert answer.beyond.amount == answer.value + 1
    assert 0 < answer.beyond.counts.unserved < answer.beyond.counts.requests / 2
    assert holds_for_long(int(0.95 * answer.value), scenario)
    assert not holds_for_long(int(1.1 * answer.value) + 1, scenario)
    assert not any("lower bound" in note for note in result.notes)


def test_a_limit_that_nobody_reaches_changes_no_number_of_users():
    for kind, think_time in (("concurrency", None), ("users", 2.0)):
        plain, shed = (
            planned(scenario, kind, think_time=think_time).answers[kind]
            for scenario in (SCENARIO, shedding(1e4))
        )
        assert plain == shed


def test_a_load_that_is_rejected_for_the_most_part_is_measured_once_it_has_settled():
    users = 60
    served = serve(of_lengths(), shedding(0.3), Load("concurrency", users), size=LoadSize(COUNT))
    counts = RequestCounts.of(served.measured)
    assert served.result.requests["arrival_s"].max() > served.from_s > 1.0
    assert counts.unserved > 0.5 * counts.requests
    assert counts.completed > 16


def test_a_load_of_which_nothing_is_served_is_measured_as_a_whole():
    served = serve(of_lengths(), shedding(1e-6), Load("concurrency", 4), size=LoadSize(COUNT))
    assert RequestCounts.of(served.measured).unserved == len(served.result.requests) >= COUNT
    assert served.to_s > served.from_s == 0.0


def test_users_of_sessions_go_on_with_their_next_turns():
    turn = np.arange(COUNT) % 4
    after = np.where(turn, np.arange(COUNT) - 1, -1)
    trace = of_lengths(after=after, session=[f"s{row // 4}" for row in range(COUNT)])
    question = CapacityQuestion(trace, shedding(0.3), PlanOptions(slo=SLO.text, most_requests=COUNT))
    load = Load("concurrency", 24)
    trial = question.judge(load, question.serve(load))
    assert not trial.holds
    assert 0 < trial.counts.unserved < trial.counts.requests


def test_tune_finds_the_users_that_a_setting_admits_with_shedding():
    scenario = shedding(1.0)
    tuned = Tuning(of_lengths(), scenario, "block_size", SLO).concurrency(scenario)
    admitted = tuned["admissible_concurrency"]
    assert not tuned["admissible_at_limit"]
    assert holds_for_long(int(0.95 * admitted), scenario)
    assert not holds_for_long(int(1.1 * admitted) + 1, scenario)
