"""SGLang's rules, one by one: what a user of SGLang knows of its scheduler and its radix tree."""

import dataclasses

import numpy as np
import pytest
from pagecast.planner_app.dashboard.blocks.log import record
from pagecast.sim.core.check import check
from pagecast.sim.core.engines.sglang.new_token_ratio import NewTokenRatio
from pagecast.sim.core.engines.sglang.profile import SGLANG
from pagecast.sim.core.engines.sglang.settings import SglangSettings
from pagecast.sim.core.engines.sglang.tree import RadixTree, leaf_order
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import Scope
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import Outcome
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read


def request(id: str, prompt: int, output: int, *, text: int | None = None, size: int = 1, salt: str = ""):
    """A request whose prompt is the beginning of a text."""
    text = int(id) if text is None else text
    keys = BlockKeys.of_spans(size, ((text, 0, prompt),), (1000 + int(id), 0), Scope(salt=salt))
    return Request(id, keys, prompt, output)


def scheduler(blocks: int = 1000, *, chunk: int = 64, settings: SglangSettings | None = None, **limits):
    given = {"block_size": 1, "max_num_seqs": 8, "max_num_batched_tokens": chunk, **limits}
    return Scheduler(Limits(blocks, engine=settings or SglangSettings(), **given), SGLANG)


def turn(s: Scheduler) -> tuple[dict[str, int], list[str]]:
    """One turn: the tokens of each prompt, and who decodes."""
    plan = s.plan(0)
    assert plan is not None
    work = {chunk.request.id: chunk.tokens for chunk in plan.chunks}, [each.id for each in plan.decodes]
    s.commit(plan)
    check(s)
    return work


def test_prompts_pause_decodes():
    s = scheduler()
    s.submit(request("1", 10, 5))
    assert turn(s) == ({"1": 10}, [])
    assert turn(s) == ({}, ["1"])
    s.submit(request("2", 10, 5))
    assert turn(s) == ({"2": 10}, [])
    assert turn(s) == ({}, ["1", "2"])


def test_with_mixed_chunks_decodes_join_the_prompts():
    s = scheduler(settings=SglangSettings(mixed_chunk=True))
    s.submit(request("1", 10, 5))
    turn(s)
    s.submit(request("2", 10, 5))
    assert turn(s) == ({"2": 10}, ["1"])
    assert sorted(turn(s)[1]) == ["1", "2"]


def test_the_ratio_stays_while_a_result_is_to_be_processed():
    """SGLang is idle, and begins with its first ratio again, once it has processed the surplus decode too."""
    s = scheduler(pipeline_depth=1)
    s.submit(request("1", 4, 5))
    prompt, decode = s.plan(0), s.plan(0)
    s.commit(prompt, Outcome(stopped=("1",)))
    lowered = s._mix.ratio.current
    assert lowered < s._mix.ratio.first
    assert s.plan(0) is None, "the surplus decode is in flight"
    assert s._mix.ratio.current == lowered
    s.commit(decode)
    assert s.plan(0) is None
    assert s._mix.ratio.current == s._mix.ratio.first


def test_a_chunk_ends_on_a_page():
    s = scheduler(blocks=100, chunk=10, block_size=4)
    s.submit(request("1", 30, 2, size=4))
    assert [turn(s)[0]["1"] for _ in range(3)] == [8, 10, 10]


def test_without_chunks_the_first_prompt_may_exceed_the_batch():
    s = scheduler(settings=SglangSettings(chunked_prefill=False, max_prefill_tokens=20))
    for id in ("1", "2", "3"):
        s.submit(request(id, 30, 2))
    assert [turn(s) for _ in range(3)] == [({"1": 30}, []), ({"2": 30}, []), ({"3": 30}, [])]


def test_the_whole_output_is_reserved_at_admission():
    s = scheduler(blocks=100)
    s.submit(request("1", 10, 30))
    s.submit(request("2", 10, 50))  # 10 + 30 + 1 are reserved, and 10 + 50 + 1 must be less than what is left
    assert turn(s) == ({"1": 10}, [])
    fits = scheduler(blocks=103)
    fits.submit(request("1", 10, 30))
    fits.submit(request("2", 10, 50))
    assert turn(fits) == ({"1": 10, "2": 10}, [])


def test_nobody_is_looked_at_until_somebody_leaves():
    s = scheduler(blocks=100)
    s.submit(request("1", 10, 30))
    s.submit(request("2", 10, 80))
    turn(s)
    s.submit(request("3", 1, 1))
    assert all(turn(s) == ({}, ["1"]) for _ in range(29))
    assert turn(s) == ({"2": 10, "3": 1}, [])


def overloaded(**limits) -> Scheduler:
    """Three requests that reserve far too little."""
    s = scheduler(blocks=60, settings=SglangSettings(schedule_conservativeness=0.01), **limits)
    for id, prompt in (("1", 5), ("2", 10), ("3", 8)):
        s.submit(request(id, prompt, 30))
        turn(s)
    return s


