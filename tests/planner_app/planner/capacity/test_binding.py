"""The sentence on the limit that binds: the distance from the level, and which cures help."""

from types import SimpleNamespace

import pytest
from pagecast.planner_app.planner.capacity import binding as module
from pagecast.planner_app.planner.capacity.admitted import question_of
from pagecast.planner_app.planner.capacity.binding import LIMITS, Binding, LimitTest, _choose
from pagecast.planner_app.planner.capacity.bisection import CapacityQuestion
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.users import Load
from pagecast.planner_app.planner.execution.executor import Serial
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

FULL = {"batch": 0.0, "budget": 0.0, "kv": 0.0, "kv_used": 0.0}


def binding(limit, without, *excesses, term="ttft_p99<2s", held=False):
    helped = tuple(
        LimitTest(name, value <= 1, term, value) for name, value in zip(LIMITS, excesses, strict=True)
    )
    return Binding(limit, 10.0, LimitTest("", held, term, without), helped, FULL)


def test_what_would_do_comes_first_then_what_would_not():
    assert binding("batch size", 2.2, 2.2, 0.12, 2.3, 0.98).why == (
        "at 25% more load ttft_p99 is 2.2 x the bound; twice max_num_seqs would be enough (0.12 x), "
        "and so would steps twice as fast (0.98 x), but not twice the KV blocks (2.2 x) or twice "
        "max_num_batched_tokens (2.3 x)"
    )


def test_where_nothing_does_the_nearest_is_named():
    text = binding("KV blocks", 38.4, 11, 38.4, 38.4, 38.4, term="preemptions<=0.01").why
    assert text.startswith("at 25% more load preemptions are 38 x the bound; ")
    assert "; twice the KV blocks would help most (11 x), not twice max_num_seqs (38 x), " in text


def test_speed_that_is_not_the_nearest_binds_only_for_want_of_room_that_helps():
    text = binding("compute", 4.0, 3.9, 4.0, 4.0, 3.95).why
    assert "more room alone does not help: twice the KV blocks (3.9 x), " in text


def test_kv_blocks_bind_and_a_batch_size_binds():
    assert binding("KV blocks", 2.0, 0.5, 2, 2, 2).sentence.startswith("KV blocks bind: at 25% more load ")
    assert binding("batch size", 2.0, 2, 0.5, 2, 2).sentence.startswith("batch size binds: at 25% more load ")


def test_a_term_within_its_bound_binds_nothing():
    bound = binding("nothing", 0.64, 0.5, 0.6, 0.64, 0.3, held=True)
    assert bound.sentence == "nothing binds there: at 25% more load ttft_p99 is 0.64 x the bound, within it"
    assert _choose(bound.without, bound.helped) == "nothing"


@pytest.mark.parametrize(
    ("term", "words"),
    [
        ("goodput(ttft<2s)>0.99", "the share of requests that miss goodput(ttft<2s) is 4 x"),
        ("kept_up>=0.95", "the share of offered requests that do not end in time is 4 x"),
        ("tpot_p95<50ms", "tpot_p95 is 4 x"),
    ],
)
def test_the_term_that_breaks_is_said_in_words(term, words):
    text = binding("KV blocks", 4.0, 0.5, 4, 4, 4, term=term).why
    assert f"at 25% more load {words} the bound" in text


@pytest.mark.parametrize("profile", ["vllm", "sglang", "nano-vllm"])
def test_the_share_of_kv_in_use_is_of_what_sequences_may_hold(profile):
    """Gemma 3's windows make a block of a sequence take several of the engine's under some rules."""
    scenario = Scenario(
        model="google/gemma-3-27b-it",
        engine=profile,
        costs="roofline",
        block_size=16,
        num_gpu_blocks=8000,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        max_model_len=131_072,
    )
    question = CapacityQuestion(read("chat", limit=150), scenario, PlanOptions(slo="queue_p99<100ms"))
    tested = module.binding(question, Load("concurrency", 48), Serial())
    replayed = question.serve(Load("concurrency", 48), whole=True).result
    peak = replayed.steps["used_blocks"].max() / replayed.pool_blocks
    assert tested.full["kv"] > 0.5
    assert 0.85 * peak < tested.full["kv_used"] <= peak <= 1


