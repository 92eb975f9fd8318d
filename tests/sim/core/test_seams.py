"""Seams of the core: each new rule, group or probe is a few lines, and the core is not touched.

`docs/extending.md` leads through these examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import cast

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.check import check
from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.group_spec import KINDS, Found, GroupSpec, KindRules, KvKind
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.eviction_orders import Content, EvictionOrder
from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.memory.ranked_eviction import RankedEviction
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.core.step import Step
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


def request(id: str, text: int, prompt: int, output: int) -> Request:
    """A request for the first `prompt` tokens of a text; its output is its own."""
    keys = BlockKeys.of_spans(SIZE, [(text, 0, prompt)], (1000 + int(id), 0))
    return Request(id, keys, prompt, output)


def scheduler(profile: Profile = VLLM, blocks: int = 40, seqs: int = 8, depth: int = 0) -> Scheduler:
    return Scheduler(Limits(blocks, SIZE, seqs, 64, pipeline_depth=depth), profile)


def serve(s: Scheduler, *requests: Request) -> list[str]:
    """Serves requests to the end, checking every invariant after each step. Returns who ended, in order."""
    for each in requests:
        assert s.submit(each)
    ended: list[str] = []
    flying: list[StepPlan] = []
    while s.requests:
        plan = s.plan(0)
        if plan is not None:
            flying.append(plan)
        if plan is None or len(flying) > s.limits.pipeline_depth:
            ended += [each.id for each in s.commit(flying.pop(0))]
        check(s)
    assert s.memory.used_blocks == 0
    return ended


# ---- an eviction order


class FewestReaders(EvictionOrder):
    """Of all blocks that no other depends on, those that the fewest requests have read."""

    def level(self, content: Content) -> float:
        return content.uses


LFU = replace(VLLM, eviction=lambda limits: RankedEviction(FewestReaders()))


def test_least_frequently_used_content_is_evicted_first() -> None:
    """A prompt asked for three times survives one asked for later, but once; under LRU it does not."""
    kept = {}
    for name, profile in {"lfu": LFU, "lru": VLLM}.items():
        s = scheduler(profile, blocks=9)
        for id, text in enumerate((1, 1, 1, 2, 3)):
            serve(s, request(str(id), text, 17, 2))
        again = request("9", 1, 17, 2)
        serve(s, again)
        kept[name] = again.cached_tokens
    assert kept == {"lfu": 16, "lru": 0}


LIVES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 9)), min_size=4, max_size=14)


@settings(max_examples=120, deadline=None)
@given(lives=LIVES, blocks=st.integers(8, 20), depth=st.integers(0, 1))
def test_an_eviction_order_never_loses_a_block(
    lives: list[tuple[int, int, int]], blocks: int, depth: int
) -> None:
    s = scheduler(LFU, blocks, depth=depth)
    serve(s, *(request(str(id), *life) for id, life in enumerate(lives)))


# ---- an admission rule


class ReserveOutput:
    """Admits a request where its prompt and output fit beside what the running ones may still take."""

    def admits(self, step: Step, memory: Memory, queue: Queue, request: Request, hit: Hit) -> bool:
        reserved = sum(memory.missing(other, other.total_tokens - 1) for other in step.running.requests)
        return memory.fits(request, hit, request.total_tokens - 1, reserved)


def test_requests_admitted_with_room_for_their_output_are_never_preempted() -> None:
    crowd = [request(str(id), 10 + id, 9, 24) for id in range(6)]
    hopeful = scheduler(blocks=20)
    serve(hopeful, *crowd)
    assert hopeful.preemptions > 0
    careful = scheduler(replace(VLLM, admission=lambda limits: ReserveOutput()), blocks=20)
    serve(careful, *(request(str(id), 10 + id, 9, 24) for id in range(6)))
    assert careful.preemptions == 0


# ---- a victim rule


class LeastProgress:
    """Preempts the running request that would lose the fewest computed tokens."""

    def choose(self, step: Step, memory: Memory, queue: Queue) -> Request:
        return min(step.running.requests, key=step.running.planned)


def test_the_request_with_the_least_progress_is_preempted() -> None:
    s = scheduler(replace(VLLM, victim=lambda limits: LeastProgress()), blocks=11)
    old_and_short = request("0", 1, 3, 30)
    new_and_long = request("1", 2, 20, 20)
    serve(s, old_and_short, new_and_long)
    assert old_and_short.preemptions > 0
    assert new_and_long.preemptions == 0


# ---- an order of the queue


class LongestPrefixFirst:
    """Admits the request with the longest cached prefix first; of equals, the one that came first."""

    stable = False

    def __init__(self) -> None:
        self.waiting: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self.waiting)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        self.waiting[:0] = requests

    def first(self, memory: Memory) -> Request | None:
        return max(self.waiting, key=lambda request: memory.find(request).tokens, default=None)

    def pass_over(self, request: Request) -> None:
        """The first is looked for each time."""

    def bring_back(self, requests: Sequence[Request]) -> None:
        self.waiting[:0] = requests

    def remove(self, request: Request) -> None:
        self.waiting.remove(request)


def test_the_longest_cached_prefix_is_admitted_first() -> None:
    s = scheduler(replace(VLLM, order=lambda limits: LongestPrefixFirst()), seqs=1)
    serve(s, request("0", 1, 17, 2))
    ended = serve(s, request("1", 2, 17, 2), request("2", 1, 9, 2), request("3", 1, 17, 2))
    assert ended == ["3", "2", "1"]


def test_an_order_serves_requests_that_are_passed_over_too() -> None:
    limits = Limits(40, SIZE, 8, 64, max_loras=1)
    s = Scheduler(limits, replace(VLLM, order=lambda limits: LongestPrefixFirst()))
    requests = [request(str(number), number, 9, 2) for number in range(3)]
    for each, adapter in zip(requests, "xyx", strict=True):
        each.adapter = adapter
    assert sorted(serve(s, *requests)) == ["0", "1", "2"]


# ---- a second KV group


TWO = (GroupSpec(KvKind.FULL, SIZE), GroupSpec(KvKind.LATENT, SIZE))
"""Two groups of layers with tables of their own, from one pool."""


def two_groups(blocks: int = 40, depth: int = 0) -> Scheduler:
    return Scheduler(Limits(blocks, SIZE, 8, 64, pipeline_depth=depth, groups=TWO))


def test_two_groups_take_twice_the_blocks_and_share_hits() -> None:
    s = two_groups()
    first = request("0", 1, 10, 8)
    s.submit(first)
    plan = s.plan(0)
    assert plan is not None and plan.used_blocks == 6
    assert not set(s.memory.blocks(first, 0)) & set(s.memory.blocks(first, 1))
    s.commit(plan)
    serve(s)
    again = request("1", 1, 10, 8)
    serve(s, again)
    assert again.cached_tokens == 8


def test_a_request_that_never_fits_in_all_groups_is_rejected() -> None:
    s = two_groups(12)
    assert not s.submit(request("0", 1, 30, 3))
    assert s.submit(request("1", 1, 20, 4))


@settings(max_examples=60, deadline=None)
@given(lives=LIVES, blocks=st.integers(16, 40), depth=st.integers(0, 1))
def test_two_groups_never_lose_a_block(lives: list[tuple[int, int, int]], blocks: int, depth: int) -> None:
    s = two_groups(blocks, depth)
    serve(s, *(request(str(id), *life) for id, life in enumerate(lives)))


# ---- a kind of KV group


class Recent(KindRules):
    """Layers that read the block of the next token and the one before it."""

    keeps_all: bool = False
    windowed: bool = True
    found: Found = Found.FROM_END

    def skipped_tokens(self, spec: GroupSpec, computed: int) -> int:
        return max(computed // spec.block_size - 1, 0) * spec.block_size

    def window_blocks(self, spec: GroupSpec) -> int:
        return 1

    def reachable(self, spec: GroupSpec, aligned: int, *, dropping: bool) -> int:
        return 1 + dropping


class OurKind(Enum):
    RECENT = "recent blocks"


RECENT = cast(KvKind, OurKind.RECENT)


def test_a_new_kind_of_group_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds two blocks of a long request, and a longer prompt goes on from where it ended."""
    monkeypatch.setitem(KINDS, RECENT, Recent())
    groups = (GroupSpec(KvKind.FULL, SIZE), GroupSpec(RECENT, SIZE, 2 * SIZE))
    s = Scheduler(Limits(40, SIZE, 8, 64, groups=groups), VLLM)
    first = request("0", 1, 32, 8)
    s.submit(first)
    for _ in range(4):
        plan = s.plan(0)
        assert plan is not None
        s.commit(plan)
        check(s)
    assert s.memory.blocks(first, 1).count(s.limits.num_blocks) == 7
    assert s.memory.used_blocks == 9 + 2
    serve(s)
    again = request("1", 1, 40, 2)
    serve(s, again)
    assert again.cached_tokens == 32


