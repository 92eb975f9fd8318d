"""Intake: whether a request may join the queue at all."""

from __future__ import annotations

from typing import Protocol

from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request
from pagecast.sim.core.running import Running


class Intake(Protocol):
    """May reject a request when it is submitted. It is asked once."""

    def refusal(self, request: Request, running: Running, queue: Queue) -> str:
        """Why a request may not join the queue; empty where it may."""
        ...

    def admitted(self, request: Request, cached_tokens: int, now: int) -> None:
        """Takes note of an admission."""
