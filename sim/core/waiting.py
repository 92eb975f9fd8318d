"""Waiting requests, in the order in which they will be admitted."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from pagecast.sim.core.request import Request


class WaitingQueue(Protocol):
    """First in, first out, or by priority. `size` counts who waits.

    Adding and taking the first are O(log n); taking out another is O(n).
    """

    size: int

    def __iter__(self) -> Iterator[Request]: ...
    def add(self, request: Request) -> None:
        """Queues an arrival."""

    def put_back(self, request: Request) -> None:
        """Queues a preempted request: at the front, where order is by arrival."""

    def first(self) -> Request | None:
        """The request to be admitted next, or None."""

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""


class FirstComeFirstServed:
    """Arrival order; a preempted request goes to the front."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()
        self._gone: set[Request] = set()
        self.size = 0

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self._queue if request not in self._gone)

    def add(self, request: Request) -> None:
        self._settle(request)
        self.size += 1
        self._queue.append(request)

    def put_back(self, request: Request) -> None:
        self._settle(request)
        self.size += 1
        self._queue.appendleft(request)

    def first(self) -> Request | None:
        queue, gone = self._queue, self._gone
        while gone and queue and queue[0] in gone:
            gone.discard(queue.popleft())
        return queue[0] if queue else None

    def remove(self, request: Request) -> None:
        self.size -= 1
        if self._queue and self._queue[0] is request:
            self._queue.popleft()
        else:
            self._gone.add(request)

    def _settle(self, request: Request) -> None:
        # A request removed lazily and queued again must not be taken for the one that left.
        if request in self._gone:
            self._gone.discard(request)
            self._queue.remove(request)


class ByPriority:
    """Lowest priority number first, then arrival time, then the order of submission (vLLM's `priority`)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Request]] = []
        self._in: set[Request] = set()
        self._count = 0
        self.size = 0

    def __iter__(self) -> Iterator[Request]:
        return (entry[3] for entry in sorted(self._heap) if entry[3] in self._in)

    def add(self, request: Request) -> None:
        self._count += 1
        if request not in self._in:
            self._in.add(request)
            self.size += 1
            heapq.heappush(self._heap, (request.priority, request.arrival_ns, self._count, request))

    def put_back(self, request: Request) -> None:
        self.add(request)

    def first(self) -> Request | None:
        while self._heap and self._heap[0][3] not in self._in:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def remove(self, request: Request) -> None:
        self._in.discard(request)
        self.size -= 1
        if self._heap and self._heap[0][3] is request:
            heapq.heappop(self._heap)
        else:
            # Left in the middle: dropped now, lest it be queued again while the old entry is there.
            self._heap = [entry for entry in self._heap if entry[3] is not request]
            heapq.heapify(self._heap)