def at_16_users(slo):
    """What binds with 16 users and room for 4 of them at once, whatever broke just above the answer."""
    scenario = Scenario(max_num_seqs=4, costs="roofline")
    question = CapacityQuestion(read("chat", limit=120), scenario, PlanOptions(slo=slo, most_requests=120))
    return module.binding(question, Load("concurrency", 16), Serial())


def test_whatever_term_breaks_at_more_load_is_named():
    """Every term of the SLO is judged there, also where another one broke just above the answer."""
    for slo in ("ttft_p50<1ms,tpot_p99<1min", "tpot_p99<1min,ttft_p50<1ms"):
        found = at_16_users(slo)
        assert found.without.term == "ttft_p50<1ms"
        assert found.limit != "nothing"
        assert "at 25% more load ttft_p50 is " in found.sentence
    assert at_16_users("ttft_p50<5min,tpot_p99<1min").limit == "nothing"


def test_a_cure_that_breaks_another_term_says_so():
    """Room for more requests at once makes the queue shorter, and each of their steps longer."""
    found = at_16_users("ttft_p50<2s,tpot_p50<5.8ms")
    assert found.limit == "batch size"
    assert "; twice max_num_seqs would be enough (0.65 x)" in found.sentence
    assert found.sentence.endswith("; with twice max_num_seqs tpot_p50 is 1 x the bound")
    assert found.to_dict()["with_twice"]["batch size"]["breaks"] == "tpot_p50<5.8ms"
    assert found.to_dict()["with_twice"]["compute"]["breaks"] is None


def test_infinite_latencies_are_told_apart_by_the_share_that_is_not_served():
    """More room does not serve 99%, but more than before; so it is named, and the sentence counts them."""
    trace = read("chat", limit=300)
    trace.requests["arrival_s"] *= 1.5
    trace.requests["cancel_after_s"] = 8.0
    scenario = Scenario(costs="roofline", num_gpu_blocks=600)
    question = CapacityQuestion(trace, scenario, PlanOptions(slo="ttft_p99<2s"), rate=1.0)
    found = module.binding(question, Load("rate", 4.0), Serial())
    assert "at 25% more load ttft_p99 is infinite, and " in found.why
    assert "% of the requests are not served" in found.why
    assert "% not served)" in found.why
    best = min(found.helped, key=lambda each: each.unserved)
    assert found.limit == best.limit
    assert best.unserved < found.without.unserved


def test_a_replay_that_stops_for_one_term_does_not_lose_another():
    ask = PlanOptions(slo="ttft_p99<60s,tpot_p95<5ms", most_requests=120)
    question = CapacityQuestion(read("chat", limit=120), Scenario(costs="roofline", max_num_seqs=16), ask)
    load = Load("concurrency", 16.0)
    stopped = module.press(question, load, "KV blocks", frozenset({"tpot_p95<5ms"}))
    assert stopped.stopped
    assert not stopped.holds(frozenset({"tpot_p95<5ms"}))
    assert "ttft_p99<60s" not in {term.text for term in stopped.terms if not term.holds}


@pytest.mark.parametrize(("least", "part"), [(65, 0), (64, 2), (33, 2), (32, 4), (1, 4)])
def test_a_quarter_of_a_setting_is_tried_where_half_is_enough(least, part, monkeypatch):
    asked = []

    def judge(self, load, replay):
        asked.append(self.scenario.max_num_seqs)
        return SimpleNamespace(holds=asked[-1] >= least)

    monkeypatch.setattr(CapacityQuestion, "serve", lambda self, load: None)
    monkeypatch.setattr(CapacityQuestion, "judge", judge)
    question = question_of(read("chat", limit=5), Scenario(max_num_seqs=128), PlanOptions(slo="ttft_p99<9s"))
    assert module.least_part(question, Load("rate", 1.0), "max_num_seqs") == part
    assert asked == ([64] if least > 64 else [64, 32])


def test_twice_the_blocks_is_not_replayed_where_nobody_asks_again_for_what_was_evicted():
    scenario = Scenario(costs="roofline", num_gpu_blocks=9000)
    ask = PlanOptions(slo="ttft_p50<1ms", most_requests=600)
    question, load = CapacityQuestion(read("chat", limit=600), scenario, ask), Load("concurrency", 20)
    as_it_is = module.press(question, load)
    assert question.serve(load, whole=True).result.summary["evicted_blocks"] > 0
    assert module.KV_BLOCKS not in as_it_is.used_up
    assert module.press(question, load, module.KV_BLOCKS).terms == as_it_is.terms
