"""Cancellation at any instant: idempotent, references dropped once, nothing half written is found; churn."""

import random
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.check import check
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import Scope
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.rules.cache_policy import EVICTIONS, CachePolicy
from pagecast.sim.core.rules.profiles import VLLM
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.core.tenants import Tenants

sys.path.insert(0, str(Path(__file__).parent))

from driver import Life, endless

SIZE = 4


def request(id: str, text: int, prompt: int, output: int, parent: Request | None = None) -> Request:
    keys = BlockKeys.of_spans(SIZE, [(text, 0, prompt)], (1000 + len(id) * 100 + ord(id[-1]), 0))
    return Request(id, keys, prompt, output, parent=parent)


def scheduler(depth: int, **more: object) -> Scheduler:
    return Scheduler(Limits(24, SIZE, 8, 16, pipeline_depth=depth, **more), VLLM)


def gone(s: Scheduler, one: Request) -> None:
    """Cancels a request twice; the second time nothing changes."""
    holders = s.memory.used_blocks
    assert s.cancel(one.id, 0)
    check(s)
    after = s.memory.used_blocks, len(s.requests)
    assert after[0] <= holders
    assert not s.cancel(one.id, 0)
    assert (s.memory.used_blocks, len(s.requests)) == after
    assert one.state is State.CANCELLED
    assert one.swapped_tokens == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_waiting(depth: int) -> None:
    s = scheduler(depth)
    s.submit(one := request("a", 1, 8, 2))
    gone(s, one)
    assert s.plan(0) is None


@pytest.mark.parametrize("depth", [0, 1])
def test_with_a_chunk_in_flight_nothing_of_it_is_found(depth: int) -> None:
    s = scheduler(depth)
    s.submit(one := request("a", 1, 40, 2))
    s.commit(s.plan(0))
    plan = s.plan(0)
    gone(s, one)
    s.commit(plan)
    s.submit(other := request("b", 1, 40, 2))
    s.plan(0)
    assert other.cached_tokens == 16, "the first chunk was computed, the second may not have been"


@pytest.mark.parametrize("depth", [0, 1])
def test_decoding_only_full_computed_blocks_stay(depth: int) -> None:
    s = scheduler(depth)
    s.submit(one := request("a", 1, 8, 20))
    plans = []
    for _ in range(7):
        plans.append(s.plan(0))
        if len(plans) > depth:
            s.commit(plans.pop(0))
    gone(s, one)
    for plan in plans:
        s.commit(plan)
    assert s.memory.used_blocks == 0
    keys = BlockKeys.of_spans(SIZE, [(1, 0, 8), (*one.keys.output, 19)], (5, 0))
    s.submit(again := Request("b", keys, 27, 1))
    s.plan(0)
    assert again.cached_tokens in (8, 12)


def test_a_fork_and_its_parent_in_either_order() -> None:
    for first in "pf":
        s = scheduler(0)
        s.submit(parent := request("p", 1, 10, 8))
        s.submit(fork := request("f", 1, 10, 8, parent))
        s.commit(s.plan(0))
        s.commit(s.plan(0))
        assert fork.state in (State.PREFILL, State.DECODE)
        gone(s, parent if first == "p" else fork)
        gone(s, fork if first == "p" else parent)
        assert s.memory.used_blocks == 0


def test_a_fork_held_back_goes_on_when_its_parent_is_cancelled() -> None:
    s = scheduler(0)
    s.submit(parent := request("p", 1, 40, 8))
    s.submit(fork := request("f", 1, 40, 2, parent))
    s.commit(s.plan(0))
    gone(s, parent)
    while s.requests:
        s.commit(s.plan(0))
    assert fork.state is State.FINISHED


def test_swapped_out() -> None:
    s = scheduler(0, swap_blocks=50)
    made = [request(id, number, 16, 40) for number, id in enumerate("abcd")]
    for one in made:
        s.submit(one)
    while not any(one.swapped_tokens for one in made):
        s.commit(s.plan(0))
    gone(s, next(one for one in made if one.swapped_tokens))
    while s.requests:
        s.commit(s.plan(0))
    assert s.lifecycle.swap.free_blocks == 50


