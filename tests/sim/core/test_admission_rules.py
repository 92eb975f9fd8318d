"""Admission that reserves, watermarks, load shedding and victims."""

import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.cache_policy import Admission, CachePolicy, ForCompletion, ForMaximum, ForPrompt, Lfu
from pagecast.sim.core.cache_policy import Victim as VictimName
from pagecast.sim.core.cache_rules import CacheRules, no_time
from pagecast.sim.core.check import check
from pagecast.sim.core.engines.nano_vllm.profile import NANO_VLLM
from pagecast.sim.core.engines.registry import PROFILES
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import Outcome
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.rules.shedding import PrefillNs
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.core.tier_spec import HostTierSpec

sys.path.insert(0, str(Path(__file__).parent))

from driver import Life, endless

SIZE = 4


def scheduler(
    blocks: int, *, policy: str = "fcfs", prefill_ns: PrefillNs = no_time, **chosen: Any
) -> Scheduler:
    rules = CacheRules(CachePolicy(**chosen), prefill_ns=prefill_ns)
    return Scheduler(Limits(blocks, SIZE, 8, 4096, policy=policy), rules.applied(VLLM))


def request(number: int, prompt: int, output: int, priority: int = 0, text: int | None = None) -> Request:
    keys = BlockKeys.of_spans(SIZE, [(number if text is None else text, 0, prompt)], (1000 + number, 0))
    return Request(str(number), keys, prompt, output, priority=priority, arrival_ns=number)


def run(s: Scheduler, most: int = 2000) -> int:
    """Serves all that was submitted. Returns the most requests that ran at once."""
    running = 0
    for _ in range(most):
        if not s.requests:
            return running
        plan = s.plan(0)
        assert plan is not None
        running = max(running, plan.running)
        s.commit(plan)
        check(s)
    raise AssertionError("requests wait for ever")


def outcome(admission: Admission) -> tuple[int, int]:
    """Most running at once, and preemptions, of eight requests of 8 + 24 tokens in 24 blocks."""
    s = scheduler(24, admission=admission)
    for number in range(8):
        s.submit(request(number, 8, 24))
    return run(s), s.preemptions


def test_more_reserved_is_fewer_at_once_and_fewer_preempted() -> None:
    assert outcome(ForPrompt()) == (8, 7)
    assert outcome(ForCompletion()) == (3, 0)
    assert outcome(ForMaximum(12)) == (4, 2)
    assert outcome(ForMaximum(40)) == (2, 0)


def test_what_a_load_holds_is_reserved_to_its_end() -> None:
    """Requests whose prefix is loaded from host memory are not preempted either."""
    limits = Limits(30, SIZE, 8, 4096, host=HostTierSpec(64))
    s = Scheduler(limits, CacheRules(CachePolicy(admission=ForCompletion())).applied(VLLM))
    under_way: list[int] = []

    def step() -> None:
        plan = s.plan(0)
        jobs = tuple(under_way)
        under_way.clear()
        if plan is None:
            s.transferred(jobs)
            return
        under_way.extend(transfer.job for transfer in (*plan.loads, *plan.stores))
        if plan.computes:
            s.commit(plan, Outcome(transferred=jobs))
        else:
            s.transferred(jobs)
        check(s)

    for turn in range(2):
        for number in range(6):
            s.submit(request(10 * turn + number, 16, 40, text=number))
        while s.requests:
            step()
        s.evict(30)
    assert s.offloading.loaded_blocks > 0
    assert s.preemptions == 0


def test_a_reservation_is_free_again_when_a_request_ends_early() -> None:
    s = scheduler(24, admission=ForMaximum(40))
    for number in range(4):
        s.submit(request(number, 8, 4))
    plan = s.plan(0)
    assert plan.running == 2
    while "0" in s.requests:
        s.commit(plan)
        plan = s.plan(0)
    assert s.requests["2"].state is State.PREFILL or plan.running == 2


def test_a_reservation_beyond_the_pool_is_served_alone() -> None:
    s = scheduler(6, admission=ForMaximum(4000))
    s.submit(request(0, 8, 4))
    s.submit(request(1, 8, 4))
    assert run(s) == 1


def test_watermarks_close_above_the_high_one_and_open_below_the_low_one() -> None:
    s = scheduler(20, watermarks=(0.3, 0.7))
    for number, output in enumerate((2, 12, 12, 12)):
        s.submit(request(number, 16, output))
    first = s.plan(0)
    assert first.running == 3
    s.commit(first)
    counts = []
    while s.requests:
        plan = s.plan(0)
        counts.append((plan.used_blocks, plan.running))
        s.commit(plan)
        check(s)
    # The third waits although the first has ended: 8 of 20 blocks are above the low mark.
    assert max(running for _, running in counts[2:]) <= 2
    assert s._mix.admission.closings >= 1


