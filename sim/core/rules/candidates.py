"""Candidates: the waiting requests of one step that something beside room may keep waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.step import Step


class Gate(Protocol):
    """A condition on waiting requests, for one step. Who does not meet it is passed over.

    `lasting`: a refusal stands until a request comes or goes, so that steps in between need not ask again.
    """

    lasting: bool

    def opens(self, request: Request) -> bool:
        """Whether a request may be admitted."""
        ...

    def enter(self, request: Request) -> None:
        """Takes note that a request was admitted."""

    def hold(self, request: Request) -> None:
        """Takes note that a request holds blocks and waits for a load."""


class Candidates:
    """The waiting requests in order that every gate opens for.

    Whoever is given out is admitted before the next is asked for.
    """

    def __init__(self, queue: Queue, gates: Sequence[Gate]) -> None:
        self._queue = queue
        self._gates = gates
        self._waiting = list(queue)
        self._next = 0
        self._latest: Request | None = None
        queue.asks_again = False
        queue.gated = False

    def first(self) -> Request | None:
        """The next request that every gate opens for.

        None where there is none: then the queue is blocked, unless the next step must ask again.
        """
        if self._latest is not None:
            for gate in self._gates:
                gate.enter(self._latest)
        waiting = self._waiting
        while self._next < len(waiting):
            request = waiting[self._next]
            self._next += 1
            closed = next((gate for gate in self._gates if not gate.opens(request)), None)
            if closed is None:
                self._latest = request
                return request
            self._queue.pass_over(request, lasting=closed.lasting)
        self._queue.blocked = not self._queue.asks_again
        return None


class TenantCeilings:
    """Blocks that the requests of each tenant will hold when they end, against its ceiling.

    Those that run are counted, and those that wait for a load and hold blocks.
    """

    lasting = True

    def __init__(self, step: Step) -> None:
        tenants = step.limits.tenants
        assert tenants is not None
        self._tenants = tenants
        self._held: Counter[str] = Counter()
        self._limits = step.limits
        self._counted: set[Request] = set()
        for request in step.running.requests:
            self.enter(request)
        for request in step.running.chunked:
            self.enter(request)  # nano-vLLM keeps a prompt in chunks in the queue
        if step.offloading is not None:
            for request in step.offloading.holders:
                if request.state is State.LOADING:
                    self.enter(request)

    def opens(self, request: Request) -> bool:
        """Whether a request fits below its tenant's ceiling, to its end."""
        most = self._tenants.share(request.tenant).blocks
        if most is None or request in self._counted:
            return True
        return self._held[request.tenant] + self._blocks(request) <= most

    def enter(self, request: Request) -> None:
        """Counts a request's blocks, once."""
        if request not in self._counted and self._tenants.share(request.tenant).blocks is not None:
            self._counted.add(request)
            self._held[request.tenant] += self._blocks(request)

    hold = enter

    def _blocks(self, request: Request) -> int:
        return self._limits.blocks_at_end(request.total_tokens)
