"""Serves a specification by the core under SGLang's rules, with the same clock as `drive_sglang.py`."""

from __future__ import annotations

from collections import deque
from typing import Any

from pagecast.sim.core.check import check
from pagecast.sim.core.engines.sglang.memory import RadixMemory
from pagecast.sim.core.engines.sglang.mix import SglangMix
from pagecast.sim.core.engines.sglang.profile import SGLANG
from pagecast.sim.core.engines.sglang.settings import SglangSettings
from pagecast.sim.core.identity.content import own_output, own_prompt
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import Scope
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler
from sglang_decisions import Decisions, Served, Turn
from sglang_specifications import Spec, checksum


def limits_of(config: dict[str, Any]) -> Limits:
    """The core's limits for a configuration of SGLang."""
    chunk = config["chunked_prefill_size"]
    return Limits(
        num_blocks=config["usable_pages"],
        block_size=config["page_size"],
        max_num_seqs=config["max_running_requests"],
        max_num_batched_tokens=chunk or 1 << 20,
        policy=config["schedule_policy"],
        pipeline_depth=int(config["overlap"]),
        caching=config["enable_prefix_caching"],
        engine=SglangSettings(
            max_prefill_tokens=config["max_prefill_tokens"],
            chunked_prefill=chunk is not None,
            schedule_conservativeness=config["schedule_conservativeness"],
            mixed_chunk=config["enable_mixed_chunk"],
            ignore_eos=config["ignore_eos"],
            eviction=config["radix_eviction_policy"],
            recv_interval=config.get("scheduler_recv_interval", 1),
        ),
    )