def test_of_requests_with_equally_few_tokens_the_longest_prompt_is_retracted_and_waits_at_the_end():
    s = overloaded()
    s.submit(request("9", 40, 10))
    while not s.preemptions:
        turn(s)
    assert [each.id for each in s.queue] == ["9", "2"]
    retracted = s.requests["2"]
    assert retracted.state is State.WAITING
    assert retracted.known_tokens > retracted.prompt_tokens  # what it has generated is kept, its KV is not
    assert not s.memory.holds(retracted)
    while s.requests:
        turn(s)


def test_a_retraction_raises_the_new_token_ratio_and_decodes_lower_it():
    s = overloaded()
    ratio = s._mix.ratio
    before = ratio.current
    turn(s)
    assert ratio.current < before
    while not s.preemptions:
        turn(s)
    assert ratio.current > before


def test_the_ratio_has_the_documented_bounds():
    ratio = NewTokenRatio(1.0)
    assert ratio.current == 0.7
    ratio.decode(10_000)
    assert ratio.current == pytest.approx(0.098)
    ratio.retract(generated=30, requests=2, longest=99)
    assert ratio.current == 0.7
    assert NewTokenRatio(2.0).current == 1.0


def test_a_request_that_stops_early_has_decoded_once_more_with_overlap():
    cached = []
    for depth in (0, 1):
        s = scheduler(pipeline_depth=depth)
        s.submit(request("1", 10, 20))
        flying = []
        tokens = 0
        while s.requests:
            plan = s.plan(0)
            if plan is not None:
                flying.append(plan)
            if plan is None or len(flying) > depth:
                tokens += 1
                s.commit(flying.pop(0), Outcome(stopped=("1",)) if tokens == 5 else Outcome())
        check(s)
        cached.append(s.memory.tree.evictable)
    assert cached == [14, 15]


def test_the_longest_cached_prefix_goes_first():
    s = scheduler(policy="lpm", max_num_seqs=1)
    s.submit(request("1", 30, 1, text=7))
    turn(s)
    s.submit(request("2", 40, 1, text=8))
    s.submit(request("3", 40, 1, text=7))
    assert turn(s) == ({"3": 10}, [])


def test_of_two_with_the_same_beginning_the_second_waits_for_what_the_first_computes():
    s = scheduler(policy="lpm", max_num_seqs=8, chunk=60)
    s.submit(request("1", 50, 2, text=7))
    s.submit(request("2", 52, 2, text=7))
    s.submit(request("3", 10, 2, text=8))
    assert turn(s)[0] == {"1": 50, "3": 10}
    assert turn(s)[0] == {"2": 2}


def test_equal_prompts_of_other_tenants_are_not_found():
    s = scheduler()
    s.submit(request("1", 30, 1, text=7, salt="a"))
    turn(s)
    s.submit(request("2", 30, 1, text=7, salt="b"))
    assert turn(s)[0] == {"2": 30}


def test_a_request_that_can_never_be_admitted_is_rejected():
    s = scheduler(blocks=50)
    assert not s.submit(request("1", 30, 19))
    assert "the pool has 50" in s.log.events[0].detail if s.log.events else True
    assert s.submit(request("2", 30, 18))
    turn(s)


def keys(*spans: tuple[int, int, int], size: int = 4) -> BlockKeys:
    return BlockKeys.of_spans(size, spans, (-1, 0))


def test_sequences_that_part_share_a_node_and_leaves_go_first():
    tree = RadixTree(leaf_order("lru"))
    one, other = keys((1, 0, 24)), keys((1, 0, 16), (2, 0, 8))
    tree.insert(one, 6, 0, 0)
    assert tree.insert(other, 6, 0, 0).freed == 4
    assert sorted((node.start, node.end) for node in tree) == [(0, 4), (4, 6), (4, 6)]
    assert tree.match(one, 6).pages == 6  # the other leaf is now the oldest
    assert [(node.start, node.end) for node in (tree.evict(), tree.evict(), tree.evict())] == [
        (4, 6),
        (4, 6),
        (0, 4),
    ]
    assert tree.evict() is None
    assert tree.evictable == 0


def test_a_locked_path_is_not_evicted():
    tree = RadixTree(leaf_order("lru"))
    tree.insert(keys((1, 0, 24)), 6, 0, 0)
    match = tree.match(keys((1, 0, 12)), 3)
    tree.lock(match.node)
    assert (tree.evictable, tree.locked) == (3, 3)
    assert tree.evict().start == 3
    assert tree.evict() is None
    tree.unlock(match.node)
    assert tree.evict().start == 0


@pytest.mark.parametrize(
    ("order", "first"), [("lru", 2), ("mru", 3), ("fifo", 1), ("filo", 3), ("lfu", 2), ("slru", 2)]
)
def test_an_eviction_order_says_which_leaf_goes_first(order, first):
    tree = RadixTree(leaf_order(order))
    for text in (1, 2, 3):
        tree.insert(keys((text, 0, 4)), 1, 0, 0)
    for text in (1, 3):  # both are used again, and 1 more often
        tree.insert(keys((text, 0, 4)), 1, 0, 0)
    tree.insert(keys((1, 0, 4)), 1, 0, 0)
    tree.match(keys((3, 0, 4)), 1)
    assert tree.evict().pieces[0][0] == keys((first, 0, 4)).digests[0]