ALL = {
    "partial_reuse": "copy",
    "swap_blocks": 6,
}


@settings(max_examples=40, deadline=None)
@given(data=st.binary(min_size=300, max_size=900), eviction=st.sampled_from(EVICTIONS))
def test_with_everything_on_no_cancellation_loses_a_block(data: bytes, eviction: str) -> None:
    life = Life(
        endless(data),
        policy=CachePolicy(eviction, watermarks=(0.6, 0.9), victim="least-progress"),
        more=ALL,
        tenants="a:weight=1",
    )
    while life.operations < len(data) // 4:
        life.operate()
        while life.operations % 3 == 0 and life.s.requests and next(life.draw) < 100:
            life.cancel()
            break
    life.drain()
    assert life.s.lifecycle.swap.free_blocks == 6


# ---- churn


class Churn:
    """Requests that come, are cancelled at random instants, and come again."""

    def __init__(self, seed: int, eviction: str) -> None:
        self.random = random.Random(seed)
        limits = Limits(
            400,
            16,
            24,
            512,
            pipeline_depth=1,
            tenants=Tenants.parse("a:weight=2,blocks=300 *:weight=1"),
            **ALL,
        )
        rules = CachePolicy(eviction, watermarks=(0.8, 0.95))
        self.s = Scheduler(limits, rules.applied(VLLM))
        self.count = self.cancelled = self.retried = 0
        self.ended = 0
        self.plans: list = []
        self.doomed: dict[str, int] = {}
        self.step = 0

    def submit(self, text: int, *, retry: bool = False) -> None:
        r = self.random
        tenant = "abc"[text % 3]
        spans = [(1, 0, 64), (10 + text % 40, 0, r.randrange(1, 120))]
        keys = BlockKeys.of_spans(16, spans, (1000 + self.count, 0), Scope(salt=tenant))
        made = Request(str(self.count), keys, sum(span[2] for span in spans), r.randrange(1, 60))
        made.tenant = tenant
        self.count += 1
        self.retried += retry
        assert self.s.submit(made)
        if r.random() < 0.3:
            self.doomed[made.id] = self.step + r.randrange(0, 60)

    def run(self, requests: int) -> None:
        """Until so many have come and all have ended."""
        s, r = self.s, self.random
        while self.count < requests or s.requests:
            self.step += 1
            while self.count < requests and len(s.requests) < 60:
                self.submit(r.randrange(120))
            plan = s.plan(self.step)
            if plan is not None:
                self.plans.append(plan)
            for id in [id for id, at in self.doomed.items() if at <= self.step]:
                del self.doomed[id]
                if s.cancel(id, self.step):
                    self.cancelled += 1
                    self.ended += 1
                    if self.count < requests and r.random() < 1 / 3:
                        self.submit(int(id) % 120, retry=True)
            while self.plans and (plan is None or len(self.plans) > 1):
                self.ended += len(s.commit(self.plans.pop(0), now=self.step))
        while self.plans:
            self.ended += len(s.commit(self.plans.pop(0), now=self.step))

    def proof(self) -> None:
        """Nothing is lost, and every block is home."""
        check(self.s)
        assert self.s.memory.used_blocks == 0
        assert self.s.lifecycle.swap.free_blocks == ALL["swap_blocks"]
        assert self.ended == self.count


@pytest.mark.parametrize("eviction", ["lru", "cost"])
def test_churn_brings_every_block_home(eviction: str) -> None:
    churn = Churn(1, eviction)
    churn.run(1500)
    churn.proof()
    assert churn.cancelled > 200
    assert churn.retried > 50


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_churn_of_a_million_requests_in_flat_memory() -> None:
    churn = Churn(2, "priority")
    churn.run(20_000)
    tracemalloc.start()
    churn.run(40_000)
    before, _ = tracemalloc.get_traced_memory()
    for goal in range(60_000, 1_000_001, 20_000):
        churn.run(goal)
        check(churn.s)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    churn.proof()
    assert churn.count == 1_000_000
    assert churn.cancelled > 0.2 * churn.count
    assert after < 1.2 * before + 2e6, (before, after)