class Server:
    """One specification being served. `every`: all invariants are checked each so many turns.

    `keeps_tokens`: the token in flight of a request that loses its KV counts. `told`: the core is told where
    outputs end, as in a replay, and `max_tokens` beside that.
    """

    keeps_tokens = False

    def __init__(self, seed: int, spec: Spec, *, every: int = 0, told: bool = False) -> None:
        self.told = told
        self.seed = seed
        self.spec = spec
        self.rows = spec["requests"]
        self.config = spec["config"]
        self.every = every
        self.scheduler = self.make_scheduler()
        self.requests = [self._request(number, row) for number, row in enumerate(self.rows)]
        self.submitted: list[int] = []
        self.first_us = [-1] * len(self.rows)
        self.turns: list[Turn] = []
        self.in_flight_tokens: deque[tuple[StepPlan, int]] = deque()
        self.ended = 0
        self.retracted: list[int] = []
        self.now_us = self.device_free_us = 0

    def make_scheduler(self) -> Scheduler:
        """The core's scheduler for the configuration."""
        return Scheduler(limits_of(self.config), SGLANG)

    def _request(self, number: int, row: dict[str, Any]) -> Request:
        spans = row.get("spans") or [[own_prompt(number), 0, row["input_tokens"]]]
        generated = (row.get("output_content", own_output(number)), 0)
        scope = Scope(salt=row.get("salt", ""))
        keys = BlockKeys.of_spans(
            self.scheduler.limits.block_size, [(a, b, c) for a, b, c in spans], generated, scope
        )
        request = Request(
            str(number),
            keys,
            row["input_tokens"],
            row.get("stop_after", row["output_tokens"]) if self.told else row["output_tokens"],
            arrival_ns=row["arrival_us"] * 1000,
            index=number,
        )
        request.max_tokens = row["output_tokens"]
        return request

    def run(self) -> Decisions:
        """Serves every request to its end."""
        depth = int(self.config["overlap"])
        turns = 0
        while self.ended < len(self.rows):
            self._take_in()
            self.now_us += 1
            plan = self._plan()
            turns += 1
            if self.every and not turns % self.every:
                check(self.scheduler)
            if plan is not None:
                end = max(self.now_us, self.device_free_us) + self._cost_us(plan)
                self.device_free_us = end
                self._note(plan, end)
                self.in_flight_tokens.append((plan, end))
                if len(self.in_flight_tokens) > depth:
                    self._commit()
            elif self.in_flight_tokens:
                self._commit()
            elif self.ended < len(self.rows):
                if len(self.submitted) == len(self.rows):
                    raise AssertionError("nothing can be scheduled")
                self.now_us = max(self.now_us, self.rows[len(self.submitted)]["arrival_us"])
        return Decisions(self.seed, checksum(self.spec), self.turns, self._served())

    def _take_in(self) -> None:
        for number in range(len(self.submitted), len(self.rows)):
            if self.rows[number]["arrival_us"] > self.now_us:
                return
            self.submitted.append(self.now_us)
            assert self.scheduler.submit(self.requests[number]), self.requests[number].reason

    def _plan(self) -> StepPlan | None:
        before = [request.preemptions for request in self.requests]
        plan = self.scheduler.plan(self.now_us * 1000, once=True)
        self.retracted = [
            number for number, request in enumerate(self.requests) if request.preemptions > before[number]
        ]
        return plan

    def _cost_us(self, plan: StepPlan) -> int:
        cost = self.spec["cost"]
        tokens = len(plan.decodes) + sum(chunk.tokens for chunk in plan.chunks)
        context = sum(plan.positions()) + len(plan.decodes)
        context += sum(chunk.start + chunk.tokens for chunk in plan.chunks)
        return int(cost["step_us"] + cost["token_us"] * tokens + cost["context_ns"] * context // 1000)

    def _note(self, plan: StepPlan, end: int) -> None:
        memory, mix = self.scheduler.memory, self.scheduler._mix
        assert isinstance(memory, RadixMemory) and isinstance(mix, SglangMix)
        self.turns.append(
            Turn(
                start_us=self.now_us,
                end_us=end,
                prefill=tuple((chunk.request.index, chunk.start, chunk.tokens) for chunk in plan.chunks),
                decodes=tuple(each.index for each in sorted(plan.decodes, key=lambda each: each.order)),
                context=sum(plan.positions()),
                retracted=tuple(self.retracted),
                waiting=tuple(request.index for request in self.scheduler.queue),
                free_pages=memory.free,
                evictable_pages=memory.tree.evictable,
                evicted_tokens=memory.evicted_blocks * memory.block_size,
                ratio=mix.ratio.current,
            )
        )

    def _commit(self) -> None:
        plan, end = self.in_flight_tokens.popleft()
        self.now_us = max(self.now_us, end)
        stopped = []
        running = self.scheduler.running
        yielding = [chunk.request for chunk in plan.chunks if chunk.last] + list(plan.decodes)
        for request in yielding:
            if request not in running.requests and not self.keeps_tokens:
                continue
            # The plan is still in flight: what it yields comes after what was emitted so far.
            produced = self._emitted(request, plan) + 1
            if self.first_us[request.index] < 0:
                self.first_us[request.index] = self.now_us
            if self.rows[request.index].get("stop_after") == produced and not self.told:
                stopped.append(request.id)
        outcome = Outcome(stopped=tuple(stopped))
        self.ended += len(self.scheduler.commit(plan, outcome, self.now_us * 1000))

    def _emitted(self, request: Request, plan: StepPlan) -> int:
        running = self.scheduler.running
        flying = 0
        for each in running.in_flight:
            flying += request in each.decodes
            flying += any(chunk.last and chunk.request is request for chunk in each.chunks)
        return running.planned(request) + 1 - request.prompt_tokens - flying

    def _served(self) -> list[Served]:
        return [
            Served(
                self.submitted[request.index],
                self.first_us[request.index],
                request.finished_ns // 1000,
                request.cached_tokens,
                request.output_tokens,
                request.preemptions,
            )
            for request in self.requests
        ]


def first_difference(ours: Decisions, theirs: Decisions, engine: str = "SGLang") -> str:
    """The first turn or request that differs, with all fields that do; empty where all is the same."""
    for number, (one, other) in enumerate(zip(ours.turns, theirs.turns, strict=False)):
        if one != other:
            fields = [
                f"{name} {getattr(one, name)}, {engine} {getattr(other, name)}"
                for name in Turn._fields
                if getattr(one, name) != getattr(other, name)
            ]
            return f"turn {number} at {other.start_us} us: " + "; ".join(fields)
    if len(ours.turns) != len(theirs.turns):
        return f"{len(ours.turns)} turns, {engine} {len(theirs.turns)}"
    for number, (mine, yours) in enumerate(zip(ours.served, theirs.served, strict=True)):
        if mine != yours:
            return f"request {number}: {mine}, {engine} {yours}"
    return ""