def test_unknown_settings_are_named():
    with pytest.raises(BadInput, match="radix eviction policy 'x' is not known; choose one of lru"):
        leaf_order("x")
    with pytest.raises(BadInput, match="the profile sglang has no priorities"):
        scheduler(policy="priority")
    with pytest.raises(BadInput, match="the policy lpm is SGLang's"):
        Scheduler(Limits(10, policy="lpm"))
    with pytest.raises(BadInput, match="mixed_chunk needs chunked prefill"):
        scheduler(settings=SglangSettings(mixed_chunk=True, chunked_prefill=False))
    with pytest.raises(BadInput, match="enable_mixed_chunk is for SGLang; the engine is vllm"):
        Scenario(enable_mixed_chunk=True).limits()
    with pytest.raises(BadInput, match="give radix_eviction_policy"):
        Scenario(engine="sglang", eviction="lfu").limits()


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 1},
        {"block_size": 16, "async_scheduling": False},
        {"block_size": 1, "enable_mixed_chunk": True, "scheduling_policy": "lpm"},
        {"block_size": 16, "enable_prefix_caching": False},
        {"block_size": 16, "scheduler_recv_interval": 30},
        {"block_size": 1, "scheduler_recv_interval": 7, "async_scheduling": False},
    ],
    ids=str,
)
def test_stretches_are_the_same_as_single_steps(fields):
    trace = read("chat", limit=60)
    scenario = Scenario(
        engine="sglang", costs="roofline", num_gpu_blocks=9000 // fields["block_size"], **fields
    )
    fast = replay(trace, scenario, check_every=10)
    slow = replay(trace, scenario, fast_forward=False)
    assert fast.requests.equals(slow.requests)
    assert fast.summary["evicted_blocks"] == slow.summary["evicted_blocks"]
    assert len(fast.steps) < len(slow.steps)


def test_a_request_that_is_not_received_yet_can_be_cancelled():
    s = scheduler(blocks=60, settings=SglangSettings(recv_interval=10))
    first, second = request("0", 10, 30), request("1", 10, 30)
    s.submit(first)
    s.commit(s.plan(0))
    s.commit(s.plan(0))
    s.submit(second)
    assert not s.queue.size and s.lifecycle.coming == 1
    assert s.cancel("1", 0)
    check(s)
    assert not s.lifecycle.coming and second.state is State.CANCELLED


def test_tenants_below_a_ceiling_are_told_apart_in_stretches_too():
    trace = read("chat", limit=60)
    tenants = np.where(np.arange(len(trace)) % 3 == 0, "b", "a")
    trace = dataclasses.replace(trace, requests=trace.requests.assign(tenant=tenants))
    scenario = Scenario(engine="sglang", costs="roofline", block_size=16, num_gpu_blocks=600)
    free = replay(trace, scenario).summary
    limited = scenario.changed(tenants="a:blocks=300")
    fast = replay(trace, limited, check_every=10)
    assert fast.requests.equals(replay(trace, limited, fast_forward=False).requests)
    assert fast.summary["tenants"]["a"]["ttft_p99_s"] > 2 * free["tenants"]["a"]["ttft_p99_s"]
    assert fast.summary["tenants"]["b"]["ttft_p99_s"] <= free["tenants"]["b"]["ttft_p99_s"]
    assert fast.summary["completed"] == 60


def test_a_fleet_of_sglang_replicas_is_routed_by_an_approximate_index():
    trace = read("chat", limit=40)
    scenario = Scenario(engine="sglang", costs="roofline", num_gpu_blocks=5000)

    def fleet(index: str) -> FleetSettings:
        return FleetSettings.make(
            {"groups": [{"replicas": 2}], "router": {"policy": "prefix-affinity", "index": index}}
        )

    result = replay_fleet(trace, scenario, fleet("approximate"))
    assert (result.requests["state"] == "completed").all()
    with pytest.raises(
        BadInput, match=r"SGLang 0\.5\.23: content is in a radix tree, not in blocks; use --index"
    ):
        replay_fleet(trace, scenario, fleet("events"))


def test_there_is_no_map_of_the_pages_of_a_radix_tree():
    with pytest.raises(BadInput, match="no map of blocks"):
        record(read("chat", limit=5), Scenario(engine="sglang", costs="roofline", num_gpu_blocks=5000))


def test_a_retracted_request_that_never_fits_again_is_ended_with_a_reason():
    settings = SglangSettings(max_prefill_tokens=67, chunked_prefill=False, ignore_eos=True)
    s = scheduler(6, settings=settings, block_size=8, caching=False)
    one = request("1", 22, 12, size=8)
    s.submit(one)
    for _ in range(3):
        turn(s)
    s.preempt(one)
    while s.requests:
        plan = s.plan(0)
        if plan is not None:
            s.commit(plan)
    assert one.state is State.CANCELLED
    assert "never fits again" in one.reason
