"""Cancellation at any instant: idempotent, references dropped once, nothing half written is found; churn."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.cache_policy import EVICTIONS, CachePolicy
from pagecast.sim.core.check import check
from pagecast.sim.core.engines.nano_vllm.profile import NANO_VLLM
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import Outcome
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.scheduler import Scheduler

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


@pytest.mark.parametrize(("keeps_planned", "found"), [(False, 16), (True, 32)])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_chunk_in_flight_is_found_where_the_engine_keeps_what_is_planned(
    depth: int, keeps_planned: bool, found: int
) -> None:
    assert VLLM.keeps_planned and not NANO_VLLM.keeps_planned
    limits = Limits(24, SIZE, 8, 16, pipeline_depth=depth)
    s = Scheduler(limits, replace(VLLM, keeps_planned=keeps_planned))
    s.submit(one := request("a", 1, 40, 2))
    s.commit(s.plan(0))
    plan = s.plan(0)
    gone(s, one)
    s.commit(plan)
    s.submit(other := request("b", 1, 40, 2))
    s.plan(0)
    assert other.cached_tokens == found, "the first chunk was computed, the second may not have been"


def test_what_a_failed_chunk_was_to_fill_is_not_found() -> None:
    s = scheduler(0)
    s.submit(request("a", 1, 40, 2))
    s.commit(s.plan(0))
    s.commit(s.plan(0), Outcome(failed=(("a", "out of memory"),)))
    s.submit(other := request("b", 1, 40, 2))
    s.plan(0)
    assert other.cached_tokens == 16


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
@given(data=st.binary(min_size=300, max_size=900), eviction=st.sampled_from(list(EVICTIONS)))
def test_with_everything_on_no_cancellation_loses_a_block(data: bytes, eviction: str) -> None:
    life = Life(
        endless(data),
        policy=CachePolicy(EVICTIONS[eviction](), watermarks=(0.6, 0.9), victim="least-progress"),
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


def test_tokens_in_flight_when_it_was_preempted_are_no_output() -> None:
    s = scheduler(1)
    s.submit(one := request("a", 1, 8, 10))
    first = s.plan(0)
    s.plan(0)
    s.commit(first)
    s.plan(0)
    s.preempt(one)
    gone(s, one)
    assert one.output_tokens == 1
    s = scheduler(1)
    s.submit(other := request("b", 2, 8, 10))
    s.plan(0)
    s.preempt(other)
    gone(s, other)
    assert other.output_tokens == 0
