"""Turns a string of bytes into a life of the core: a configuration, then operations.

Bytes shrink well and cost little, so hypothesis can drive long sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pagecast.sim.core.cache_policy import ByPriority, CachePolicy
from pagecast.sim.core.cache_rules import CacheRules
from pagecast.sim.core.check import check, check_counts
from pagecast.sim.core.engines.registry import PROFILES
from pagecast.sim.core.engines.sglang.settings import SglangSettings
from pagecast.sim.core.engines.trtllm.settings import CHUNKING, TrtllmSettings
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.identity.content import token_ids
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import Scope
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.reference import Reference, Req
from pagecast.sim.core.request import Request
from pagecast.sim.core.retention import FOREVER, Keep, Retention
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.core.tenants import Tenants

RETENTIONS = (
    Retention(((0, 8, Keep(80)),)),
    Retention(((0, 5, Keep(90, 40)), (9, FOREVER, Keep(10)))),
    Retention(((4, FOREVER, Keep(60, 15)),), Keep(5)),
    Retention((), Keep(70, 100)),
)
SCOPES = (Scope(), Scope(salt="b"))


def limits_from(draw: Iterator[int], profile: str) -> Limits:
    """A small replica, so that pressure is the rule."""
    seqs = 1 + next(draw) % 6
    if profile == "sglang":
        return sglang_limits_from(draw, seqs)
    trtllm, least = None, 0
    if profile.startswith("trtllm"):
        unit, equal = next(draw), next(draw)
        trtllm = TrtllmSettings(next(draw) % 4 != 0, CHUNKING[equal % 2], 1 + unit % 5 if unit % 2 else None)
        least = 8
    return Limits(
        num_blocks=3 + next(draw) % 24,
        block_size=(1, 2, 3, 4, 4, 8)[next(draw) % 6],
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs + next(draw) % 24, least),
        policy="priority" if next(draw) % 3 == 0 and profile == "vllm" else "fcfs",
        pipeline_depth=0 if profile == "nano-vllm" else next(draw) % 2,
        caching=next(draw) % 8 != 0,
        engine=trtllm,
    )


def sglang_limits_from(draw: Iterator[int], seqs: int) -> Limits:
    """A small replica under SGLang's rules."""
    size = (1, 1, 2, 4, 4, 8)[next(draw) % 6]
    chunked = next(draw) % 4 != 0
    return Limits(
        num_blocks=(48 + next(draw) % 48) // size,
        block_size=size,
        max_num_seqs=seqs,
        max_num_batched_tokens=size + next(draw) % 24,
        policy="lpm" if next(draw) % 2 else "fcfs",
        pipeline_depth=next(draw) % 2,
        caching=next(draw) % 8 != 0,
        engine=SglangSettings(
            max_prefill_tokens=8 + next(draw) % 64,
            chunked_prefill=chunked,
            schedule_conservativeness=(0.1, 0.3, 1.0)[next(draw) % 3],
            mixed_chunk=chunked and next(draw) % 2 == 0,
            ignore_eos=next(draw) % 3 == 0,
            eviction=("lru", "lfu", "slru", "fifo", "mru", "filo", "priority")[next(draw) % 7],
        ),
    )


