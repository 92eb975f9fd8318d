"""Running requests by what they do, and how far each of them is.

Three counts of a request's tokens differ while plans are in flight: `planned` has the tokens of all plans,
`committed` only those of committed ones, and `findable` those whose full blocks others may reuse by now.
"""

from __future__ import annotations

from collections import deque

from pagecast.sim.core.decoders import Decoders
from pagecast.sim.core.plan import StepPlan
from pagecast.sim.core.request import Request, State

NEVER_PUBLISHED = 3
"""The `commit_lag` where no step publishes what it generates."""


class Running:
    """The running requests, and the plans in flight.

    Each request in `requests` (admission order) is in one of these: `chunked` (its next tokens come in
    chunks: of a prompt, or drafts to verify), `joining` (the plan being made completes its prompt),
    `decoders` (one token per tick), `parked` (generating, but the batch is full: only in `nano-vllm`, where
    `max_num_seqs` bounds a step, not the running requests) or `draining` (its last token is planned; here
    requests are listed under the number of the step that computes it).

    `tick` is the clock of the decoding requests (see `Decoders`): it stands still in steps that are not
    for them, as `nano-vllm`'s steps of prompts. `commit_lag` (0 to 2, or `NEVER_PUBLISHED`) is the number of
    steps between the plan that computes a generated token and the plan that may publish it: one at depth 1,
    since the token is not known when its step is planned, and one more where blocks are published by the
    commit (`at_commit`). `output_at_end`: what is generated is published when the request ends or is
    preempted, and not before. `keeps_planned`: what a plan in flight computes of a cancelled request stays
    findable. `left_out` are the decoding requests that the newest plan leaves out.
    """

    def __init__(
        self,
        block_size: int,
        *,
        pipeline_depth: int,
        at_commit: bool,
        output_at_end: bool = False,
        keeps_planned: bool = False,
    ) -> None:
        self.requests: dict[Request, None] = {}
        self.chunked: dict[Request, None] = {}
        self.joining: dict[Request, None] = {}
        self.decoders = Decoders(block_size)
        self.parked: dict[Request, None] = {}
        self.draining: dict[int, list[Request]] = {}
        self.in_flight: deque[StepPlan] = deque()
        self.left_out: frozenset[Request] = frozenset()
        self.tick = 0
        self.at_commit = at_commit
        self.output_at_end = output_at_end
        self.keeps_planned = keeps_planned
        self.commit_lag = NEVER_PUBLISHED if output_at_end else pipeline_depth + at_commit

    def knows(self, request: Request) -> bool:
        """Whether the token that a request decodes next is known: no plan in flight yields it."""
        return not self.in_flight or request in self.left_out

    def knows_ahead(self) -> bool:
        """Whether some request's next token is known now although plans may overlap.

        A block that this token fills is published by the plan itself, not a step later.
        """
        if not self.commit_lag or self.at_commit:
            return False
        return not self.in_flight or bool(self.left_out)

    def publishes_at_once(self, request: Request) -> bool:
        """Whether a block that the step being planned fills is published by its plan."""
        return not self.commit_lag or (not self.at_commit and self.knows(request))

    def planned(self, request: Request) -> int:
        """Tokens of a request that plans so far compute."""
        if request.state is State.DECODE and request in self.decoders.requests:
            return self.tick - request.lag
        return request.computed_tokens

    def committed(self, request: Request) -> int:
        """Tokens whose KV is certainly there: those that no plan in flight still computes."""
        if self.speculates(request):
            return request.known_tokens - 1
        flying = 0
        for plan in self.in_flight:
            for chunk in plan.chunks:
                if chunk.request is request:
                    return chunk.start
            flying += request in plan.decodes
        return self.planned(request) - flying

    def processed(self, request: Request, computed: int) -> int:
        """Tokens of a running request that no plan in flight still computes, of `computed` planned ones.

        Drafts count as planned, and until their commit as right.
        """
        if computed > request.known_tokens and request in self.decoders.requests:
            return computed - (not self.knows(request))
        return computed - sum(
            [chunk.tokens for plan in self.in_flight for chunk in plan.chunks if chunk.request is request]
        )

    def findable(self, request: Request) -> int:
        """Tokens of a running request whose blocks may be published now."""
        if self.output_at_end and request.state in (State.DECODE, State.DRAINING):
            return 0
        if self.at_commit:
            return self.committed(request)
        if self.speculates(request):
            return 0  # what is right is published when that is known
        if request in self.chunked:
            return min(request.computed_tokens, request.known_tokens)
        late = self.commit_lag if request.state in (State.DECODE, State.DRAINING) else 0
        return self.planned(request) - late

    def speculates(self, request: Request) -> bool:
        """Whether a request generates in chunks, with draft tokens to verify."""
        return request.state is State.DECODE and request in self.chunked

    def emitted(self, request: Request) -> int:
        """Output tokens that the plans committed so far have yielded."""
        if request.state in (State.DECODE, State.DRAINING) and request not in self.chunked:
            return self.committed(request) + 1 - request.prompt_tokens
        return request.known_tokens - request.prompt_tokens

    def begin_decode(self, request: Request, ticks: int, most: int) -> None:
        """Lets a request decode for `ticks` ticks from now on. At most `most` decode: others are parked."""
        request.lag = self.tick - request.known_tokens
        request.last_tick = self.tick + ticks - 1
        if self.parked or self.decoders.count >= most:
            self.parked[request] = None
        else:
            self.decoders.add(request)

    def unpark(self, most: int) -> None:
        """Lets parked requests decode where the batch has room again; ticks they missed add to their lag."""
        while self.parked and self.decoders.count < most:
            request = next(iter(self.parked))
            del self.parked[request]
            delay = self.tick - request.lag - request.known_tokens
            request.lag += delay
            request.last_tick += delay
            self.decoders.add(request)

    def remove(self, request: Request) -> None:
        """Takes a request out of what it does and notes how far it is."""
        self.requests.pop(request, None)
        if request in self.chunked:
            del self.chunked[request]
        elif request.state is State.DECODE:
            request.computed_tokens = self.planned(request)
            request.known_tokens = request.computed_tokens + 1
            if request in self.parked:
                del self.parked[request]
            else:
                self.decoders.remove(request)
        else:
            self.joining.pop(request, None)

    def forget_end(self, request: Request) -> None:
        """A request has ended otherwise than by its last token."""
        for ending in self.draining.values():
            if request in ending:
                ending.remove(request)
