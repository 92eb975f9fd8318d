"""Stride of models whose layers keep different tokens.

A stretch is planned as `Stride` plans it, but settled step by step: in each of them blocks may leave a window
before others are taken, and the order decides which content is evicted.
"""

from __future__ import annotations

from pagecast.sim.core.lifecycle import Lifecycle
from pagecast.sim.core.memory.hybrid_memory import HybridMemory
from pagecast.sim.core.step import Step
from pagecast.sim.core.stride import Stride
from pagecast.sim.core.turns import due, publish_known, take_turn


class HybridStride(Stride):
    """Plans stretches of decode steps over a `HybridMemory`."""

    def __init__(self, lifecycle: Lifecycle, memory: HybridMemory, step: Step) -> None:
        super().__init__(lifecycle, memory, step)
        self._hybrid = memory

    def quiet(self) -> int:
        """How many steps from now on are decode steps in which nothing has to be decided.

        Blocks that leave windows may make room for the first that waits: then somebody has to ask.
        """
        steps = super().quiet()
        if steps and self._queue.size:
            return min(steps, self._hybrid.refused_for(self.count))
        return steps

    def _blocks_added(self, steps: int) -> int:
        """Blocks in use after `steps` steps from now on, beyond those in use now."""
        running = self._running
        return self._hybrid.blocks_added(running.decoders.requests, running.tick, steps)

    def settle(self) -> None:
        """Does what the open stretch planned, step by step."""
        plan = self.open
        if plan is None:
            return
        self.open = None
        running = self._running
        lifecycle = self._lifecycle
        memory = self._hybrid
        publish_known(running, memory)
        first = running.tick
        step = lifecycle.log.step
        size = memory.block_size
        busy = running.decoders.busy(memory.places)
        for tick in range(first, first + plan.steps):
            if not busy[tick % size] and not memory.fresh:
                continue
            running.tick = tick
            lifecycle.log.step = step + tick - first
            for request in due(running, memory):
                computed = tick - request.lag
                memory.leave(request, computed)
                take_turn(running, memory, request, computed)
        running.tick = first + plan.steps
        lifecycle.log.step = step + plan.steps
        at_end = running.decoders.pop_ended(running.tick - 1)
        if at_end:
            lifecycle.drain(at_end, plan.last)
