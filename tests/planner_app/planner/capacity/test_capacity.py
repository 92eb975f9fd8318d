"""Searches for the largest load: against functions whose answer is known, and queues solved on paper."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.planner_app.cli import run
from pagecast.planner_app.planner.capacity.bisection import (
    GROWTH,
    Ask,
    CapacityQuestion,
    Draws,
    interval,
    width_error,
)
from pagecast.planner_app.planner.capacity.largest import largest, settle
from pagecast.planner_app.planner.capacity.lasting import Lasting, serve_long
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.planning import plan
from pagecast.planner_app.planner.capacity.users import (
    Load,
    LoadSize,
    at_rate,
    lasting_at,
    requests_per_s,
    requests_per_s_of_all,
    serve,
)
from pagecast.planner_app.planner.slo import Slo
from pagecast.sim.costs.decode_line import FEMTO, DecodeLine
from pagecast.sim.replay.resample import resample
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import scale
from pagecast.traces.read import read
from pagecast.traces.schema import Trace, table

SERVICE_S = 0.1


class Constant:
    """Steps that take as long whatever they compute; the host takes no time."""

    name = "constant"

    def __init__(self, step_s=SERVICE_S):
        self.step_ns = round(step_s * 1e9)

    def device_ns(self, batch):
        return self.step_ns

    def launch_ns(self, batch):
        return 0

    def decode_line(self, n):
        return DecodeLine(n, self.step_ns * FEMTO, 0, 0)

    def host_ns(self, requests):
        return 0

    def warm_ns(self, after):
        return 0

    def shared_ns(self, tokens, requests):
        return 0

    def arrival_ns(self, input_tokens):
        return 0

    def expected_error(self):
        return "None: these are made up."

    def outside(self, *largest):
        return None


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 90), st.integers(0, 500))
def test_the_last_step_that_holds_is_found_from_anywhere(high, start, step, last):
    answer = largest(lambda at: at <= last, (1, high), start=start, step=step)
    assert answer.value == (min(last, high) if last else None)
    assert answer.at_limit == (last >= high)
    assert answer.doubtful is None


def test_an_unlucky_step_does_not_stand_for_all_above_it():
    answer = largest(lambda at: at <= 40 and at != 20, (1, 100), start=19, step=1)
    assert answer.value == 40
    assert answer.doubtful == (20, 40)


def test_a_search_takes_few_evaluations():
    asked = []
    largest(lambda at: asked.append(at) or at <= 777, (1, 8192), start=300, step=75)
    assert len(asked) == len(set(asked)) <= 16


def test_a_search_that_knows_how_far_takes_fewer():
    asked = []
    answer = largest(
        lambda at: asked.append(at) or at <= 313,
        (1, 8192),
        start=301,
        step=lambda at: abs(314 - at),
        resolution=6,
        verify=False,
        guess=lambda good, bad: 313,
    )
    assert asked == [301, 314, 308]
    assert answer.value == 308


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 90), st.integers(0, 500), st.integers(0, 9))
def test_a_wrong_distance_misses_no_answer(high, start, resolution, last, distance):
    answer = largest(
        lambda at: at <= last, (1, high), start=start, step=lambda _: distance, resolution=resolution
    )
    assert (answer.value or 0) <= min(last, high) < (answer.value or 0) + resolution + (not answer.value)


def test_the_interval_is_students_on_logarithms_and_holds_the_forecast():
    draws = np.exp(np.random.default_rng(0).normal(3.0, 0.1, 4000))
    low, high = interval(draws.tolist(), float(np.exp(3.0)))
    np.testing.assert_allclose((low, high), np.exp(3.0 + 1.645 * 0.1 * np.array([-1, 1])), rtol=0.01)
    assert interval([5.0, 5.0, 5.0], 7.0) == pytest.approx((5.0, 7.0))
    assert interval([5.0, 0.0, 5.0], 5.0)[0] == 0.0
    assert interval([5.0, 5.0], 5.0, [4.0, 6.0]) == pytest.approx((4.0, 6.0))


def test_the_spread_of_five_draws_may_be_off_by_more_than_twice():
    spreads = np.random.default_rng(0).normal(size=(20_000, 5)).std(axis=1, ddof=1)
    assert width_error(5) == pytest.approx(1 / np.quantile(spreads, 0.05), rel=0.02)


def poisson(count, rate, seed=0):
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    columns = {"arrival_s": np.cumsum(gaps), "input_tokens": np.full(count, 8)}
    return Trace("poisson", table({**columns, "output_tokens": np.ones(count)}))


def single_server(trace, slo, workload=resample, **options):
    scenario = Scenario(num_gpu_blocks=1000, max_num_seqs=1, async_scheduling=False)
    return plan(
        trace,
        scenario,
        PlanOptions(
            slo=slo, kinds=("rate",), explain=False, **{"most_requests": 3000, "replicates": 5, **options}
        ),
        draws=Draws(Constant(), False, workload),
    ).answers["rate"]


def test_the_rate_of_a_single_server_is_pollaczek_khinchines():
    """M/D/1: the mean wait is rho D / (2 (1 - rho)), so rho = 2 w / (D + 2 w) keeps it at w."""
    mean_wait_s = 0.05
    answer = single_server(poisson(1500, rate=4.0), f"queue_mean<{mean_wait_s}s")
    rho = 2 * mean_wait_s / (SERVICE_S + 2 * mean_wait_s)
    assert answer.low <= rho / SERVICE_S <= answer.high
    assert answer.high < 1.35 * answer.low
    assert answer.value == pytest.approx(rho / SERVICE_S, rel=0.1)


def as_it_is(trace, seed):
    return trace


def three_times_as_fast(trace, seed):
    """Every other draw is the same trace at three times its rate."""
    return scale(trace, 3.0) if seed % 2 else trace


def test_an_interval_of_rates_does_not_depend_on_the_rates_of_the_draws_themselves():
    """A draw's answer is in requests per second, so that a trace that is scaled has the same."""
    trace = poisson(300, rate=4.0)
    options = {"most_requests": 300, "replicates": 6}
    plain, varied = (
        single_server(trace, "queue_mean<50ms", workload=workload, **options)
        for workload in (as_it_is, three_times_as_fast)
    )
    assert (plain.low, plain.value, plain.high) == pytest.approx((plain.value,) * 3)
    assert varied.value == plain.value
    # Answers are multiples of a draw's own rate, two steps of 1% apart: the interval is about as wide.
    assert 0.95 * plain.value < varied.low <= plain.value <= varied.high < 1.05 * plain.value


