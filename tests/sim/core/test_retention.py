"""Retention: TensorRT-LLM's priorities per token range, and how long they last."""

from __future__ import annotations

import pytest
from pagecast.sim.core.cache_policy import ByPriority, CachePolicy
from pagecast.sim.core.cache_rules import CacheRules
from pagecast.sim.core.check import check
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import EventKind
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import Outcome
from pagecast.sim.core.request import Request
from pagecast.sim.core.retention import FOREVER, BlockRange, Keep, Retention
from pagecast.sim.core.scheduler import Scheduler

SIZE = 4
SECOND = 1_000_000_000


class Server:
    def __init__(self, blocks: int, partial_reuse: str = "") -> None:
        limits = Limits(blocks, SIZE, 4, 4096, partial_reuse=partial_reuse)
        self.s = Scheduler(limits, CacheRules(CachePolicy(ByPriority())).applied(VLLM), log=True)
        self.count = 0
        self.now = 0

    def serve(self, text: int, tokens: int, retention: str = "", output: int = 1) -> int:
        """Serves the first tokens of a text. Returns how many were cached."""
        self.count += 1
        keys = BlockKeys.of_spans(SIZE, [(text, 0, tokens)], (1000 + text, 0))
        request = Request(str(self.count), keys, tokens, output)
        request.retention = Retention.parse(retention) if retention else None
        assert self.s.submit(request)
        while self.s.requests:
            plan = self.s.plan(self.now)
            assert plan is not None
            self.s.commit(plan, now=self.now)
            check(self.s)
        return request.cached_tokens

    def lines(self, kind: EventKind) -> list[str]:
        return [event.line().partition(" ")[2] for event in self.s.events or () if event.kind is kind]


