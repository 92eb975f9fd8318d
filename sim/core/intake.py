"""Intake: whether a request may join the queue at all."""

from __future__ import annotations

from collections.abc import Sequence
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


class InTurn:
    """Several rules: the first that rejects a request says why."""

    def __init__(self, intakes: Sequence[Intake]) -> None:
        self._intakes = intakes

    def refusal(self, request: Request, running: Running, queue: Queue) -> str:
        """Why a request may not join the queue; empty where it may."""
        for intake in self._intakes:
            if reason := intake.refusal(request, running, queue):
                return reason
        return ""

    def admitted(self, request: Request, cached_tokens: int, now: int) -> None:
        """Tells each rule of an admission."""
        for intake in self._intakes:
            intake.admitted(request, cached_tokens, now)