def test_every_draw_of_a_plan_accepts_draft_tokens_by_chances_of_its_own():
    scenario = Scenario.make({"speculative_config": "eagle:3:0.6"})
    question = CapacityQuestion(
        read("chat", limit=60),
        scenario,
        PlanOptions(slo="tpot_p95<20ms", most_users=2),
        draws=Draws(draw_costs=False),
    )
    spreads = [question.search(Ask("concurrency", draw)) for draw in (0, 0, 1, 2)]
    rates = [search.tried[0].output_tokens_per_s for search in spreads]
    assert rates[0] == rates[1]
    assert len(set(rates)) == 3


@pytest.mark.slow
def test_a_percentile_of_a_single_servers_wait_is_crommelins():
    """M/D/1: the part that waits no longer than one service is (1 - rho) e^rho (Crommelin 1932)."""
    rho = np.linspace(0.01, 0.99, 9801)
    wanted = float(rho[np.argmin(np.abs((1 - rho) * np.exp(rho) - 0.9))]) / SERVICE_S
    answer = single_server(poisson(1500, rate=4.0), "queue_p90<=100ms")
    assert answer.low <= wanted <= answer.high
    assert answer.high < 1.35 * answer.low


def equal(count, prompt, output):
    columns = {"input_tokens": np.full(count, prompt), "output_tokens": np.full(count, output)}
    return Trace("equal", table({**columns, "arrival_s": np.zeros(count)}))


@pytest.mark.parametrize("sequences", [1, 7, 23])
def test_a_pool_that_fits_so_many_sequences_admits_so_many(sequences):
    """Prompts of 160 tokens and answers of 97 end with 16 blocks; one sequence more waits or preempts."""
    scenario = Scenario(num_gpu_blocks=16 * sequences, costs="roofline")
    result = plan(
        equal(100, 160, 97),
        scenario,
        PlanOptions(slo="queue_p99<100ms", kinds=("concurrency",), replicates=5),
    )
    answer = result.concurrency
    assert (answer.value, answer.low, answer.high) == pytest.approx((sequences,) * 3)
    assert answer.binding.limit == "KV blocks"