def test_an_eviction_storm_ends_with_watermarks() -> None:
    """Prompts that fit and outputs that do not: without marks most work is done twice."""
    figures = {}
    for name, rules in {"none": {}, "marks": {"watermarks": (0.5, 0.6)}}.items():
        s = scheduler(60, **rules)
        waiting = [request(number, 16, 64) for number in range(40)]
        for each in waiting:
            s.submit(each)
        steps = 0
        while s.requests:
            s.commit(s.plan(0))
            steps += 1
        lost = sum(each.recomputed_tokens for each in waiting)
        figures[name] = (s.preemptions, lost, s.memory.evicted_blocks, steps)
    assert figures["marks"][0] < figures["none"][0] / 3, figures
    assert figures["marks"][1] < figures["none"][1] / 2, figures


def preempted_first(victim: str) -> str:
    """Who is preempted first of three requests that grow out of the pool."""
    s = scheduler(16, victim=victim)
    rows = [(0, 8, 40, 0), (1, 20, 20, 2), (2, 12, 40, 1)]
    made = [request(*row) for row in rows]
    for each in made:
        s.submit(each)
    while not s.preemptions:
        s.commit(s.plan(0))
    return next(each.id for each in made if each.preemptions)


def test_victims() -> None:
    assert preempted_first("newest") == "2"
    assert preempted_first("least-progress") == "0"
    assert preempted_first("lowest-priority") == "1"


def test_of_equal_progress_the_newest_goes() -> None:
    s = scheduler(12, victim="least-progress")
    for number in range(3):
        s.submit(request(number, 8, 40))
    while not s.preemptions:
        s.commit(s.plan(0))
    assert s.requests["2"].preemptions == 1


def test_requests_are_shed_by_the_ttft_to_expect() -> None:
    s = scheduler(1000, shed_ttft_s=1e-7, prefill_ns=lambda tokens: float(tokens))
    kept = [s.submit(request(number, 40, 4)) for number in range(4)]
    assert kept == [True, True, False, False]
    refused = request(9, 40, 4)
    s.submit(refused)
    assert refused.reason == "predicted TTFT 1.2e-07 s is above 1e-07 s"
    run(s)
    assert s.submit(request(10, 40, 4))


def test_shedding_leaves_the_profiles_own_rejections() -> None:
    """Under TensorRT-LLM's rules a request that would never run is rejected whether load is shed or not."""
    rules = CacheRules(CachePolicy(shed_ttft_s=1000.0), prefill_ns=lambda tokens: float(tokens))
    s = Scheduler(Limits(10, SIZE, 8, 4096), rules.applied(PROFILES["trtllm-max-utilization"]))
    assert not s.submit(too_long := request(1, 30, 11))
    assert too_long.reason == "needs 11 blocks of 4 tokens; the pool has 10"
    assert s.submit(request(2, 30, 10))
    run(s)


@pytest.mark.parametrize("more", [{"swap_blocks": 8}, {"partial_reuse": "copy"}], ids=str)
def test_nano_vllm_says_what_it_does_not_have(more: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="nano-vllm has no swap space and no partial reuse"):
        Scheduler(Limits(10, SIZE, 8, 4096, **more), NANO_VLLM)


def test_cached_prompts_are_shed_later() -> None:
    s = scheduler(1000, shed_ttft_s=1e-7, prefill_ns=lambda tokens: float(tokens))
    for number in range(200):
        keys = BlockKeys.of_spans(SIZE, [(1, 0, 41)], (1000 + number, 0))
        assert s.submit(Request(f"w{number}", keys, 41, 1))
        s.commit(s.plan(0))
    accepted = 0
    while s.submit(request(300 + accepted, 41, 4)):
        accepted += 1
    assert accepted >= 10


def test_other_profiles_keep_their_own_rules() -> None:
    with pytest.raises(BadInput, match="choose vllm"):
        CacheRules(CachePolicy(watermarks=(0.5, 0.9))).applied(NANO_VLLM)
    assert CacheRules(CachePolicy(eviction=Lfu())).applied(NANO_VLLM).name == "nano-vllm"


@settings(max_examples=40, deadline=None)
@given(
    data=st.binary(min_size=300, max_size=900),
    admission=st.sampled_from([ForPrompt(), ForCompletion(), ForMaximum(3), ForMaximum(9)]),
    victim=st.sampled_from(get_args(VictimName)),
    marks=st.sampled_from([None, (0.3, 0.6), (0.8, 0.9)]),
)
def test_no_rule_breaks_an_invariant_or_waits_for_ever(data, admission, victim, marks) -> None:
    rules = CachePolicy(admission=admission, victim=victim, watermarks=marks, shed_ttft_s=1.0)
    life = Life(endless(data), policy=rules)
    while life.operations < len(data) // 4:
        life.operate()
    life.drain()
