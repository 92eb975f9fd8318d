"""Stride of models whose layers keep different tokens.

A stretch is planned as `Stride` plans it. In each of its steps blocks may leave a window before others are
taken. Where memory is `regular` what leaves goes to the end of the free blocks, and enough are free from the
start; so all takes of a stretch may come before all that leaves. Otherwise, and where a log is kept, a
stretch is settled step by step.
"""

from __future__ import annotations

from pagecast.sim.core.decoders import admission_order
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
        # Whose blocks leave windows within the open stretch: in its first step, and later, in turns.
        self._leaving_at_once: list[Request] = []
        self._leaving: list[Request] = []
        self._turns = 0

    def quiet(self) -> int:
        """How many steps from now on are decode steps in which nothing has to be decided.

        Blocks that leave windows may make room for the first that waits: then somebody has to ask.
        """
        steps = super().quiet()
        if steps and self._queue.size:
            return min(steps, self._hybrid.refused_for(self.count))
        return steps

    def _blocks_added(self, steps: int) -> int:
        """Blocks in use after `steps` steps from now on, beyond those now; notes who takes and who leaves."""
        running = self._running
        memory = self._hybrid
        if not memory.regular:
            return memory.blocks_added(running.decoders.requests, running.tick, steps)
        blocks = super()._blocks_added(steps) * memory.blocks_per_crossing
        self._note_leaving(steps)
        if not self._leaving and not self._leaving_at_once:
            return blocks
        leaving = dict.fromkeys([*self._leaving_at_once, *self._leaving])
        return blocks - memory.blocks_left(leaving, running.tick + steps - 1)

    def _note_leaving(self, steps: int) -> None:
        """Notes whose blocks may leave windows within a stretch, in order.

        A request that decodes for the first time may have blocks of its prompt to give back.
        """
        memory = self._hybrid
        decoders = self._running.decoders
        tick = self._running.tick
        self._leaving_at_once = []
        self._leaving = []
        self._turns = 0
        if memory.leave_place is None or self.longest + steps <= memory.least_window:
            return
        if not memory.fresh:
            if memory.leave_place == memory.block_size - 1 and steps < memory.block_size:
                # They leave a block in the step before they begin one.
                begun = len(decoders.crossing(tick))
                self._leaving = self._order[begun:] + list(decoders.crossing(tick + steps))
                self._turns = len(self._leaving)
            else:
                self._leaving, self._turns = decoders.crossings(tick - memory.leave_place, steps)
            return
        first = {*decoders.at_places(tick, (memory.leave_place,)), *memory.fresh}
        self._leaving_at_once = sorted(first, key=admission_order)
        self._leaving, self._turns = decoders.crossings(tick + 1 - memory.leave_place, steps - 1)

    def settle(self) -> None:
        """Does what the open stretch planned."""
        plan = self.open
        if plan is None:
            return
        self.open = None
        running = self._running
        lifecycle = self._lifecycle
        step = lifecycle.log.step + plan.steps
        if self._in_turn():
            self._settle_in_turn(plan.steps)
        else:
            self._settle_at_once(plan.steps)
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

    def _settle_at_once(self, steps: int) -> None:
        """Does what a stretch planned: all takes, and then all that leaves windows.

        What the requests fill is published when somebody may look for it.
        """
        memory = self._hybrid
        running = self._running
        first = running.tick
        if self._crossings:
            memory.grow_many(self._order, self._crossings)
        running.tick = first + steps
        for request in self._leaving_at_once:
            memory.leave(request, first - request.lag)
        if self._turns:
            memory.leave_in_turn(self._leaving, self._turns, first + bool(self._leaving_at_once))
        memory.fresh.clear()

    def _settle_in_turn(self, steps: int) -> None:
        """Does what a stretch planned, each request in its turn."""
        running = self._running
        memory = self._hybrid
        log = self._lifecycle.log
        first = running.tick
        step = log.step
        publish_known(running, memory)
        size = memory.block_size
        busy = running.decoders.busy(memory.places)
        for tick in range(first, first + steps):
            if not busy[tick % size] and not memory.fresh:
                continue
            running.tick = tick
            log.step = step + tick - first
            for request in due(running, memory):
                computed = tick - request.lag
                memory.leave(request, computed)
                take_turn(running, memory, request, computed)
        running.tick = first + steps
