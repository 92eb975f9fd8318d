"""Victim rules: who is preempted when blocks run out."""

from __future__ import annotations

from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request
from pagecast.sim.core.step import Step


class Newest:
    """The request admitted last."""

    def choose(self, step: Step, memory: Memory, queue: Queue) -> Request:
        """The last of the running requests."""
        return next(reversed(step.running.requests))


class LeastUrgent:
    """The request with the highest priority number, and of these the latest to arrive (vLLM's `priority`)."""

    def choose(self, step: Step, memory: Memory, queue: Queue) -> Request:
        """The least urgent running request; of equals, the one admitted first."""
        return max(step.running.requests, key=_urgency)


class LeastProgress:
    """The request that would lose the fewest computed tokens; of equals, the one admitted last."""

    def choose(self, step: Step, memory: Memory, queue: Queue) -> Request:
        """The running request with the least progress."""
        running = step.running
        return min(reversed(running.requests), key=running.planned)


def _urgency(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival_ns
