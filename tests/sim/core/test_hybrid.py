"""Models whose layers keep different tokens: windows, chunks, states, and hits that all groups agree on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import simpy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pagecast.sim.core.cache_policy import EVICTIONS, CachePolicy, Slru
from pagecast.sim.core.cache_rules import CacheRules
from pagecast.sim.core.check import check
from pagecast.sim.core.engines.nano_vllm.profile import NANO_VLLM
from pagecast.sim.core.engines.vllm.profile import vllm
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import GroupSpec, KvKind, unit_tokens
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.core.tier_spec import HostTierSpec
from pagecast.sim.costs.roofline import Roofline
from pagecast.sim.replay.clients import Arrivals
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replay.recorder import Recorder
from pagecast.sim.replica.replica import Replica
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.replica.workload import TraceWorkload
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from pandas import DataFrame
from pandas.testing import assert_frame_equal

SIZE = 4
FULL = GroupSpec(KvKind.FULL, SIZE)
WINDOW = GroupSpec(KvKind.WINDOW, SIZE, window=8)
CHUNK = GroupSpec(KvKind.CHUNK, SIZE, window=8)
STATE = GroupSpec(KvKind.STATE)
CACHED = GroupSpec.checkpoints(SIZE)


def request(id: str, text: int, prompt: int, output: int, size: int = SIZE) -> Request:
    """A request for the first `prompt` tokens of a text; its output is its own."""
    keys = BlockKeys.of_spans(size, [(text, 0, prompt)], (1000 + int(id), 0))
    return Request(id, keys, prompt, output)


def scheduler(
    *groups: GroupSpec,
    blocks: int = 60,
    depth: int = 0,
    caching: bool = True,
    eviction: str = "lru",
    numbered: bool = True,
    version: str = "0.24",
) -> Scheduler:
    limits = Limits(blocks, unit_tokens(groups), 8, 32, pipeline_depth=depth, caching=caching, groups=groups)
    order = Slru(0.5) if eviction == "slru" else EVICTIONS[eviction]()
    profile = CacheRules(CachePolicy(order)).applied(vllm(version))
    return Scheduler(limits, profile, numbered=numbered)


def serve(s: Scheduler, *requests: Request) -> int:
    """Serves requests to the end, checking every invariant after each step. Returns the most blocks used."""
    for each in requests:
        assert s.submit(each)
    flying: list[StepPlan] = []
    most = 0
    while s.requests:
        plan = s.plan(0)
        if plan is not None:
            flying.append(plan)
            most = max(most, plan.used_blocks)
        if plan is None or len(flying) > s.limits.pipeline_depth:
            s.commit(flying.pop(0), Outcome())
        check(s)
    assert s.memory.used_blocks == 0
    return most


def test_a_window_holds_no_more_than_itself_however_long_the_sequence_is() -> None:
    assert serve(scheduler(WINDOW), request("0", 1, 100, 60)) <= 8 + 3 + 1
    assert serve(scheduler(FULL), request("0", 1, 100, 60)) == 40


def test_blocks_that_left_a_window_are_null_in_its_table_and_kept_in_the_others() -> None:
    s = scheduler(FULL, WINDOW)
    one = request("0", 1, 20, 8)
    s.submit(one)
    s.commit(s.plan(0))
    s.plan(0)
    null = s.limits.num_blocks
    assert null not in s.memory.blocks(one, 0)
    # Token 20 attends to 13 and later: blocks 0 to 2 (tokens 0 to 11) are out of reach.
    assert [block == null for block in s.memory.blocks(one, 1)] == [True, True, True, False, False, False]


def test_a_hit_needs_a_whole_window_in_the_cache_and_every_token_of_full_attention() -> None:
    s = scheduler(FULL, WINDOW)
    serve(s, request("0", 1, 40, 2))
    again = request("1", 1, 40, 2)
    serve(s, again)
    assert again.cached_tokens == 36
    # Of a prompt that parts from it at token 20, the window's blocks before token 20 left the cache last.
    other = Request("2", BlockKeys.of_spans(SIZE, [(1, 0, 20), (7, 0, 20)], (9, 0)), 40, 2)
    serve(s, other)
    assert other.cached_tokens == 20


def test_a_prefix_whose_window_was_evicted_is_not_found() -> None:
    s = scheduler(FULL, WINDOW)
    serve(s, request("0", 1, 40, 2))
    s.evict(60 - 22 + 8)  # the blocks never used, and those that left the window while the prompt was read
    other = Request("1", BlockKeys.of_spans(SIZE, [(1, 0, 20), (7, 0, 20)], (9, 0)), 40, 2)
    serve(s, other)
    assert other.cached_tokens == 0
    again = request("2", 1, 40, 2)
    serve(s, again)
    assert again.cached_tokens == 36


def test_chunked_attention_counts_what_lies_before_the_chunk_as_found() -> None:
    s = scheduler(CHUNK)
    cold = request("0", 1, 21, 2)
    serve(s, cold)
    # Tokens 0 to 15 lie in chunks that token 20 does not see, so no block of them is needed.
    assert cold.cached_tokens == 16


def test_hits_are_whole_multiples_of_all_block_sizes() -> None:
    s = scheduler(GroupSpec(KvKind.FULL, 4), GroupSpec(KvKind.WINDOW, 6, window=7))
    assert s.limits.block_size == 2
    serve(s, request("0", 1, 40, 2, size=2))
    again = request("1", 1, 40, 2, size=2)
    serve(s, again)
    assert again.cached_tokens == 36


def test_recurrent_states_take_one_block_per_request_and_group() -> None:
    s = scheduler(FULL, STATE, STATE, caching=False)
    one = request("0", 1, 20, 30)
    s.submit(one)
    plan = s.plan(0)
    assert plan is not None and plan.used_blocks == 5 + 2
    s.commit(plan)
    assert serve(s) == 13 + 2


def test_a_prompt_ends_a_chunk_where_its_state_can_be_found_again() -> None:
    s = scheduler(FULL, CACHED, version="0.33")
    one = request("0", 1, 22, 2)
    s.submit(one)
    plan = s.plan(0)
    assert plan is not None and plan.prefill == ((20, 0),) and plan.used_blocks == 5 + 1
    s.commit(plan)
    null = s.limits.num_blocks
    assert [block != null for block in s.memory.blocks(one, 1)] == [False] * 4 + [True]
    serve(s)
    again = request("1", 1, 30, 2)
    serve(s, again)
    assert again.cached_tokens == 20


def test_kernels_that_export_states_need_no_chunk_for_them() -> None:
    s = scheduler(FULL, GroupSpec.checkpoints(SIZE, exported=1), version="0.33")
    s.submit(request("0", 1, 22, 2))
    plan = s.plan(0)
    assert plan is not None and plan.prefill == ((22, 0),) and plan.used_blocks == 6 + 2
    s.commit(plan)
    serve(s)
    again = request("1", 1, 22, 2)
    serve(s, again)
    assert again.cached_tokens == 20


def test_a_state_where_prompts_part_is_kept_once_a_second_one_has_parted_there() -> None:
    s = scheduler(FULL, CACHED, version="0.33")
    cached = []
    for number in range(3):
        keys = BlockKeys.of_spans(SIZE, [(1, 0, 13), (7 + number, 0, 17)], (90 + number, 0))
        one = Request(str(number), keys, 30, 2)
        serve(s, one)
        cached.append(one.cached_tokens)
    assert cached == [0, 0, 12]


def test_a_request_waits_for_the_step_that_computes_the_state_it_found() -> None:
    s = scheduler(FULL, CACHED, version="0.33")
    s.submit(request("0", 1, 22, 2))
    s.submit(request("1", 1, 22, 2))
    first = s.plan(0)
    assert first is not None and first.running == 1
    s.commit(first)
    second = s.plan(0)
    assert second is not None and second.prefill == ((2, 20), (2, 20)) and second.used_blocks == 6 + 4
    s.commit(second)
    serve(s)


def test_states_of_draft_tokens_follow_the_newest() -> None:
    s = scheduler(FULL, GroupSpec.checkpoints(SIZE, drafts=2), version="0.33")
    assert serve(s, request("0", 1, 20, 30)) == 13 + 4


def test_a_long_request_fits_a_window_that_its_whole_length_would_not() -> None:
    assert scheduler(WINDOW, blocks=11).submit(request("0", 1, 500, 3))
    assert not scheduler(FULL, blocks=11).submit(request("0", 1, 500, 3))


@pytest.mark.parametrize(
    ("groups", "block_size", "caching", "message"),
    [
        ((STATE,), 4, False, "one must keep KV per token"),
        ((FULL, STATE), 4, True, "turn enable_prefix_caching off"),
        ((FULL, CACHED, GroupSpec(KvKind.RING)), 4, True, "whose indexer pools keys"),
        ((FULL, CACHED), 4, True, r"vLLM 0\.24, but for 0\.33; turn enable_prefix_caching off"),
        ((FULL, GroupSpec(KvKind.WINDOW, 6, 5)), 4, True, "block_size 4 does not divide"),
        ((GroupSpec(KvKind.FULL, 8), CHUNK), 4, True, "one block size in all KV groups"),
        ((GroupSpec(KvKind.WINDOW, 4),), 4, True, "a window of at least 1 token"),
    ],
)
def test_groups_that_do_not_fit_together_are_refused(
    groups: tuple[GroupSpec, ...], block_size: int, caching: bool, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        Scheduler(Limits(60, block_size, 8, 32, caching=caching, groups=groups))


@pytest.mark.parametrize(("eviction", "cached"), [("lru", 0), ("slru", 20), ("lfu", 20)])
def test_content_that_was_reused_outlives_a_scan_where_the_order_says_so(eviction: str, cached: int) -> None:
    s = scheduler(FULL, WINDOW, blocks=40, eviction=eviction)
    serve(s, request("0", 1, 21, 1))
    serve(s, request("1", 1, 21, 1))
    for number in range(2, 8):
        serve(s, request(str(number), number, 21, 1))
    again = request("9", 1, 21, 1)
    serve(s, again)
    assert again.cached_tokens == cached


def test_lfu_keeps_what_more_requests_reused_and_segments_do_not() -> None:
    kept = {}
    for eviction in ("slru", "lfu"):
        s = scheduler(FULL, WINDOW, blocks=40, eviction=eviction)
        for number, text in enumerate((1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)):
            serve(s, request(str(number), text, 21, 1))
        again = request("99", 1, 21, 1)
        serve(s, again)
        kept[eviction] = again.cached_tokens
    assert kept == {"slru": 0, "lfu": 20}


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, CACHED)], ids=["window", "states"])
def test_nothing_is_found_of_a_step_that_failed(groups: tuple[GroupSpec, ...]) -> None:
    s = scheduler(*groups, version="0.33")
    one = request("0", 1, 21, 4)
    s.submit(one)
    plan = s.plan(0)
    assert plan is not None
    s.commit(plan, Outcome(failed=(("0", "broken"),)))
    check(s)
    again = request("1", 1, 21, 4)
    serve(s, again)
    assert again.cached_tokens == 0
    third = request("2", 1, 21, 4)
    serve(s, third)
    assert third.cached_tokens > 0


def test_reused_blocks_beyond_the_protected_share_give_way_as_others() -> None:
    s = scheduler(FULL, WINDOW, blocks=40, eviction="slru")
    pool = s.memory.pool
    for number in range(16):
        serve(s, request(str(number), number // 2, 21, 1))
        ranked = sum(len(extent.blocks) for extent in pool.free_extents() if extent.level)
        assert ranked <= 20
    assert ranked > 0


def test_an_engine_of_plain_models_refuses_groups() -> None:
    with pytest.raises(BadInput, match="use vllm"):
        Scheduler(Limits(60, SIZE, 8, 32, groups=(FULL, WINDOW)), NANO_VLLM)


LIVES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 20)), min_size=2, max_size=12
)
MADE = st.lists(
    st.sampled_from(
        [
            FULL,
            WINDOW,
            GroupSpec(KvKind.WINDOW, 8, 3),
            GroupSpec(KvKind.FULL, 12),
            GroupSpec(KvKind.LATENT, 4),
        ]
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(
    lives=LIVES,
    groups=MADE,
    room=st.integers(0, 40),
    depth=st.integers(0, 1),
    cancelled=st.sets(st.integers(0, 11)),
    eviction=st.sampled_from(["lru", "lfu", "slru"]),
)
@example(  # what follows a copy is held with the first of its kind, while the copy loses its end
    lives=[(0, 1, 9), (0, 29, 16), (0, 12, 9)],
    groups=[FULL, FULL, GroupSpec(KvKind.WINDOW, 4, 8), GroupSpec(KvKind.WINDOW, 8, 3)],
    room=0,
    depth=0,
    cancelled=set(),
    eviction="lfu",
)
def test_no_block_is_ever_lost(
    lives: list[tuple[int, int, int]],
    groups: list[GroupSpec],
    room: int,
    depth: int,
    cancelled: set[int],
    eviction: str,
) -> None:
    s = scheduler(*groups, blocks=1, depth=depth)
    most = max(s.limits.most_held(prompt + output) for _, prompt, output in lives)
    s = scheduler(*groups, blocks=most + room, depth=depth, eviction=eviction)
    for id, life in enumerate(lives):
        assert s.submit(request(str(id), *life, size=s.limits.block_size))
    steps = 0
    flying: list[StepPlan] = []
    while s.requests:
        if steps in cancelled:
            s.cancel(str(steps), 0)
            check(s)
        plan = s.plan(0)
        if plan is not None:
            flying.append(plan)
        if flying and (plan is None or len(flying) > depth):
            s.commit(flying.pop(0))
        check(s)
        steps += 1
    assert s.memory.used_blocks == 0


@settings(max_examples=60, deadline=None)
@given(
    lives=LIVES,
    window=st.sampled_from([5, 8, 16]),
    equal=st.integers(2, 4),
    room=st.integers(0, 60),
    depth=st.integers(0, 1),
    divided=st.integers(0, 60),
    version=st.sampled_from(["0.24", "0.33"]),
)
def test_equal_groups_take_the_same_blocks_together_as_each_by_itself(
    lives: list[tuple[int, int, int]],
    window: int,
    equal: int,
    room: int,
    depth: int,
    divided: int,
    version: str,
) -> None:
    groups = (*[GroupSpec(KvKind.WINDOW, SIZE, window)] * equal, FULL)
    together = decisions(lives, groups, room, depth, version)
    assert decisions(lives, groups, room, depth, version, divided=0) == together
    assert decisions(lives, groups, room, depth, version, divided=divided) == together


@settings(max_examples=60, deadline=None)
@given(
    lives=LIVES,
    window=st.sampled_from([5, 8, 16]),
    equal=st.integers(1, 4),
    room=st.integers(0, 60),
    depth=st.integers(0, 1),
    divided=st.integers(0, 60),
    version=st.sampled_from(["0.24", "0.33"]),
)
def test_decisions_do_not_need_the_numbers_of_blocks(
    lives: list[tuple[int, int, int]],
    window: int,
    equal: int,
    room: int,
    depth: int,
    divided: int,
    version: str,
) -> None:
    groups = (*[GroupSpec(KvKind.WINDOW, SIZE, window)] * equal, FULL)
    numbered = [each[:4] for each in decisions(lives, groups, room, depth, version)]
    for step in (None, divided):
        unnumbered = decisions(lives, groups, room, depth, version, divided=step, numbered=False)
        assert [each[:4] for each in unnumbered] == numbered


def decisions(
    lives: list[tuple[int, int, int]],
    groups: tuple[GroupSpec, ...],
    room: int,
    depth: int,
    version: str,
    divided: int | None = None,
    *,
    numbered: bool = True,
) -> list[tuple[object, ...]]:
    """What is decided step by step, blocks free and evicted, all block tables and the order of free blocks.

    `divided`: the step before which equal groups part.
    """
    s = scheduler(*groups, blocks=1, depth=depth)
    most = max(s.limits.most_held(prompt + output) for _, prompt, output in lives)
    if version != "0.24":
        most *= 1 + depth  # a window holds the tokens of two steps
    s = scheduler(*groups, blocks=most + room, depth=depth, numbered=numbered, version=version)
    memory = s.memory
    assert isinstance(memory, KvMemory)
    flying: list[StepPlan] = []
    seen: list[tuple[object, ...]] = []
    waiting = [request(str(id), *life) for id, life in enumerate(lives)]
    for step in range(10_000):
        if step % 3 == 0 and waiting:
            s.submit(waiting.pop(0))
        if not s.requests and not waiting:
            break
        if step == divided:
            memory.divide()
        plan = s.plan(0)
        decided = None
        if plan is not None:
            flying.append(plan)
            decided = plan.used_blocks, plan.decode_n, plan.prefill
        if flying and (plan is None or len(flying) > depth):
            s.commit(flying.pop(0))
        if numbered:
            check(s)
        tables = [memory.blocks(each, group) for each in memory.tables for group in range(len(groups))]
        order = list(memory.pool.free_order())
        seen.append((decided, memory.free_blocks, memory.evicted_blocks, len(order), tables, order))
    return seen


@settings(max_examples=30, deadline=None)
@given(
    lives=st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 300), st.integers(1, 200)), min_size=1, max_size=20
    ),
    looks=st.lists(st.integers(1, 4_000_000_000), max_size=20),
    blocks=st.integers(70, 160),
    pipelined=st.booleans(),
    version=st.sampled_from(["0.24", "0.33"]),
)
def test_a_stretch_is_the_same_as_its_steps_and_may_be_looked_into(
    lives: list[tuple[float, int, int]], looks: list[int], blocks: int, pipelined: bool, version: str
) -> None:
    rows = DataFrame(sorted(lives), columns=["arrival_s", "input_tokens", "output_tokens"])
    trace = Trace("lives", rows)
    unseen = probed(trace, blocks, pipelined, version, [], fast_forward=True)
    seen = probed(trace, blocks, pipelined, version, sorted(set(looks)), fast_forward=True)
    stepped = probed(trace, blocks, pipelined, version, sorted(set(looks)), fast_forward=False)
    assert_frame_equal(unseen[0], seen[0])
    assert_frame_equal(unseen[0], stepped[0])
    assert seen[1] == stepped[1]


def probed(
    trace: Trace, blocks: int, pipelined: bool, version: str, looks: list[int], *, fast_forward: bool
) -> tuple[DataFrame, list[tuple[int, int, set[int]]]]:
    """A replay's requests, and the occupancy, running requests and findable blocks read at these times."""
    scenario = Scenario(
        model="openai/gpt-oss-20b",
        num_gpu_blocks=blocks,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        async_scheduling=pipelined,
        costs="roofline",
    )
    spec = replace(ReplicaSpec.of(scenario, TraceWorkload(trace)), rules=vllm(version))
    assert isinstance(spec.costs, Roofline)
    env = simpy.Environment()
    recorder = Recorder()
    feed = Feed(trace, spec.limits.block_size)
    replica = Replica(env, spec, Arrivals(trace), feed, [recorder], fast_forward=fast_forward)
    s = replica.scheduler
    seen = []

    def probe() -> Iterator[simpy.Event]:
        for time in looks:
            yield env.timeout(time - env.now)
            replica.cut(time)
            check(s)
            seen.append((s.memory.used_blocks, len(s.running.requests), s.memory.findable_blocks()))

    env.process(probe())
    env.run()
    return recorder.requests(), seen


def test_a_prompt_that_left_the_device_takes_its_state_from_the_host() -> None:
    limits = Limits(12, SIZE, 8, 32, groups=(FULL, CACHED), host=HostTierSpec(64))
    s = Scheduler(limits, vllm("0.33"))
    loads = 0
    for number, text in enumerate((1, 2, 1)):
        assert s.submit(request(str(number), text, 33, 2))
        while s.requests:
            plan = s.plan(0)
            s.transferred(list(s.offloading.jobs))
            if plan is not None:
                loads += len(plan.loads)
                if plan.prefill or plan.decode_n:
                    s.commit(plan)
    assert loads == 1
    assert s.offloading.loaded_blocks == 8 + 1, "the blocks of 32 tokens, and the state behind them"