def test_preemptions_are_held_to_their_rate():
    scenario = Scenario(num_gpu_blocks=16 * 7, costs="roofline")
    level = Slo.parse("e2e_p99<60min")
    users = [
        plan(
            equal(100, 160, 97),
            scenario,
            PlanOptions(
                slo=level.text,
                kinds=("concurrency",),
                replicates=0,
                explain=False,
                max_preemption_rate=rate,
                most_users=64,
            ),
        ).concurrency
        for rate in (0.0, 10.0)
    ]
    assert users[0].value == 7
    assert [term.text for term in users[0].beyond.broken] == ["preemptions<=0"]
    assert (users[1].value, users[1].at_limit) == (64, True)
    assert users[1].sentence == "the SLO still holds at 64 users, the most that was tried"


def test_the_batch_size_binds_where_requests_wait_for_a_place():
    scenario = Scenario(num_gpu_blocks=10_000, max_num_seqs=12, costs="roofline")
    result = plan(
        equal(100, 160, 97),
        scenario,
        PlanOptions(slo="queue_p99<100ms", kinds=("concurrency",), replicates=0),
    )
    assert result.concurrency.value == 12
    assert result.concurrency.binding.limit == "batch size"
    assert result.concurrency.binding.full["batch"] > 0.9


def test_compute_binds_where_no_room_helps():
    """One prompt a step: neither a larger batch nor a larger budget alone lets two in."""
    scenario = Scenario(num_gpu_blocks=1000, max_num_seqs=1, max_num_batched_tokens=8, async_scheduling=False)
    result = plan(
        poisson(1000, 2.0),
        scenario,
        PlanOptions(slo="queue_p99<1s", kinds=("rate",), replicates=0, most_requests=2000),
        draws=Draws(costs=Constant()),
    )
    assert 5 < result.answers["rate"].value < 10
    assert result.answers["rate"].binding.limit == "compute"


@pytest.mark.slow
def test_a_load_that_can_not_be_kept_up_with_is_none_however_short_the_trace():
    """200 requests never wait an hour, whatever their rate, and still a queue would grow."""
    trace = poisson(200, 4.0)
    assert requests_per_s(trace) == pytest.approx(4.0, rel=0.2)
    answer = single_server(trace, "queue_max<60min")
    assert 8 < answer.value < 1.06 / SERVICE_S


def test_sessions_that_serving_makes_longer_are_kept_up_with():
    """Turns of 5 s with pauses of 2 s: sessions of 26 s, not of 6, on a server that is never full."""
    sessions, turns = 20, 4
    row = np.arange(sessions * turns)
    turn = row % turns
    trace = Trace(
        "sessions",
        table(
            {
                "arrival_s": np.where(turn == 0, row / turns, np.nan),
                "after": np.where(turn == 0, -1, row - 1),
                "gap_s": np.where(turn == 0, 0.0, 2.0),
                "session": (row // turns).astype(str),
                "input_tokens": np.full(len(row), 8),
                "output_tokens": np.full(len(row), 50),
            }
        ),
    )
    scenario = Scenario(num_gpu_blocks=10_000, async_scheduling=False)
    for rate in (1.0, 4.0):  # the trace as it is starts sessions for 20 s, and for 5 s
        served = serve(trace, scenario, Load("rate", rate), costs=Constant())
        assert served.result.requests["queue_s"].max() < 2 * SERVICE_S
        assert served.kept_up > 0.95


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 4), st.integers(-40, 40))
def test_a_rate_is_settled_whatever_is_guessed(start, last, resolution, off):
    answer = settle(
        lambda at: at <= last, lambda at: last + off, (1, 200), start=start, resolution=resolution
    )
    if not last:
        assert answer.value is None
    else:
        assert answer.value is not None
        assert last - resolution < answer.value <= last


def test_a_good_guess_settles_a_rate_in_four_loads():
    asked = []
    settle(lambda at: asked.append(at) or at <= 63, lambda at: 63, (-900, 900), start=69, resolution=2)
    assert asked == [69, 63, 65]


