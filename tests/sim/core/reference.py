"""A second scheduler, written block by block and step by step from vLLM v1's rules in words.

It has no runs, no segments, no shortcuts and no hashes: a block's identity is the tuple of all tokens up to
its end. It is slow and obvious, and the real core has to agree with it on every block number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Req:
    id: str
    scope: str
    tokens: tuple[Any, ...]  # prompt and all output, known to the test in advance
    prompt: int
    priority: int = 0
    arrival: int = 0
    known: int = 0
    computed: int = 0
    in_flight: int = 0  # tokens asked of the device and not yet answered
    table: list[int] = field(default_factory=list)
    published: int = 0
    cached: int | None = None
    running: bool = False
    done: bool = False

    @property
    def total(self) -> int:
        return len(self.tokens)


class Reference:
    """vLLM v1 with prefix caching, FCFS or priority, pipeline depth 0 or 1."""

    def __init__(
        self, blocks: int, size: int, seqs: int, budget: int, policy: str, depth: int, caching: bool
    ) -> None:
        self.size, self.seqs, self.budget = size, seqs, budget
        self.policy, self.depth, self.caching = policy, depth, caching
        self.num_blocks = blocks
        self.free = list(range(blocks))
        self.refs = [0] * blocks
        self.key: list[Any] = [None] * blocks
        self.index: dict[Any, list[int]] = {}
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.live: dict[str, Req] = {}
        self.flying: list[list[tuple[Req, int, int, bool]]] = []

    # ---- blocks

    def take(self) -> int:
        block = self.free.pop(0)
        self.unpublish(block)
        self.refs[block] = 1
        return block

    def unpublish(self, block: int) -> None:
        key = self.key[block]
        if key is not None:
            self.index[key].remove(block)
            if not self.index[key]:
                del self.index[key]
            self.key[block] = None

    def release(self, req: Req) -> None:
        blank, kept = [], []
        for block in reversed(req.table):
            self.refs[block] -= 1
            if not self.refs[block]:
                blank_first = self.key[block] is None and self.caching
                (blank if blank_first else kept).append(block)
        self.free = blank + self.free + kept
        req.table = []
        req.published = 0

    def block_key(self, req: Req, number: int) -> Any:
        return (req.scope, req.tokens[: (number + 1) * self.size])

    def publish(self, req: Req, tokens: int) -> None:
        if not self.caching:
            return
        for number in range(req.published, min(tokens, req.total) // self.size):
            block = req.table[number]
            if self.key[block] is None:
                key = self.block_key(req, number)
                self.key[block] = key
                self.index.setdefault(key, []).append(block)
            req.published = number + 1

    def withdraw(self, req: Req, tokens: int) -> None:
        for number in range(tokens // self.size, req.published):
            if self.refs[req.table[number]] == 1:
                self.unpublish(req.table[number])

    def lookup(self, req: Req) -> list[int]:
        hit: list[int] = []
        if self.caching:
            for number in range((req.known - 1) // self.size):
                block = self.index.get(self.block_key(req, number))
                if not block:
                    break
                hit.append(block[0])
        return hit

    def need(self, tokens: int) -> int:
        return -(-tokens // self.size)

    # ---- requests

    def submit(self, req: Req) -> bool:
        if self.need(req.total - 1) > self.num_blocks:
            return False
        req.known = req.prompt
        self.live[req.id] = req
        self.queue(req, front=False)
        return True

    def queue(self, req: Req, *, front: bool) -> None:
        if self.policy == "priority":
            self.waiting.append(req)
            self.waiting.sort(key=lambda r: (r.priority, r.arrival, r.id))
        elif front:
            self.waiting.insert(0, req)
        else:
            self.waiting.append(req)

    def cancel(self, req: Req) -> None:
        uncommitted = [start for plan in self.flying for r, start, _, _ in plan if r is req]
        committed = min(uncommitted, default=req.computed)
        if req.running:
            self.withdraw(req, committed)
            self.running.remove(req)
        else:
            self.waiting.remove(req)
        self.release(req)
        self.end(req)

    def end(self, req: Req) -> None:
        req.done = True
        req.running = False
        del self.live[req.id]

    def preempt(self, req: Req) -> None:
        self.running.remove(req)
        self.release(req)
        req.running = False
        req.computed = 0
        self.queue(req, front=True)

    # ---- a step

    def plan(self) -> list[tuple[Req, int, int]] | None:
        """Who computes how many tokens from where; None where nobody can."""
        while True:
            scheduled, preempted = self.schedule()
            if scheduled or not preempted or self.flying:
                return scheduled or None

    def schedule(self) -> tuple[list[tuple[Req, int, int]], bool]:
        budget = self.budget
        scheduled: list[tuple[Req, int, int]] = []
        preempted = False
        at = 0
        stop = False
        while at < len(self.running) and budget > 0 and not stop:
            req = self.running[at]
            wanted = min(req.known + req.in_flight, req.total - 1) - req.computed
            tokens = min(wanted, budget)
            if tokens <= 0:
                at += 1
                continue
            while True:
                missing = self.need(req.computed + tokens) - len(req.table)
                if missing <= len(self.free):
                    break
                preempted = True
                if self.policy == "priority":
                    victim = max(self.running, key=lambda r: (r.priority, r.arrival))
                else:
                    victim = self.running[-1]
                given = [entry for entry in scheduled if entry[0] is victim]
                if given:
                    scheduled.remove(given[0])
                    budget += given[0][2]
                    victim.computed -= given[0][2]
                    at -= 1  # what it has published in this step stays findable
                self.preempt(victim)
                if victim is req:
                    stop = True
                    break
            if stop:
                break
            for _ in range(missing):
                req.table.append(self.take())
            scheduled.append((req, req.computed, tokens))
            req.computed += tokens
            # What is known: at depth 1 the token a step answers is not known to the step after it.
            self.publish(req, min(req.computed, req.known))
            budget -= tokens
            at += 1
        while not preempted and self.waiting and budget > 0 and len(self.running) < self.seqs:
            req = self.waiting[0]
            hit = self.lookup(req)
            idle = sum(self.refs[block] == 0 for block in hit)
            if self.need(req.known) - len(hit) + idle > len(self.free):
                break
            self.waiting.pop(0)
            for block in hit:
                if not self.refs[block]:
                    self.free.remove(block)
                self.refs[block] += 1
            req.table = list(hit)
            req.published = len(hit)
            req.computed = len(hit) * self.size
            if req.cached is None:
                req.cached = req.computed
            tokens = min(req.known - req.computed, budget)
            while len(req.table) < self.need(req.computed + tokens):
                req.table.append(self.take())
            scheduled.append((req, req.computed, tokens))
            req.computed += tokens
            self.publish(req, req.computed)
            budget -= tokens
            req.running = True
            self.running.append(req)
        if not scheduled:
            return [], preempted
        entry = []
        for req, start, tokens in scheduled:
            answers = start + tokens == req.known + req.in_flight
            req.in_flight += answers
            entry.append((req, start, tokens, answers))
        self.flying.append(entry)
        return scheduled, preempted

    def commit(self) -> list[str]:
        ended = []
        for req, _start, _tokens, answers in self.flying.pop(0):
            if not answers or req.done:
                continue
            req.in_flight -= 1
            req.known += 1
            if req.known == req.total:
                if req.running:
                    self.publish(req, req.computed)
                    self.running.remove(req)
                    self.release(req)
                else:
                    self.waiting.remove(req)
                self.end(req)
                ended.append(req.id)
        return ended

    def evict(self, blocks: int) -> None:
        for block in self.free[:blocks]:
            self.unpublish(block)