# ---- several tokens per decode step


class TwoDrafts:
    """Every decode step verifies two draft tokens beside the next token."""

    lookahead = 0
    reserved = 0
    recomputes_block = False
    most = 2
    padding = 2

    def draft(self, request: Request, requests: int) -> int:
        return 2


def test_a_request_computes_three_tokens_per_decode_step() -> None:
    s = Scheduler(Limits(40, SIZE, 8, 64), drafter=TwoDrafts())
    one = request("0", 1, 10, 10)
    s.submit(one)
    computed = []
    outputs = []
    while s.requests:
        plan = s.plan(0)
        assert plan is not None
        computed += [(start, tokens) for _, start, tokens in plan.work()]
        # Every other step one of the two draft tokens is rejected.
        accepted = (("0", 1),) if len(computed) % 2 == 0 and plan.chunks[0].drafts == 2 else ()
        s.commit(plan, Outcome(accepted=accepted))
        check(s)
        outputs.append(one.known_tokens - 10)
    assert computed == [(0, 10), (10, 3), (12, 3), (15, 3), (17, 3)]
    assert outputs == [1, 3, 6, 8, 10]
    assert one.state is State.FINISHED and s.memory.used_blocks == 0


# ---- a probe


@settings(max_examples=40, deadline=None)
@given(
    lives=st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 200), st.integers(1, 150)), min_size=1, max_size=20
    ),
    looks=st.lists(st.integers(1, 4_000_000_000), max_size=30),
    blocks=st.integers(40, 120),
    pipelined=st.booleans(),
)
def test_a_probe_sees_the_pool_as_it_is_and_changes_nothing(
    lives: list[tuple[float, int, int]], looks: list[int], blocks: int, pipelined: bool
) -> None:
    """Read at any times, the replay is the same, and what is read is what stepping one by one shows."""
    rows = DataFrame(sorted(lives), columns=["arrival_s", "input_tokens", "output_tokens"])
    trace = Trace("lives", rows)
    unseen = probed(trace, blocks, pipelined, [], fast_forward=True)
    seen = probed(trace, blocks, pipelined, sorted(set(looks)), fast_forward=True)
    stepped = probed(trace, blocks, pipelined, sorted(set(looks)), fast_forward=False)
    assert_frame_equal(unseen[0], seen[0])
    assert seen[1] == stepped[1]


def probed(
    trace: Trace, blocks: int, pipelined: bool, looks: list[int], *, fast_forward: bool
) -> tuple[DataFrame, list[tuple[int, int]]]:
    """A replay's requests, and the occupancy and running requests that a probe read at these times."""
    scenario = Scenario(num_gpu_blocks=blocks, max_num_seqs=8, async_scheduling=pipelined, costs="roofline")
    spec = ReplicaSpec.of(scenario, TraceWorkload(trace))
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
            seen.append((s.memory.used_blocks, len(s.running.requests)))

    env.process(probe())
    env.run()
    return recorder.requests(), seen
