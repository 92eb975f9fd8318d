"""Decisions of the core, block by block: the rules of vLLM 0.24, without the forms that make them fast.

Read this file first. It serves requests with prefix caching, first come first served or by priority, with
plans made one step ahead or not. It is slow and obvious: a block's identity is the tuple of all tokens up to
its end, and every request is visited in every step. `Scheduler` has to agree with it on every block number
(`tests/sim/core/test_core_life.py` lives the same random lives with both).

The life of a request is four methods: `submit`, `schedule`, `preempt` and `commit`.

Where each part is in the fast core:

==================================  ==================================================================
here                                there
==================================  ==================================================================
`Req`                               `request.py`; a decode's position: `Running.planned`, `decoders.py`
`Req.table`                         `memory/table.py`
`refs`, `free`                      `memory/extent_pool.py`, behind the protocol `memory/memory.py`
`block_key`, `index`                `identity/` makes keys; `index` of `memory/extent_pool.py`
`take`, `unpublish`                 `memory/extent_pool.py`: allocation evicts the next free block
`release`                           `memory/extent_pool.py` (`drop`): the order of free blocks
`publish`                           `memory/layer_group.py`: rows of a table become an extent
`lookup`                            `memory/prefix_search.py` and `memory/lookup.py`
`submit`, `preempt`, `cancel`       `lifecycle.py`
`queue`                             `queue.py` and `rules/order.py`
`schedule`, running requests        `engines/vllm/mix.py`, with `step.py` as the step in the making
`schedule`, waiting requests        `engines/vllm/waiting.py`, with `rules/admission.py`
the choice of a victim              `rules/victim.py`
`flying`                            `running.py` and `pipeline.py`
`commit`                            `lifecycle.py`
==================================  ==================================================================

A position advances when it is planned: a decode's commit only notes its token and its end.

The fast core differs in form only:

- **Runs instead of blocks.** Blocks that were taken together and hold the tokens of one request are one
  object, so a prompt of 10,000 tokens costs a few operations instead of 625.
- **Stretches instead of steps.** While nothing has to be decided, many decode steps are planned as one
  (`stretch/`), and no request is visited. Ordinary steps visit only the decodes that begin or fill a block:
  the position of the others follows from the step's number.
- **Keys instead of tokens.** A block is named by a hash of its scope, its content and its predecessor's name.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[Hashable, ...]
"""The identity of a block: the scope of its request, and all tokens up to the block's end."""


@dataclass(eq=False)
class Req:
    """A request. Counts are tokens from its beginning."""

    id: str
    scope: str  # what it may share blocks within: model, adapter, tenant
    tokens: tuple[Hashable, ...]  # prompt and all output, which the caller knows in advance
    prompt: int
    priority: int = 0
    arrival: int = 0
    known: int = 0  # tokens whose content is decided: the prompt, and each output token once committed
    computed: int = 0  # tokens whose KV is computed, or planned to be
    in_flight: int = 0  # output tokens that plans in flight will yield
    table: list[int] = field(default_factory=list)  # its blocks, in the order of its tokens
    published: int = 0  # leading blocks of the table that others may find
    cached: int | None = None  # prefix hit at its first admission
    running: bool = False
    done: bool = False

    @property
    def total(self) -> int:
        """Prompt and output together."""
        return len(self.tokens)


class Work(NamedTuple):
    """What one request computes in a step."""

    req: Req
    start: int  # its first token of the step
    tokens: int


class Flight(NamedTuple):
    """Work of a plan that is not committed yet. `answers`: it yields the request's next token."""

    req: Req
    answers: bool


