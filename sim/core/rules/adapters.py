"""LoRA adapters: a step computes with so many of them at most."""

from __future__ import annotations

from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request
from pagecast.sim.core.step import Step


class AdapterSlots:
    """The waiting requests of one step in order, without those whose adapter has no place in it (vLLM).

    Whoever is given out is admitted before the next is asked for.
    """

    def __init__(self, step: Step, queue: Queue, most: int) -> None:
        self._queue = queue
        self._most = most
        self._adapters = step.adapters()
        self._waiting = list(queue)
        self._next = 0
        self._latest: Request | None = None
        queue.passed_over = False

    def first(self) -> Request | None:
        """The next request whose adapter has a place; None where there is none."""
        if self._latest is not None and self._latest.adapter:
            self._adapters.add(self._latest.adapter)
        waiting = self._waiting
        while self._next < len(waiting):
            request = waiting[self._next]
            self._next += 1
            adapter = request.adapter
            if not adapter or adapter in self._adapters or len(self._adapters) < self._most:
                self._latest = request
                return request
            self._queue.pass_over(request)
        return None