class Life:
    """A scheduler with everything that ever happened to it; `operate` does one random operation."""

    profiles = PROFILES

    def __init__(
        self,
        draw: Iterator[int],
        profile: str = "vllm",
        *,
        ids: bool = False,
        policy: CachePolicy | None = None,
        log: bool = False,
        tenants: str | None = None,
        more: dict[str, object] | None = None,
    ) -> None:
        self.draw = draw
        self.limits = limits_from(draw, profile)
        self.limits = replace(self.limits, **(more or {}))
        if tenants is not None:
            self.limits = replace(self.limits, policy="fcfs", tenants=Tenants.parse(tenants))
        self.retains = policy is not None and isinstance(policy.eviction, ByPriority)
        rules = CacheRules(policy or CachePolicy()).applied(self.profiles[profile])
        self.s = Scheduler(self.limits, rules, log=(next(draw) % 4 == 0) | log)
        self.ids = ids
        self.plans: list = []
        self.count = 0
        self.operations = 0
        self.ended: list[str] = []
        self.writing: dict[str, int] = {}  # the text each live request generates
        self.twins: dict[str, Req] = {}

    # ---- operations

    def operate(self) -> None:
        kind = next(self.draw)
        self.operations += 1
        if kind < 150:
            self.step()
        elif kind < 215:
            self.submit(f"r{self.count}")
            self.count += 1
        elif kind < 222 and self.ended:
            self.submit(self.ended[next(self.draw) % len(self.ended)])
        elif kind < 236:
            self.cancel()
        elif kind < 246:
            self.preempt()
        else:
            self.evict(next(self.draw) % 8)
        check_counts(self.s)

    def submit(self, id: str) -> None:
        if id in self.s.requests:
            return
        request, twin = self.make(id)
        self.twins[id] = twin
        self.s.submit(request)

    def make(self, id: str) -> tuple[Request, Req]:
        d = self.draw
        self.writing = {id: text for id, text in self.writing.items() if id in self.s.requests}
        spans = []
        for _ in range(1 + next(d) % 3):
            # Few texts and offsets, so that prefixes are shared, cut short and quoted.
            spans.append((next(d) % 4, (0, 0, 0, 4)[next(d) % 4], 1 + next(d) % 9))
        self.spans = spans
        prompt = sum(span[2] for span in spans)
        length = 1 + next(d) % 12
        # Sometimes the output is what another request's prompt says, or goes on where the prompt ends.
        generated = ((100 + self.count, 0), (next(d) % 4, 0), (spans[-1][0], spans[-1][1] + spans[-1][2]))
        output = generated[next(d) % 3]
        if any(output[0] == keys for keys in self.writing.values()):
            output = generated[0]  # two that write one text at a time: which is found first is left open
        self.writing[id] = output[0]
        scope = SCOPES[next(d) % 8 == 0]
        tokens = tuple(token_ids([*spans, (*output, length)]).tolist())
        if self.ids:
            keys = BlockKeys.of_ids(self.limits.block_size, np.array(tokens, np.uint64).view(np.int64), scope)
        else:
            keys = BlockKeys.of_spans(self.limits.block_size, spans, output, scope)
        arrival, priority = self.operations, next(d) % 3
        request = Request(id, keys, prompt, length, arrival_ns=arrival, priority=priority)
        if self.retains and next(d) % 3:
            request.retention = RETENTIONS[next(d) % len(RETENTIONS)]
        twin = Req(id, scope.salt, tokens, prompt, priority=priority, arrival=arrival)
        return request, twin

    def step(self) -> None:
        self.settle()
        plan = self.s.plan(self.operations)
        if plan is not None:
            self.plans.append(plan)
        elif self.plans:
            self.commit()

    def settle(self) -> None:
        while len(self.plans) > self.limits.pipeline_depth:
            self.commit()

    def commit(self) -> None:
        for request in self.s.commit(self.plans.pop(0), now=self.operations):
            self.ended.append(request.id)

    def evict(self, blocks: int) -> None:
        self.s.evict(blocks)

    def pick(self) -> Request | None:
        live = list(self.s.requests.values())
        return live[next(self.draw) % len(live)] if live else None

    def cancel(self) -> None:
        request = self.pick()
        if request is not None:
            self.s.cancel(request.id, self.operations)
            self.ended.append(request.id)

    def preempt(self) -> None:
        while self.plans:  # between plans, nothing may be in flight that a preempted request waits for
            self.commit()
        if self.s.running.requests:
            running = list(self.s.running.requests)
            self.s.preempt(running[next(self.draw) % len(running)])

    def drain(self, most: int = 3000) -> None:
        """Steps until nothing lives. Errors: AssertionError where that never comes."""
        for _ in range(most):
            if not self.s.requests:
                break
            self.step()
        assert not self.s.requests, "requests wait for ever"
        while self.plans:
            self.commit()
        check(self.s)
        assert self.s.memory.used_blocks == 0


def endless(data: bytes) -> Iterator[int]:
    """The bytes, then zeros: a life goes on as long as its operations are counted elsewhere."""
    yield from data
    while True:
        yield 0


class TwinLife(Life):
    """The same life lived by the reference scheduler beside the core; `compare` holds them together."""

    profiles: ClassVar = {"vllm": VLLM}  # the version of the reference

    def __init__(self, draw: Iterator[int], *, ids: bool = False) -> None:
        super().__init__(draw, "vllm", ids=ids)
        m = self.limits
        self.twin = Reference(
            m.num_blocks,
            m.block_size,
            m.max_num_seqs,
            m.max_num_batched_tokens,
            m.policy,
            m.pipeline_depth,
            m.caching,
        )

    def submit(self, id: str) -> None:
        if id in self.s.requests:
            return
        request, twin = self.make(id)
        assert self.s.submit(request) == self.twin.submit(twin)

    def step(self) -> None:
        self.settle()
        plan = self.s.plan(self.operations)
        twin = self.twin.plan()
        assert (plan is None) == (twin is None)
        if plan is not None and twin is not None:
            self.plans.append(plan)
            ours = [(chunk.request.id, chunk.start, chunk.tokens) for chunk in plan.chunks]
            ours += [(request.id, at, 1) for request, at in zip(plan.decodes, plan.positions(), strict=True)]
            theirs = [(req.id, start, tokens) for req, start, tokens in twin]
            assert sorted(ours) == sorted(theirs), (ours, theirs)
        elif self.plans:
            self.commit()
        self.compare()

    def commit(self) -> None:
        ended = [request.id for request in self.s.commit(self.plans.pop(0), now=self.operations)]
        assert sorted(ended) == sorted(self.twin.commit())
        self.ended += ended

    def cancel(self) -> None:
        request = self.pick()
        if request is not None:
            twin = self.twin.live[request.id]
            self.s.cancel(request.id, self.operations)
            self.twin.cancel(twin)
            self.ended.append(request.id)

    def evict(self, blocks: int) -> None:
        self.s.evict(blocks)
        self.twin.evict(blocks)

    def preempt(self) -> None:
        """Left to the scheduler here: when to preempt is its decision."""

    def operate(self) -> None:
        super().operate()
        self.compare()

    def compare(self) -> None:
        """Every queue, every block table, every free block, in order."""
        s, twin = self.s, self.twin
        assert [r.id for r in s.running.requests] == [r.id for r in twin.running]
        assert [r.id for r in s.queue] == [r.id for r in twin.waiting]
        for request in s.running.requests:
            assert s.memory.blocks(request) == twin.live[request.id].table
            assert request.cached_tokens == twin.live[request.id].cached
        assert s.memory.used_blocks == s.limits.num_blocks - len(twin.free)