class Reference:
    """vLLM v1 with prefix caching. `depth` 1 plans a step while the one before it is computed."""

    def __init__(
        self, blocks: int, size: int, seqs: int, budget: int, policy: str, depth: int, caching: bool
    ) -> None:
        self.size, self.seqs, self.budget = size, seqs, budget
        self.policy, self.depth, self.caching = policy, depth, caching
        self.num_blocks = blocks
        self.free = list(range(blocks))  # the next to be taken first; a free block may still have content
        self.refs = [0] * blocks  # requests that hold each block
        self.key: list[Key | None] = [None] * blocks  # findable content of each block
        self.index: dict[Key, list[int]] = {}  # blocks with that content, the oldest first
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.live: dict[str, Req] = {}
        self.flying: list[list[Flight]] = []

    # ---- blocks

    def take(self) -> int:
        """Takes the next free block. This evicts its content, if it has any."""
        block = self.free.pop(0)
        self.unpublish(block)
        self.refs[block] = 1
        return block

    def unpublish(self, block: int) -> None:
        """Makes the content of a block unfindable."""
        key = self.key[block]
        if key is not None:
            self.index[key].remove(block)
            if not self.index[key]:
                del self.index[key]
            self.key[block] = None

    def release(self, req: Req) -> None:
        """Gives back all blocks of a request.

        Later blocks go first, so that of a prefix the end is evicted before the beginning. Blocks without
        content are the next to be taken, before all others.
        """
        blank: list[int] = []
        kept: list[int] = []
        for block in reversed(req.table):
            self.refs[block] -= 1
            if not self.refs[block]:
                blank_first = self.key[block] is None and self.caching
                (blank if blank_first else kept).append(block)
        self.free = blank + self.free + kept
        req.table = []
        req.published = 0

    def block_key(self, req: Req, number: int) -> Key:
        """The identity of a request's block of that number."""
        return (req.scope, req.tokens[: (number + 1) * self.size])

    def publish(self, req: Req, tokens: int) -> None:
        """Makes the full blocks among the first `tokens` tokens findable."""
        if not self.caching:
            return
        for number in range(req.published, min(tokens, req.total) // self.size):
            block = req.table[number]
            if self.key[block] is None:
                key = self.block_key(req, number)
                self.key[block] = key
                self.index.setdefault(key, []).append(block)
            req.published = number + 1

    def lookup(self, req: Req) -> list[int]:
        """The longest cached prefix. The last known token is always computed, to yield the next one."""
        hit: list[int] = []
        if self.caching:
            for number in range((req.known - 1) // self.size):
                block = self.index.get(self.block_key(req, number))
                if not block:
                    break
                hit.append(block[0])
        return hit

    def need(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.size)

    # ---- requests

    def submit(self, req: Req) -> bool:
        """Queues a request. False: the pool can never hold it. The last token's KV is never computed."""
        if self.need(req.total - 1) > self.num_blocks:
            return False
        req.known = req.prompt
        self.live[req.id] = req
        self.queue(req, front=False)
        return True

    def queue(self, req: Req, *, front: bool) -> None:
        """Puts a request into the queue: preempted ones at the front, unless priorities order it."""
        if self.policy == "priority":
            self.waiting.append(req)
            self.waiting.sort(key=lambda r: (r.priority, r.arrival, r.id))
        elif front:
            self.waiting.insert(0, req)
        else:
            self.waiting.append(req)

    def cancel(self, req: Req) -> None:
        """Ends a request at once. Plans in flight go on, so what they fill stays findable."""
        if req.running:
            self.running.remove(req)
        else:
            self.waiting.remove(req)
        self.release(req)
        self.end(req)

    def end(self, req: Req) -> None:
        """Forgets a request that is over."""
        req.done = True
        req.running = False
        del self.live[req.id]

    def preempt(self, req: Req) -> None:
        """Takes all blocks of a running request and queues it again; it will compute everything anew.

        Content that it published stays findable until its blocks are taken, so it often finds it again.
        """
        self.running.remove(req)
        self.release(req)
        req.running = False
        req.computed = 0
        self.queue(req, front=True)

    # ---- a step

    def plan(self) -> list[Work] | None:
        """Decides the next step. None: nobody can compute before a commit or an arrival."""
        while True:
            scheduled, preempted = self.schedule()
            if scheduled or not preempted or self.flying:
                return scheduled or None
            # All that could run was preempted, and its blocks are free now.

    def schedule(self) -> tuple[list[Work], bool]:
        """Fills one step: running requests first, then waiting ones. Also: whether one was preempted."""
        budget = self.budget
        scheduled: list[Work] = []
        preempted = False

        # Running requests, in the order of their admission.
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
                given = [work for work in scheduled if work.req is victim]
                if given:
                    # The victim had its turn in this step and gives its tokens back. As in vLLM, blocks that
                    # the turn published stay findable, although no step computes them.
                    scheduled.remove(given[0])
                    budget += given[0].tokens
                    at -= 1  # the list is shorter before `at`
                # A victim before `at` that had no turn does not move `at`, and the next request misses its
                # turn, as in vLLM before 0.28.
                self.preempt(victim)
                if victim is req:
                    stop = True
                    break
            if stop:
                break
            for _ in range(missing):
                req.table.append(self.take())
            scheduled.append(Work(req, req.computed, tokens))
            req.computed += tokens
            # At depth 1 the token that a step yields is not known to the step after it.
            self.publish(req, min(req.computed, req.known))
            budget -= tokens
            at += 1

        # Waiting requests, unless a running one just lost its blocks. The first that does not fit stops it.
        while not preempted and self.waiting and budget > 0 and len(self.running) < self.seqs:
            req = self.waiting[0]
            hit = self.lookup(req)
            idle = sum(self.refs[block] == 0 for block in hit)
            # Blocks for all known tokens must be free, though this step may compute only a chunk of them.
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
            scheduled.append(Work(req, req.computed, tokens))
            req.computed += tokens
            self.publish(req, req.computed)
            budget -= tokens
            req.running = True
            self.running.append(req)

        if scheduled:
            self.flying.append([self.launch(work) for work in scheduled])
        return scheduled, preempted

    def launch(self, work: Work) -> Flight:
        """Notes work as in flight. It yields a token if it computes all tokens there are by then."""
        req = work.req
        answers = work.start + work.tokens == req.known + req.in_flight
        req.in_flight += answers
        return Flight(req, answers)

    def commit(self) -> list[str]:
        """Takes note that the oldest plan was computed. Returns the ids of requests that ended with it."""
        ended = []
        for req, answers in self.flying.pop(0):
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
            elif self.depth and req.running:
                # The token is known now: what it fills can be found, also if no step of its request follows.
                self.publish(req, req.computed - req.in_flight)
        return ended

    def evict(self, blocks: int) -> None:
        """Forgets the content of the next `blocks` blocks to be taken."""
        for block in self.free[:blocks]:
            self.unpublish(block)