def test_ranges_become_blocks_by_their_first_token() -> None:
    retention = Retention.parse("2-9:80 9-14:20:1.5 decode:10")
    assert retention.of_blocks(SIZE, 18) == (
        BlockRange(0, 1, None),
        BlockRange(1, 3, Keep(80)),
        BlockRange(3, 4, Keep(20, 3 * SECOND // 2)),
        BlockRange(4, 5, None),
        BlockRange(5, FOREVER, Keep(10)),
    )
    assert Retention.parse("0-:100").of_blocks(SIZE, 6) == (
        BlockRange(0, 2, Keep(100)),
        BlockRange(2, FOREVER, None),
    )


@pytest.mark.parametrize("text", ["0-5", "a", "5-5:10", "0-9:10 4-12:20", "0-4:101", "decode"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="retention"):
        Retention.parse(text)


def test_two_priorities_of_decoded_tokens_are_refused() -> None:
    with pytest.raises(BadInput, match="retention 'decode:20:5': field 'decode' is given twice"):
        Retention.parse("decode:10 0-4:80 decode:20:5")


def test_the_lowest_priority_goes_first_then_the_least_recently_used() -> None:
    server = Server(12)
    server.serve(1, 9, "0-:80")
    server.serve(2, 9, "0-:10")
    server.serve(3, 9)
    server.serve(4, 9)
    for text in (5, 6, 7):
        server.serve(text, 9, "0-:100")
    assert server.serve(1, 9) == 8
    assert server.serve(2, 9) == 0


def test_equal_priorities_are_least_recently_used() -> None:
    server = Server(9)
    for text in (1, 2, 3):
        server.serve(text, 9, "0-:50")
    server.serve(1, 9)
    server.serve(4, 9, "0-:50")
    server.serve(5, 9, "0-:50")
    assert server.serve(1, 9) == 8


def test_a_prompts_head_can_outlive_its_tail() -> None:
    server = Server(12)
    server.serve(1, 33, "0-8:90 8-:0")
    for text in range(2, 7):
        server.serve(text, 9)
    assert server.serve(1, 33) == 8


def test_only_leaves_are_evicted_so_a_low_head_waits_for_its_tail() -> None:
    server = Server(9)
    server.serve(1, 17, "0-8:0 8-:90")
    server.serve(2, 9)
    server.serve(3, 9)
    assert server.serve(1, 17) == 16


def test_generated_tokens_have_a_priority_of_their_own() -> None:
    for decode, kept in (("decode:90", 20), ("decode:0", 8)):
        server = Server(12)
        server.serve(1, 8, f"0-:90 {decode}", output=14)
        for text in range(2, 7):
            server.serve(text, 9)
        keys = BlockKeys.of_spans(SIZE, [(1, 0, 8), (1001, 0, 13)], (7, 0))
        request = Request("again", keys, 21, 1)
        server.s.submit(request)
        server.s.plan(0)
        assert request.cached_tokens == kept


def test_who_reuses_a_block_sets_its_priority_and_who_asks_for_nothing_leaves_it() -> None:
    for again, kept in (("", 8), ("0-:0", 0), ("0-4:0 4-:90", 8)):
        server = Server(12)
        server.serve(1, 9, "0-:90")
        server.serve(1, 9, again)
        for text in range(2, 8):
            server.serve(text, 9)
        assert server.serve(1, 9) == kept, again


def test_a_priority_ends_so_long_after_the_blocks_were_freed() -> None:
    for wait, kept in ((29, 8), (31, 0)):
        server = Server(12)
        server.now = 100 * SECOND
        server.serve(1, 9, "0-:90:30")
        server.now += wait * SECOND
        server.serve(2, 9, "0-:36")
        for text in range(3, 8):
            server.serve(text, 9, "0-:36")
        assert server.serve(1, 9) == kept
        assert bool(server.lines(EventKind.REVERTED)) == (not kept)


def test_a_failed_requests_duration_begins_when_it_fails() -> None:
    server = Server(40)
    one = Request("a", BlockKeys.of_spans(SIZE, [(1, 0, 16)], (1001, 0)), 16, 10)
    one.retention = Retention.parse("0-:80:10")
    server.s.submit(one)
    server.s.commit(server.s.plan(0), now=0)
    server.s.commit(server.s.plan(0), Outcome(failed=(("a", "out of memory"),)), now=5 * SECOND)
    assert server.s.memory.expiry.due_ns == 15 * SECOND


def test_a_reverted_block_stands_behind_all_others_of_the_default_priority() -> None:
    server = Server(9)
    server.serve(1, 9, "0-:90:30")
    server.serve(2, 9)
    server.now = 31 * SECOND
    for text in (3, 4, 5):
        server.serve(text, 9)
    assert server.serve(1, 9) == 8
    assert server.serve(2, 9) == 0


@pytest.mark.parametrize(("wait", "kept"), [(29, 8), (31, 0)])
def test_reuse_starts_the_duration_again_that_it_asks_for(wait: int, kept: int) -> None:
    server = Server(12)
    server.serve(1, 9, "0-:90:30")
    server.now = 20 * SECOND
    server.serve(1, 9, "0-:90:30")
    server.now += wait * SECOND
    for text in range(2, 8):
        server.serve(text, 9, "0-:36")
    assert server.serve(1, 9) == kept


def test_reuse_that_asks_for_nothing_keeps_the_priority_for_ever() -> None:
    """A claim without a duration clears it (`claimBlock` of TensorRT-LLM's evictionPolicy.cpp)."""
    server = Server(12)
    server.serve(1, 17, "0-:90:30")
    server.serve(1, 9)
    server.now = 100 * SECOND
    for text in range(2, 8):
        server.serve(text, 9, "0-:36")
    assert server.serve(1, 17) == 8, "what was not reused has lost its priority"


def test_evictions_say_the_priority_and_are_counted_by_it() -> None:
    server = Server(6)
    server.serve(1, 9, "0-:20")
    server.serve(2, 17, "0-:60")
    server.serve(3, 17)
    assert any(line.endswith("priority=20") for line in server.lines(EventKind.EVICTED))
    figures = server.s.memory.eviction_figures()
    assert figures["evicted_by_priority"]["20"] == 2


# ---- TensorRT-LLM's example in docs/source/examples/kvcacheretentionconfig.md


@pytest.mark.parametrize(("retention", "kept"), [("0-4:100 decode:35", 4), ("", 0)])
def test_tensorrt_llms_example_keeps_the_first_four_tokens(retention: str, kept: int) -> None:
    """Priority 100 for the first four tokens of each of four prompts, a system prompt; no end."""
    server = Server(12)
    for text in range(4):
        server.serve(text, 9, retention, output=8)
    for text in range(4, 8):
        server.serve(text, 21)
    assert [server.serve(text, 9) for text in range(4)] == [kept] * 4


# ---- the cases of TensorRT-LLM's own tests: cpp/tests/unit_tests/batch_manager/kvCacheManagerTest.cpp


def test_tensorrt_llms_case_of_block_priorities() -> None:
    """BlockManagerBlockPriorityTest."""
    server = Server(4)
    server.serve(0, 8, "0-4:90 4-8:10 decode:20")
    server.serve(1, 8)
    server.serve(2, 8, "0-:20 decode:20")
    assert server.serve(1, 8) == 4
    assert server.serve(0, 8) == 4
    assert server.serve(2, 8) == 0


def test_tensorrt_llms_case_of_decode_priorities() -> None:
    """KVCacheManagerDecodeBlockPriorityTest."""
    server = Server(8)
    server.serve(0, 12, "0-:5 decode:90", output=2)
    server.serve(1, 12, "0-:90 decode:5", output=2)
    server.serve(2, 12)
    assert server.serve(0, 12) == 8


@pytest.mark.parametrize(("partial_reuse", "cached"), [("copy", 11), ("", 8)])
def test_tensorrt_llms_case_of_timed_eviction(partial_reuse: str, cached: int) -> None:
    """KVCacheManagerTimedEvictionTest; its 11 tokens are two blocks and three tokens of a third."""
    server = Server(8, partial_reuse)
    server.serve(0, 12, "0-:80:0.01 decode:80")
    server.serve(1, 12, "0-:50 decode:80")
    server.now = SECOND // 20
    server.serve(2, 12)
    assert server.serve(1, 12) == cached


def test_tensorrt_llms_case_of_timed_decode_eviction() -> None:
    """KVCacheManagerDecodeTimedEvictionTest."""
    server = Server(8)
    server.serve(0, 12, "0-:50 decode:50", output=4)
    server.serve(1, 12, "decode:100:0.02", output=4)
    server.now = SECOND // 20
    server.serve(2, 8)
    assert server.serve(1, 12) == 8
