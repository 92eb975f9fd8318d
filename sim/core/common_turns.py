"""Turns of all decoding requests together, in models whose layers keep different tokens.

In its turn a request gives back the blocks that left its windows before it takes others (`turns.py`). What it
gives back goes to the end of the free blocks. So where enough blocks are free from the start, all requests of
a number of steps may take theirs before all of them give back.
"""

from __future__ import annotations

from pagecast.sim.core.decoders import admission_order
from pagecast.sim.core.memory.hybrid_memory import HybridMemory
from pagecast.sim.core.memory.table import Leaver
from pagecast.sim.core.request import Request
from pagecast.sim.core.running import Running


class CommonTurns:
    """The turns of some decode steps; `memory` is regular. First `note` them, then `take` them.

    What the requests fill is published when somebody may look for it.
    """

    def __init__(self, running: Running, memory: HybridMemory) -> None:
        self._running = running
        self._memory = memory
        self._order: list[Request] = []  # who begins a block
        self._crossings = 0
        self._leaving: list[Leaver] = []  # what leaves windows, in order

    @property
    def taken(self) -> int:
        """The blocks that are taken."""
        return self._crossings * self._memory.blocks_per_crossing

    @property
    def left(self) -> int:
        """The blocks that become free."""
        return self._memory.blocks_left(self._leaving) if self._leaving else 0

    def note(self, steps: int, longest: int) -> None:
        """Notes who takes blocks and whose blocks may leave windows in so many steps from now on, in order.

        `longest` is the longest context. A request that decodes for the first time may have blocks of its
        prompt to give back.
        """
        memory = self._memory
        decoders = self._running.decoders
        tick = self._running.tick
        self._order, self._crossings = decoders.crossings(tick, steps)
        self._leaving = []
        place = memory.leave_place
        if place is None or longest + steps <= memory.least_window:
            return
        first = tick
        if memory.fresh:
            leaving = {**decoders.crossing(tick - place), **memory.fresh}
            self._leaving = memory.leavers(sorted(leaving, key=admission_order), tick)
            first += 1
        steps -= first - tick
        if place == memory.block_size - 1 and 0 < steps < memory.block_size - 1:
            # They leave a block in the step before they begin one.
            begun = sum([len(decoders.crossing(each)) for each in range(tick, first + 1)])
            order = self._order[begun:] + list(decoders.crossing(first + steps))
            turns = len(order)
        else:
            order, turns = decoders.crossings(first - place, steps)
        if turns:
            self._leaving += memory.leavers_in_turn(order, turns, first)

    def take(self) -> None:
        """Does what was noted. The clock is left to the caller."""
        memory = self._memory
        if self._crossings:
            memory.grow_many(self._order, self._crossings)
        if self._leaving:
            memory.leave_in_turn(self._leaving)
        memory.fresh.clear()


def are_common(running: Running, memory: HybridMemory) -> bool:
    """Whether turns may be taken together: their order within a step does not matter to anybody."""
    if not memory.regular or memory.writers.rivals or running.decoders.explicit:
        return False
    return not running.knows_ahead() and memory.log.events is None
