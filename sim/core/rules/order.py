"""Orders of the waiting queue: first come first served, and by priority."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.request import Request


class FirstComeFirstServed:
    """Arrival order; preempted requests and forks go to the front. O(1).

    `passed_over_stay_ahead`: they go behind those that were passed over.
    """

    stable: bool

    def __init__(self, *, passed_over_stay_ahead: bool = True) -> None:
        self.stable = True
        self._stay_ahead = passed_over_stay_ahead
        self._queue: deque[Request] = deque()
        self._withdrawn: set[Request] = set()
        self._passed: set[Request] = set()  # all at the front

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self._queue if request not in self._withdrawn)

    def add(self, request: Request) -> None:
        """Adds an arrival at the end."""
        if self._withdrawn:
            self._forget(request)
        self._queue.append(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Adds requests at the front, in their order, but behind those passed over."""
        if self._withdrawn:
            for request in requests:
                self._forget(request)
        ahead = []
        if self._passed:
            queue = self._queue
            while queue and (queue[0] in self._passed or queue[0] in self._withdrawn):
                ahead.append(queue.popleft())
        for request in reversed(requests):
            self._queue.appendleft(request)
        self._queue.extendleft(reversed(ahead))

    def pass_over(self, request: Request) -> None:
        """Keeps a request ahead of those put back."""
        if self._stay_ahead:
            self._passed.add(request)

    def bring_back(self, requests: Sequence[Request]) -> None:
        """Adds requests at the very front, in their order."""
        for request in requests:
            if self._withdrawn:
                self._forget(request)
        self._queue.extendleft(reversed(requests))
        if self._stay_ahead:
            self._passed.update(requests)

    def first(self, memory: Memory) -> Request | None:
        """The request at the front."""
        queue = self._queue
        while self._withdrawn and queue and queue[0] in self._withdrawn:
            self._withdrawn.discard(queue.popleft())
        return queue[0] if queue else None

    def remove(self, request: Request) -> None:
        """Takes a request out: at once from the front, lazily from the middle."""
        if self._passed:
            self._passed.discard(request)
        if self._queue and self._queue[0] is request:
            self._queue.popleft()
        else:
            self._withdrawn.add(request)

    def _forget(self, request: Request) -> None:
        # A request removed lazily and queued again must not be taken for the one that left.
        if request in self._withdrawn:
            self._withdrawn.discard(request)
            self._queue.remove(request)


class ByPriority:
    """Lowest priority number first, then arrival time, then the order of the trace (vLLM's `priority`).

    vLLM takes ids as texts last. Its server gives every request its own arrival time, in the order in which
    they come, so that ids decide nothing there. Adding and taking the first are O(log n); taking out another
    is O(n).
    """

    stable: bool

    def __init__(self) -> None:
        self.stable = True
        self._heap: list[tuple[int, int, Any, int, Request]] = []
        self._count = 0

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap))

    def add(self, request: Request) -> None:
        """Adds an arrival."""
        self._count += 1
        entry = (request.priority, request.arrival_ns, self.place(request), self._count, request)
        heapq.heappush(self._heap, entry)

    def place(self, request: Request) -> Any:
        """Its place among requests of one priority and arrival time."""
        return request.index

    def put_back(self, requests: Sequence[Request]) -> None:
        """Adds requests where their priority puts them."""
        for request in requests:
            self.add(request)

    def first(self, memory: Memory) -> Request | None:
        """The most urgent request."""
        return self._heap[0][-1] if self._heap else None

    def pass_over(self, request: Request) -> None:
        pass  # its priority keeps its place

    def bring_back(self, requests: Sequence[Request]) -> None:
        """Adds requests where their priority puts them."""
        for request in requests:
            self.add(request)

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        if self._heap and self._heap[0][-1] is request:
            heapq.heappop(self._heap)
        else:
            self._heap = [entry for entry in self._heap if entry[-1] is not request]
            heapq.heapify(self._heap)
