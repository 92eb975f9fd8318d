"""Stride of models whose layers keep different tokens.

A stretch is planned as `Stride` plans it. In each of its steps blocks may leave a window before others are
taken. Where memory is `regular` what leaves goes to the end of the free blocks, and enough are free from the
start; so all takes of a stretch may come before all that leaves. Otherwise, and where a log is kept, a
stretch is settled step by step.
"""

from __future__ import annotations

from pagecast.sim.core.lifecycle import Lifecycle
from pagecast.sim.core.memory.hybrid_memory import HybridMemory
from pagecast.sim.core.request import Request
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
        decoders = self._running.decoders
        memory = self._hybrid
        tick = self._running.tick
        if not memory.regular:
            return memory.blocks_added(decoders.requests, tick, steps)
        blocks = super()._blocks_added(steps) * memory.blocks_per_crossing
        if memory.leave_place is None:
            return blocks
        leaving = decoders.crossings(tick - memory.leave_place, steps)[0]
        if memory.fresh:
            leaving = list(dict.fromkeys([*leaving, *memory.fresh]))
        return blocks - memory.blocks_left(leaving, tick + steps - 1)

    def settle(self) -> None:
        """Does what the open stretch planned."""
        plan = self.open
        if plan is None:
            return
        self.open = None
        running = self._running
        lifecycle = self._lifecycle
        end = running.tick + plan.steps
        step = lifecycle.log.step + plan.steps
        if self._in_turn():
            self._settle_in_turn(running.tick, end)
        elif self._hybrid.fresh:
            self._settle_in_turn(running.tick, running.tick + 1)
            self._settle_at_once(running.tick, end, *running.decoders.crossings(running.tick, plan.steps - 1))
        else:
            self._settle_at_once(running.tick, end, self._order, self._crossings)
        lifecycle.log.step = step
        at_end = running.decoders.pop_ended(running.tick - 1)
        if at_end:
            lifecycle.drain(at_end, plan.last)

    def _in_turn(self) -> bool:
        """Whether the order within a step matters, or somebody wants to know it."""
        running = self._running
        memory = self._hybrid
        if not memory.regular or memory.writers.rivals:
            return True
        return (
            running.decoders.explicit > 0 or running.knows_ahead() or self._lifecycle.log.events is not None
        )

    def _settle_at_once(self, first: int, end: int, order: list[Request], crossings: int) -> None:
        """Does what the requests do from tick `first` to `end`: all takes, and then all that leaves windows.

        What they fill is published when somebody may look for it.
        """
        memory = self._hybrid
        if crossings:
            memory.grow_many(order, crossings)
        self._running.tick = end
        if memory.leave_place is None:
            return
        leaving, turns = self._running.decoders.crossings(first - memory.leave_place, end - first)
        if turns:
            memory.leave_in_turn(leaving, turns, first)

    def _settle_in_turn(self, first: int, end: int) -> None:
        """Does what the requests do from tick `first` to `end`, each in its turn."""
        running = self._running
        memory = self._hybrid
        log = self._lifecycle.log
        step = log.step
        publish_known(running, memory)
        size = memory.block_size
        busy = running.decoders.busy(memory.places)
        for tick in range(first, end):
            if not busy[tick % size] and not memory.fresh:
                continue
            running.tick = tick
            log.step = step + tick - first
            for request in due(running, memory):
                computed = tick - request.lag
                memory.leave(request, computed)
                take_turn(running, memory, request, computed)
        running.tick = end
