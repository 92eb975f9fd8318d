"""Turns of all decoding requests together, in models whose layers keep different tokens.

In its turn a request gives back the blocks that left its windows before it takes others (`turns.py`). What it
gives back goes to the end of the free blocks. So where enough blocks are free from the start, all requests of
a number of steps may take theirs before all of them give back. Only blocks that cannot be found go ahead of
others: where that matters, the turns of each step are taken in order.
"""

from __future__ import annotations

from collections.abc import Collection

from pagecast.sim.core.decoders import admission_order
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.memory.table import Leaver
from pagecast.sim.core.request import Request
from pagecast.sim.core.running import Running


class CommonTurns:
    """The turns of some decode steps; `memory` is regular. First `note` them, then `take` them.

    What the requests fill is published when somebody may look for it.
    """

    def __init__(self, running: Running, memory: KvMemory) -> None:
        self._running = running
        self._memory = memory
        self._order: list[Request] = []  # who begins a block
        self._crossings = 0
        self._leaving: list[Leaver] = []  # what leaves windows, in order
        self._first = 0  # the first tick
        self._steps = 0
        self._at_first = 0  # how much of `_leaving` leaves at the first tick

    @property
    def added(self) -> int:
        """The blocks that are taken, less those that become free."""
        memory = self._memory
        return self._crossings * memory.growing_groups - memory.windows.freed_blocks(self._leaving)

    def note(self, steps: int, longest: int, apart: Collection[Request] = ()) -> None:
        """Notes who takes blocks and whose blocks may leave windows in so many steps from now on, in order.

        `longest` is the longest context. A request that decodes for the first time may have blocks of its
        prompt to give back. `apart`: those that have their turns by themselves, in a single step; where plans
        overlap, all that decode for the first time.
        """
        memory = self._memory
        decoders = self._running.decoders
        tick = self._running.tick
        self._order, self._crossings = _without(decoders.crossings(tick, steps), apart)
        self._leaving = []
        self._first, self._steps, self._at_first = tick, steps, 0
        windows = memory.windows
        offset = windows.leave_offset
        if offset is None or longest + steps <= windows.least:
            return
        first = tick
        if memory.fresh and not apart:
            leaving = {**decoders.crossing(tick - offset), **memory.fresh}
            self._leaving = windows.leavers(sorted(leaving, key=admission_order), tick)
            self._at_first = len(self._leaving)
            first += 1
        remaining = steps - (first - tick)
        if offset == memory.block_size - 1 and remaining > 0 and not apart:
            order, turns = self._leaving_order(steps, first)
        else:
            order, turns = _without(decoders.crossings(first - offset, remaining), apart)
        if turns:
            self._leaving += windows.leavers_in_turn(order, turns, first)

    def _leaving_order(self, steps: int, first: int) -> tuple[list[Request], int]:
        """What `decoders.crossings(first + 1, ...)` returns for the rest of `steps`, from the order noted.

        Who leaves a block in one step begins another in the step after. So this is the order noted without
        those who begin a block by tick `first`; beyond one block size they come again at its end.
        """
        crossing = self._running.decoders.crossing
        tick = self._running.tick
        begun = len(crossing(tick))
        if first > tick:
            begun += len(crossing(first))
        further = crossing(tick + steps)
        goes_round = steps > self._memory.block_size
        order = self._order[begun:] + (self._order[:begun] if goes_round else list(further))
        return order, self._crossings - begun + len(further)

    def take(self) -> None:
        """Does what was noted. The clock is left to the caller."""
        memory = self._memory
        if self._leaving and self._crossings and memory.order_matters(self._crossings):
            self._take_in_turn()
        else:
            if self._crossings:
                memory.grow_many(self._order, self._crossings)
            if self._leaving:
                memory.leave_in_turn(self._leaving)
        if not memory.late:
            memory.fresh.clear()

    def _take_in_turn(self) -> None:
        """Does what was noted step by step, and in each step request by request."""
        memory = self._memory
        crossing = self._running.decoders.crossing
        leaving = self._leaving
        ticks = [self._first] * self._at_first
        ticks += map(memory.windows.tick_of, leaving[self._at_first :])
        left = 0
        count = len(leaving)
        for tick in range(self._first, self._first + self._steps):
            for request in crossing(tick) if self._steps > 1 else self._order:
                end = left
                while end < count and (
                    ticks[end] < tick or (ticks[end] == tick and leaving[end][0].order <= request.order)
                ):
                    end += 1
                if end > left:
                    memory.leave_in_turn(leaving[left:end])
                    left = end
                memory.grow_many([request], 1)
        if left < count:
            memory.leave_in_turn(leaving[left:])


def _without(crossings: tuple[list[Request], int], apart: Collection[Request]) -> tuple[list[Request], int]:
    """Crossings of at most one block size, without some of the requests."""
    if not apart:
        return crossings
    order = [request for request in crossings[0] if request not in apart]
    return order, len(order)


def are_common(running: Running, memory: KvMemory) -> bool:
    """Whether turns may be taken together: their order within a step does not matter to anybody."""
    if not memory.regular or memory.writers.rivals or running.decoders.explicit:
        return False
    return not running.knows_ahead() and memory.log.events is None
