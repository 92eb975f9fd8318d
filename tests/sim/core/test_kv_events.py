"""The stream of KV events: what routers are told of a cache."""

from __future__ import annotations

from pagecast.sim.core.engines.vllm.profile import vllm
from pagecast.sim.core.group_spec import GroupSpec, KvKind
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventStream
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler

SIZE = 4


def request(id: str, text: int, prompt: int, output: int) -> Request:
    keys = BlockKeys.of_spans(SIZE, [(text, 0, prompt)], (1000 + int(id), 0))
    return Request(id, keys, prompt, output)


def serve(s: Scheduler, *requests: Request) -> None:
    for each in requests:
        assert s.submit(each)
    while s.requests:
        plan = s.plan(0)
        assert plan is not None
        s.commit(plan)


def test_blocks_are_told_of_with_their_parent_when_they_become_findable() -> None:
    stream = KvEventStream()
    s = Scheduler(Limits(20, SIZE, 8, 64), kv_events=stream)
    one = request("0", 1, 10, 4)
    serve(s, one)
    keys = one.keys.block_key
    assert stream.take() == [
        BlockStored((keys(0), keys(1)), None, 8, SIZE),
        BlockStored((keys(2),), keys(1), 4, SIZE),
    ]
    assert stream.take() == [] and s.events == []


def test_equal_content_has_equal_hashes_and_other_content_others() -> None:
    stream = KvEventStream()
    s = Scheduler(Limits(20, SIZE, 8, 64), kv_events=stream)
    serve(s, request("0", 1, 9, 1))
    s.reset_prefix_cache()
    serve(s, request("1", 1, 9, 1))
    serve(s, request("2", 2, 9, 1))
    first, cleared, again, other = stream.take()
    assert cleared == AllBlocksCleared()
    assert first == again
    assert isinstance(first, BlockStored) and isinstance(other, BlockStored)
    assert not set(first.block_hashes) & set(other.block_hashes)


def test_a_content_given_up_for_its_space_is_told_of() -> None:
    stream = KvEventStream()
    s = Scheduler(Limits(4, SIZE, 8, 64), kv_events=stream)
    one = request("0", 1, 12, 1)
    serve(s, one)
    stream.take()
    serve(s, request("1", 2, 8, 1))
    removed = [event for event in stream.take() if isinstance(event, BlockRemoved)]
    assert removed == [BlockRemoved((one.keys.block_key(2),))]


def test_the_cache_is_not_reset_while_a_request_holds_blocks() -> None:
    stream = KvEventStream()
    s = Scheduler(Limits(20, SIZE, 8, 64), kv_events=stream)
    s.submit(request("0", 1, 9, 5))
    s.plan(0)
    stream.take()
    assert not s.reset_prefix_cache()
    assert stream.take() == []


def test_events_of_hybrid_models_name_the_group_and_what_it_keeps() -> None:
    stream = KvEventStream()
    groups = (GroupSpec(KvKind.FULL, SIZE), GroupSpec(KvKind.WINDOW, SIZE, window=8))
    s = Scheduler(Limits(40, SIZE, 8, 64, groups=groups), kv_events=stream)
    serve(s, request("0", 1, 8, 1))
    full, window = stream.take()
    assert isinstance(full, BlockStored) and isinstance(window, BlockStored)
    assert full.block_hashes == window.block_hashes
    assert (full.group_idx, full.kv_cache_spec_kind) == (0, "full_attention")
    assert (window.group_idx, window.kv_cache_spec_kind) == (1, "sliding_window")
    assert window.kv_cache_spec_sliding_window == 8


def test_cached_states_are_told_of_under_vllms_name_for_them() -> None:
    stream = KvEventStream()
    groups = (GroupSpec(KvKind.FULL, SIZE), GroupSpec.checkpoints(SIZE))
    s = Scheduler(Limits(40, SIZE, 8, 64, groups=groups), vllm("0.33"), kv_events=stream)
    serve(s, request("0", 1, 9, 1))
    full, states = stream.take()[:2]
    assert isinstance(full, BlockStored) and isinstance(states, BlockStored)
    assert (states.group_idx, states.kv_cache_spec_kind) == (1, "mamba")
    assert states.block_hashes == full.block_hashes[1:]  # one state for both blocks
    assert states.token_count == full.token_count == 2 * SIZE


def test_a_stream_changes_no_decision() -> None:
    figures = []
    for stream in (None, KvEventStream()):
        s = Scheduler(Limits(12, SIZE, 4, 16), kv_events=stream)
        requests = [request(str(id), id % 3, 9 + id, 7) for id in range(9)]
        serve(s, *requests)
        figures.append([(one.cached_tokens, one.preemptions) for one in requests])
    assert figures[0] == figures[1]
