"""Admission rules."""

from __future__ import annotations

from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request
from pagecast.sim.core.step import Step


class WholeSequence:
    """Admits a request whose whole known sequence fits in free blocks now (vLLM, nano-vLLM).

    It is a check, not a reservation: vLLM takes the blocks of the first chunk only, so two prompts admitted
    in one step may count on the same blocks. Running out of blocks later ends in a preemption.
    """

    def admits(self, step: Step, memory: Memory, queue: Queue, request: Request, hit: Hit) -> bool:
        """Whether the blocks of all known tokens are free."""
        return memory.fits(request, hit, request.known_tokens)