def test_a_short_load_hides_what_a_long_one_shows():
    """Twelve places of 9.8 s each serve 1.22 requests per second; of 80 at 1.32 none waits for long."""
    trace = equal_at(80, 1.0)
    scenario = Scenario(num_gpu_blocks=10_000, max_num_seqs=12, async_scheduling=False)
    capacity = 12 / (98 * SERVICE_S)
    result = plan(
        trace,
        scenario,
        PlanOptions(slo="ttft_p99<10s", kinds=("rate",), replicates=0, explain=False, most_requests=160),
        draws=Draws(costs=Constant()),
    ).answers["rate"]
    assert 0.95 * capacity < result.value <= capacity
    short = serve(trace, scenario, Load("rate", 1.08 * capacity), costs=Constant(), size=LoadSize(160))
    assert short.measured["ttft_s"].quantile(0.99) < 10
    work = Lasting.of(trace, capacity, 160)
    for times, holds in ((0.97, True), (1.08, False)):
        lasted = serve_long(work, scenario, Load("rate", times * capacity), costs=Constant())
        assert lasted.holds(GROWTH) is holds


def test_a_load_that_runs_away_is_given_up():
    scenario = Scenario(num_gpu_blocks=10_000, max_num_seqs=12, async_scheduling=False)
    load = Lasting.of(equal_at(480, 1.0), 3.0, 1600)
    lasted = serve_long(load, scenario, Load("rate", 3.0), costs=Constant())
    assert lasted.served is None and not lasted.holds(GROWTH)
    assert lasted.most_ended_per_s == pytest.approx(12 / (98 * SERVICE_S), rel=0.1)


def equal_at(count, rate):
    """Answers of 98 tokens, evenly spread."""
    columns = {"input_tokens": np.full(count, 8), "output_tokens": np.full(count, 98)}
    return Trace("even", table({**columns, "arrival_s": np.arange(count) / rate}))


def test_think_time_lets_more_users_in():
    scenario = Scenario(num_gpu_blocks=10_000, max_num_seqs=12, costs="roofline")
    result = plan(
        equal(200, 160, 97),
        scenario,
        PlanOptions(slo="queue_p90<100ms", think_time=1.0, replicates=0, explain=False),
    )
    assert "rate" not in result.answers
    assert "start at once" in result.notes[0]
    assert result.answers["users"].value > 1.3 * result.concurrency.value


def test_a_trace_whose_sessions_pause_lasts_at_the_rate_that_is_asked_for():
    sessions = range(0, 60, 3)
    rows = {
        "arrival_s": [row / 3 if row in sessions else np.nan for row in range(60)],
        "input_tokens": [10] * 60,
        "output_tokens": [5] * 60,
        "session": [str(row // 3) for row in range(60)],
        "after": [-1 if row in sessions else row - 1 for row in range(60)],
        "gap_s": [np.nan if row in sessions else 20.0 for row in range(60)],
    }
    trace = Trace("pauses", table(rows))
    assert requests_per_s_of_all(at_rate(trace, 30.0)) < 2
    lasting = lasting_at(trace, 30.0, most_requests=40_000)
    assert requests_per_s_of_all(lasting) == pytest.approx(30, rel=0.15)


@pytest.mark.parametrize("fields", [{"rollout_at_s": 5.0}, {"isolation": "tenant", "isolation_price": True}])
def test_plan_leaves_out_the_figures_that_compare_two_replays(fields, tmp_path, capsys):
    """Their second replay found the clients of the first one, who had left."""
    scenario = tmp_path / "s.yaml"
    scenario.write_text(
        json.dumps({"costs": "roofline", "num_gpu_blocks": 2000, "max_num_seqs": 16, **fields})
    )
    options = ["--scenario", str(scenario), "--limit", "40", "--slo", "ttft_p99<1s", "--most-requests", "100"]
    assert run(["plan", "chat", *options, "--replicates", "0", "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rate"]["value"] > 0


def test_a_lucky_step_between_ones_that_fail_is_no_answer() -> None:
    """Preemptions wander about their bound: of 1,024 users 705 to 815 and 885 on break it, 816 to 884 not."""
    asked: list[int] = []

    def holds(at: int) -> bool:
        asked.append(at)
        return at < 705 or 860 < at < 885

    def tell(prudent: bool) -> int | None:
        return largest(
            holds, (1, 1024), start=701, step=175, resolution=14, verify=False, prudent=prudent
        ).value

    assert tell(prudent=False) == 876
    assert 690 < (tell(prudent=True) or 0) < 705
