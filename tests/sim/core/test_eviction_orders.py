"""Eviction orders: what each keeps, that none loses a block, and that the heap decides as a plain search."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.cache_policy import EVICTIONS, CachePolicy, CostAware, Eviction, Fifo, Lfu, Lru, Slru
from pagecast.sim.core.cache_rules import CacheRules
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.extent import Extent
from pagecast.sim.core.memory.ranked_eviction import RankedEviction
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler

sys.path.insert(0, str(Path(__file__).parent))

from driver import Life, endless

SIZE = 4
SETTINGS = {name: kind() for name, kind in EVICTIONS.items()} | {"slru": Slru(0.3), "cost": CostAware(0.4)}
RANKED = [name for name in EVICTIONS if name != "lru"]


class Server:
    """A small replica that serves one prompt at a time."""

    def __init__(self, blocks: int, eviction: Eviction, **estimates: object) -> None:
        rules = CacheRules(CachePolicy(eviction), **estimates).applied(VLLM)
        self.s = Scheduler(Limits(blocks, SIZE, 4, 4096), rules)
        self.count = 0

    def serve(self, text: int, tokens: int) -> int:
        """Serves the first tokens of a text. Returns how many were cached."""
        self.count += 1
        keys = BlockKeys.of_spans(SIZE, [(text, 0, tokens)], (1000 + self.count, 0))
        request = Request(str(self.count), keys, tokens, 1)
        assert self.s.submit(request)
        while self.s.requests:
            plan = self.s.plan(0)
            assert plan is not None
            self.s.commit(plan)
        return request.cached_tokens


def test_lfu_keeps_what_was_reused_most() -> None:
    server = Server(8, Lfu())
    for text in (1, 1, 1, 2, 3, 4, 5):
        server.serve(text, 9)
    assert server.serve(1, 9) == 8
    assert server.serve(3, 9) < 8


def test_fifo_drops_what_was_written_first_however_often_it_is_used() -> None:
    for order, kept in ((Fifo(), False), (Lru(), True)):
        server = Server(8, order)
        for text in (1, 2, 1, 1, 3, 1, 4):
            server.serve(text, 9)
        assert (server.serve(1, 9) == 8) == kept, order


def test_segmented_lru_survives_a_scan_that_empties_lru() -> None:
    for order, kept in ((Slru(), 8), (Lru(), 0)):
        server = Server(12, order)
        server.serve(1, 9)
        server.serve(1, 9)
        for text in range(10, 20):
            server.serve(text, 9)
        assert server.serve(1, 9) == kept, order


def test_protected_blocks_beyond_the_share_are_evicted_as_others() -> None:
    server = Server(12, Slru(0.2))
    for text in (1, 1, 2, 2, 3, 3):
        server.serve(text, 9)
    for text in range(10, 14):
        server.serve(text, 9)
    assert server.serve(3, 9) == 8
    assert server.serve(1, 9) == 0


def test_the_cost_aware_order_keeps_what_takes_longest_to_compute_again() -> None:
    """Texts used once, the deep one earliest: LRU drops it, the cost-aware order keeps its head."""
    for order, kept in ((CostAware(1.0), 16), (Lru(), 0)):
        server = Server(12, order, recompute=lambda block: 1.0 + 100 * block)
        server.serve(1, 21)
        for text in range(10, 18):
            server.serve(text, 9)
        assert server.serve(1, 21) >= kept
        assert (server.serve(1, 21) > 0) == (kept > 0) or order == Lru()


def test_a_prefix_owns_no_more_than_its_cap() -> None:
    kept = {}
    for cap in (1.0, 0.25):
        server = Server(24, CostAware(cap), recompute=lambda block: 1.0 + 100 * block)
        server.serve(1, 80)
        for text in range(10, 14):
            server.serve(text, 9)
        kept[cap] = server.serve(1, 80)
    assert kept[1.0] > kept[0.25] >= 6 * SIZE


def test_reuse_is_learned() -> None:
    """Content that is never asked for again loses its value against content that is."""
    server = Server(16, CostAware())
    order = server.s.memory.eviction.order
    for text in range(40):
        server.serve(1, 9)
        server.serve(100 + text, 9)
    assert order.probability(0) < 0.2 < 0.8 < order.probability(8)


@settings(max_examples=25, deadline=None)
@given(data=st.binary(min_size=300, max_size=900), order=st.sampled_from(RANKED), ids=st.booleans())
def test_no_order_loses_a_block(data: bytes, order: str, ids: bool) -> None:
    life = Life(endless(data), policy=CachePolicy(SETTINGS[order]), ids=ids)
    while life.operations < len(data) // 4:
        life.operate()
    life.drain()


class Search:
    """Finds the next extent by looking at all of them."""

    def next(self: RankedEviction) -> Extent:  # type: ignore[misc]
        for blank in self._blank:
            return blank
        while True:
            leaves = [extent for extent in self._entries if extent.evictable()]
            extent = min(leaves, key=lambda extent: (extent.level, extent.used, self._entries[extent]))
            now = self.order.level_now(extent, extent.level)
            if now is None:
                return extent
            extent.level, extent.used = now, self._count


@pytest.mark.parametrize("order", RANKED)
@settings(max_examples=8, deadline=None)
@given(data=st.binary(min_size=600, max_size=900))
def test_the_heap_decides_as_a_search_of_all_extents(order: str, data: bytes) -> None:
    events = []
    for searching in (False, True):
        life = Life(endless(data), policy=CachePolicy(SETTINGS[order]), log=True)
        if searching:
            eviction = life.s.memory.eviction
            eviction.__class__ = type("Searching", (Search, type(eviction)), {})
        while life.operations < 150:
            life.operate()
        life.drain()
        events.append([event.line() for event in life.s.events])
    assert events[0] == events[1]


def test_a_shared_prefix_with_many_followers_is_not_searched_again_and_again(monkeypatch) -> None:
    """The work per evicted block does not grow with the number of conversations that share a prompt."""
    looked = {}
    for conversations in (50, 400):
        server = Server(8 + 2 * conversations, Fifo())
        for number in range(conversations):
            spans = [(1, 0, 16), (10 + number, 0, 8)]
            keys = BlockKeys.of_spans(SIZE, spans, (5000 + number, 0))
            server.s.submit(Request(f"c{number}", keys, 24, 1))
            server.s.commit(server.s.plan(0))
        count = 0
        plain = Extent.evictable

        def counted(extent: Extent, plain=plain) -> int:
            nonlocal count
            count += 1
            return plain(extent)

        monkeypatch.setattr(Extent, "evictable", counted)
        server.s.evict(2 * conversations)
        monkeypatch.setattr(Extent, "evictable", plain)
        looked[conversations] = count / conversations
    assert looked[400] < 2 * looked[50] + 2


def test_limits_reach_the_order() -> None:
    made = replace(VLLM, eviction=CacheRules(CachePolicy(Slru())).applied(VLLM).eviction)
    assert made.eviction(Limits(10)).blanks_first
    assert not made.eviction(Limits(10, caching=False)).blanks_first
