"""Waiting queue: the requests that are not running, in the order that `Order` says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from pagecast.sim.core.forks import Forks
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.request import Request, State


class Order(Protocol):
    """Order in which waiting requests are admitted.

    `stable`: the first stays first until a request comes or goes. Where it is False (the order depends on
    what is cached), every step asks again.
    """

    stable: bool

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests in order."""
        ...

    def add(self, request: Request) -> None:
        """Adds an arrival."""

    def put_back(self, requests: Sequence[Request]) -> None:
        """Adds requests that go ahead of later arrivals: a preempted one, or forks in their order."""

    def first(self, memory: Memory) -> Request | None:
        """The request to be admitted next; None where nobody waits."""
        ...

    def pass_over(self, request: Request) -> None:
        """Takes note that a request was passed over: it stays ahead of those put back from now on."""

    def bring_back(self, requests: Sequence[Request]) -> None:
        """Adds requests taken out of the front again, where they were, as passed over."""

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""


class Queue:
    """The waiting requests of a replica, and the forks that are held back until their prompt is computed.

    `size` counts those in order, without the forks held back. `blocked`: nobody can be admitted until a
    request comes or goes. While it is set, steps in which requests only decode are planned without asking.
    `asks_again`: the next step asks even while `blocked`. The last one passed a request over for itself
    alone, or ended at one that holds blocks of a load and can't go on yet.
    `gated`: those that were passed over stay so until a request comes or goes; an arrival may be admitted.
    `holding`: an order of their own for those that were passed over and hold blocks; they come first.
    """

    def __init__(self, order: Order, memory: Memory, holding: Order | None = None) -> None:
        self.order = order
        self.holding = holding
        self._held: set[Request] = set()  # those in `holding`
        self.forks = Forks()
        self.size = 0
        self.blocked = False
        self.asks_again = False
        self.gated = False
        self._memory = memory

    def __iter__(self) -> Iterator[Request]:
        if self._held and self.holding is not None:
            yield from self.holding
        yield from self.order

    def __len__(self) -> int:
        return self.size + len(self.forks)

    def add(self, request: Request) -> None:
        """Adds an arrival, or holds it back where it is a fork of a prompt still to be computed."""
        if request.parent is not None and self.forks.hold(request):
            return
        self.order.add(request)
        self.size += 1
        if self.blocked and (self.gated or self.order.first(self._memory) is request):
            self.blocked = False

    def put_back(self, request: Request) -> None:
        """Adds a preempted request."""
        self.order.put_back((request,))
        self.size += 1
        self.blocked = False

    def pass_over(self, request: Request, *, lasting: bool = False) -> None:
        """Leaves a request waiting although others behind it may be admitted.

        `lasting`: until a request comes or goes; else the next step asks again.
        """
        self.order.pass_over(request)
        if lasting:
            self.gated = True
        else:
            self.asks_again = True

    def set_aside(self, request: Request) -> None:
        """Takes the first request out until `bring_back`, so that those behind it may be admitted."""
        self._order_of(request).remove(request)
        self._held.discard(request)

    def bring_back(self, requests: Sequence[Request]) -> None:
        """Puts requests that were set aside in the place that they had, ahead of all others.

        Those that hold blocks by now go to `holding`, where there is one.
        """
        if self.holding is not None:
            held = [request for request in requests if request.state is State.LOADING]
            self.holding.bring_back(held)
            self._held.update(held)
            requests = [request for request in requests if request.state is not State.LOADING]
        self.order.bring_back(requests)

    def first(self) -> Request | None:
        """The request to be admitted next; None where nobody waits."""
        if not self.size:
            return None
        if self._held and self.holding is not None:
            return self.holding.first(self._memory)
        return self.order.first(self._memory)

    def _order_of(self, request: Request) -> Order:
        return self.holding if self.holding is not None and request in self._held else self.order

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        if self.forks.count and self.forks.drop(request):
            return
        if self.holding is None:
            self.order.remove(request)
        else:
            self._order_of(request).remove(request)
            self._held.discard(request)
        self.size -= 1

    def release_forks(self, parent: Request) -> None:
        """Queues the forks of a request, whose prompt is computed or never will be, ahead of arrivals."""
        forks = self.forks.release(parent)
        if forks:
            self.order.put_back(forks)
            self.size += len(forks)
            self.blocked = False

    def is_quiet(self) -> bool:
        """Whether nobody will be admitted while the running requests only generate."""
        return not self.size or (self.blocked and self.order.stable and not self.asks_again)
