"""Partial reuse and swapping: what a request has beyond its prefix hit."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.cache_policy import EVICTIONS, CachePolicy
from pagecast.sim.core.cache_rules import CacheRules
from pagecast.sim.core.check import check
from pagecast.sim.core.engines.registry import PROFILES
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import EventKind
from pagecast.sim.core.identity.keys import BlockKeys, Public, common_tokens
from pagecast.sim.core.identity.scope import Scope
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.scheduler import Scheduler

sys.path.insert(0, str(Path(__file__).parent))

from driver import Life, endless

SIZE = 8


def scheduler(mode: str, blocks: int = 40, eviction: str = "lru") -> Scheduler:
    limits = Limits(blocks, SIZE, 8, 4096, partial_reuse=mode)
    return Scheduler(limits, CacheRules(CachePolicy(EVICTIONS[eviction]())).applied(VLLM), log=True)


def request(
    id: str, spans: list[tuple[int, int, int]], output: int = 1, scope: Scope | None = None
) -> Request:
    keys = BlockKeys.of_spans(SIZE, spans, (10_000 + len(id) + ord(id[0]), 0), scope or Scope())
    return Request(id, keys, sum(length for _, _, length in spans), output)


def run(s: Scheduler, *requests: Request) -> list[tuple[int, int]]:
    """Serves requests one after another. Returns cached and partial tokens of each."""
    for each in requests:
        assert s.submit(each)
        while s.requests:
            s.commit(s.plan(0))
            check(s)
    return [(each.cached_tokens, each.partial_tokens) for each in requests]


def kinds(s: Scheduler) -> list[str]:
    return [
        f"{event.kind.value} {event.detail}"
        for event in s.events or ()
        if event.detail.startswith("partial") or event.kind is EventKind.COPIED
    ]


ONE = [(1, 0, 40)]
FORKED = [(1, 0, 29), (2, 0, 11)]


def test_without_partial_reuse_only_full_blocks_are_found() -> None:
    assert run(scheduler(""), request("a", ONE), request("b", FORKED)) == [(0, 0), (24, 0)]


def test_a_block_that_others_follow_is_copied() -> None:
    s = scheduler("copy")
    assert run(s, request("a", ONE), request("b", FORKED)) == [(0, 0), (29, 5)]
    assert kinds(s) == ["copied partial=5"]
    assert run(s, request("c", ONE)) == [(39, 7)], "what was copied stays"


def test_a_block_that_others_follow_is_not_taken_over() -> None:
    assert run(scheduler("take"), request("a", ONE), request("b", FORKED))[1] == (24, 0)


@pytest.mark.parametrize("mode", ["copy", "take"])
def test_a_last_block_that_nobody_uses_is_taken_over(mode: str) -> None:
    s = scheduler(mode)
    assert run(s, request("a", [(1, 0, 33)]), request("b", [(1, 0, 29), (2, 0, 11)])) == [(0, 0), (29, 5)]
    assert kinds(s) == ["reused partial=5"]
    assert run(s, request("c", [(1, 0, 33)]))[0][0] < 32, "its content is gone"


def test_a_last_block_in_use_is_copied() -> None:
    for mode, partial in (("copy", 5), ("take", 0)):
        s = scheduler(mode)
        s.submit(request("a", [(1, 0, 33)], 20))
        s.commit(s.plan(0))
        s.submit(other := request("b", [(1, 0, 29), (2, 0, 11)]))
        s.commit(s.plan(0))
        check(s)
        assert other.partial_tokens == partial


@pytest.mark.parametrize(("mode", "cached"), [("copy", 11), ("take", 8), ("", 8)])
def test_tensorrt_llms_case_of_a_partial_copy(mode: str, cached: int) -> None:
    """runPartialCopyTest of TensorRT-LLM's kvCacheManagerTest.cpp: blocks of 8, prompts of 17, 17 and 12.

    The second reuses two blocks and runs on; the third reuses one, and three tokens of the other by a copy,
    for it is in use. Without copies it can't be reused, as the page "KV Cache System" says.
    """
    s = scheduler(mode)
    text = [(1, 0, 17)]
    assert run(s, request("a", text)) == [(0, 0)]
    s.submit(second := request("b", text, 20))
    s.commit(s.plan(0))
    s.submit(third := request("c", [(1, 0, 12)]))
    s.commit(s.plan(0))
    check(s)
    assert [second.cached_tokens, third.cached_tokens] == [16, cached]
    assert kinds(s) == (["copied partial=3"] if mode == "copy" else [])
    own = s.memory.blocks(second)
    assert own[1] not in s.memory.blocks(third)


def test_tensorrt_llms_case_of_two_that_reuse_a_block_partly() -> None:
    """The page "KV Cache System": with copies several requests may reuse one block partly, at once."""
    reused = {}
    for mode in ("copy", "take"):
        s = scheduler(mode)
        run(s, request("a", [(1, 0, 17)]))
        both = [request("b", [(1, 0, 13), (2, 0, 9)], 9), request("c", [(1, 0, 12), (3, 0, 9)], 9)]
        for each in both:
            s.submit(each)
        s.commit(s.plan(0))
        check(s)
        reused[mode] = [each.cached_tokens for each in both]
    assert reused == {"copy": [13, 12], "take": [13, 8]}


def test_the_longest_match_of_several_is_used() -> None:
    s = scheduler("copy")
    run(s, request("a", [(1, 0, 26), (3, 0, 14)]), request("b", [(1, 0, 30), (4, 0, 10)]))
    assert run(s, request("c", [(1, 0, 28), (5, 0, 10)])) == [(28, 4)]
    assert run(s, request("d", [(1, 0, 26), (3, 0, 3), (6, 0, 9)])) == [(29, 5)]


def test_texts_are_compared_across_spans_and_into_the_output() -> None:
    one = BlockKeys.of_spans(SIZE, [(1, 0, 10), (2, 5, 10)], (3, 0))
    two = BlockKeys.of_spans(SIZE, [(1, 0, 10), (2, 5, 6), (9, 0, 4)], (3, 0))
    assert common_tokens(one, two, 8, 99) == 8
    same = BlockKeys.of_spans(SIZE, [(1, 0, 10), (2, 5, 10), (3, 0, 7)], (4, 0))
    assert common_tokens(one, same, 8, 99) == 19


def ids_of(spans: list[tuple[int, int, int]]) -> list[int]:
    return [content * 1000 + offset + i for content, offset, length in spans for i in range(length)]


def id_request(id: str, spans: list[tuple[int, int, int]]) -> Request:
    ids = ids_of(spans)
    return Request(id, BlockKeys.of_ids(SIZE, [*ids, 9_000_000 + ord(id[0])]), len(ids), 1)


def test_token_ids_match_partly_too() -> None:
    s = scheduler("copy")
    assert run(s, id_request("a", ONE), id_request("b", FORKED)) == [(0, 0), (29, 5)]
    assert run(s, id_request("c", [(1, 0, 30), (4, 0, 10)]), id_request("d", [(7, 0, 40)])) == [
        (30, 6),
        (0, 0),
    ]
    assert kinds(s) == ["copied partial=5", "copied partial=6"]
    assert run(scheduler("take"), id_request("a", ONE[:1]), id_request("b", [(1, 0, 36), (2, 0, 9)]))[1] == (
        36,
        4,
    )
    assert common_tokens(id_request("a", ONE).keys, request("b", ONE).keys, 0, 8) == 0, "ids beside spans"


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("public", [False, True])
def test_tenants_never_share_a_part_of_a_block(public: bool, ids: bool) -> None:
    """Not even behind a public prefix that both found."""
    s = scheduler("copy")
    head = Public(24, Scope(salt="public")) if public else None
    hits = []
    for id, tenant in (("a", "a"), ("bb", "b"), ("ccc", "a")):
        scope = Scope(salt=tenant)
        if ids:
            keys = BlockKeys.of_ids(SIZE, [*ids_of(FORKED), 9_000_000 + len(id)], scope, public=head)
        else:
            keys = BlockKeys.of_spans(SIZE, FORKED, (70 + len(id), 0), scope, public=head)
        hits += run(s, Request(id, keys, 40, 1))
    assert hits == [(0, 0), (24 if public else 0, 0), (39, 7)]


@settings(max_examples=40, deadline=None)
@given(
    data=st.binary(min_size=300, max_size=900),
    mode=st.sampled_from(["copy", "take"]),
    eviction=st.sampled_from(list(EVICTIONS)),
    ids=st.booleans(),
)
def test_partial_reuse_loses_no_block(data: bytes, mode: str, eviction: str, ids: bool) -> None:
    life = Life(
        endless(data),
        policy=CachePolicy(EVICTIONS[eviction]()),
        more={"partial_reuse": mode},
        log=True,
        ids=ids,
    )
    while life.operations < len(data) // 4:
        life.operate()
        if life.operations % 10 == 0:
            check(life.s)
    life.drain()


# ---- swapping


def swapping(blocks: int = 12, swap: int = 100) -> tuple[Scheduler, list[Request]]:
    s = Scheduler(Limits(blocks, 4, 8, 4096, swap_blocks=swap, caching=False), VLLM, log=True)
    made = []
    for number in range(4):
        keys = BlockKeys.of_spans(4, [(number, 0, 8)], (1000 + number, 0))
        made.append(Request(str(number), keys, 8, 24))
        s.submit(made[-1])
    return s, made


def test_a_swapped_request_computes_nothing_again() -> None:
    s, made = swapping()
    computed = dict.fromkeys(range(4), 0)
    swaps = []
    while s.requests:
        plan = s.plan(0)
        swaps += plan.swaps
        for each, _, tokens in plan.work():
            computed[int(each.id)] += tokens
        s.commit(plan)
        check(s)
    assert s.preemptions > 0
    assert set(computed.values()) == {31}
    assert sum(each.recomputed_tokens for each in made) == 0
    out = [swap.tokens for swap in swaps if swap.out]
    assert len(out) == s.preemptions and sum(out) == sum(swap.tokens for swap in swaps if not swap.out)
    assert s.lifecycle.swap.free_blocks == 100
    assert {EventKind.SWAPPED_OUT, EventKind.SWAPPED_IN} <= {event.kind for event in s.events}


def test_without_room_a_request_is_computed_again() -> None:
    s, made = swapping(swap=1)
    while s.requests:
        s.commit(s.plan(0))
    assert s.preemptions and sum(each.recomputed_tokens for each in made) > 0


def test_a_cancelled_request_frees_its_swap_space_once() -> None:
    s, made = swapping()
    while not s.preemptions:
        s.commit(s.plan(0))
    gone = next(each for each in made if each.swapped_tokens)
    assert gone.state is State.WAITING
    assert s.cancel(gone.id, 0)
    assert not s.cancel(gone.id, 0)
    assert s.lifecycle.swap.free_blocks == 100
    while s.requests:
        s.commit(s.plan(0))
    assert s.lifecycle.swap.free_blocks == 100


@settings(max_examples=40, deadline=None)
@given(data=st.binary(min_size=300, max_size=900), ids=st.booleans())
def test_swapping_breaks_no_invariant(data: bytes, ids: bool) -> None:
    life = Life(endless(data), more={"swap_blocks": 9}, ids=ids)
    while life.operations < len(data) // 4:
        life.operate()
        check(life.s)
    life.drain()
    assert life.s.lifecycle.swap.free_blocks == 9


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(BadInput, match="choose copy or take"):
        Limits(10, partial_reuse="both").check()


def test_a_block_is_taken_over_before_the_blocks_of_the_whole_prompt_are_taken() -> None:
    """TensorRT-LLM takes all blocks of a prompt at its admission, and computes chunks of it later."""
    s = Scheduler(Limits(40, SIZE, 8, 4096, partial_reuse="copy"), PROFILES["trtllm-guaranteed-no-evict"])
    assert run(s, request("a", [(1, 0, 33)])) == [(0, 0)]
    each = request("b", [(1, 0, 29), (2, 0, 20)])
    assert s.submit(each)
    plan = s.plan(0)
    assert plan is not None
    assert (each.cached_tokens, each.partial_tokens) == (29, 5)
    assert plan.used_blocks == 7
    assert s.memory.partial_reuse.taken_blocks == 1
    s.commit(plan)
    check(s)
