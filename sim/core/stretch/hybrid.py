"""Stride of models whose layers keep different tokens.

A stretch is planned as `Stride` plans it. In each of its steps blocks may leave a window before others are
taken. Where possible all takes of a stretch come before all that leaves (`CommonTurns`). Otherwise, and where
a log is kept, a stretch is settled step by step.
"""

from __future__ import annotations

from pagecast.sim.core.lifecycle import Lifecycle
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.step import Step
from pagecast.sim.core.stretch.common_turns import CommonTurns, are_common
from pagecast.sim.core.stretch.stride import Stride
from pagecast.sim.core.stretch.turns import due, publish_known, take_turn


class HybridStride(Stride):
    """Plans stretches of decode steps over a `KvMemory`."""

    def __init__(self, lifecycle: Lifecycle, memory: KvMemory, step: Step) -> None:
        super().__init__(lifecycle, memory, step)
        self._hybrid = memory
        self._turns = CommonTurns(lifecycle.running, memory)  # of the open stretch
        self._quiet_until = 0  # tick up to which the first that waits is refused; looked up again from there

    def quiet(self) -> int:
        """How many steps from now on are decode steps in which nothing has to be decided.

        Blocks that leave windows may make room for the first that waits: then somebody has to ask. Each such
        ask counts as a failed allocation where it is refused. So when to ask is looked up only where the
        time before is over, and does not depend on how a stretch is cut or on how many steps are planned
        at once.
        """
        memory = self._hybrid
        if memory.late and (memory.fresh or self._running.knows_ahead()):
            # What leaves windows depends on what is in flight, which is one token of each only from then on.
            self._quiet_until = 0
            return 0
        steps = super().quiet()
        if not steps or not self._queue.size:
            self._quiet_until = 0
            return steps
        tick = self._running.tick
        if tick >= self._quiet_until:
            self._quiet_until = tick + self._hybrid.refused_for(self.count)
        return min(steps, self._quiet_until - tick)

    def _blocks_added(self, steps: int) -> int:
        """Blocks in use after `steps` steps from now on, beyond those now; notes who takes and who leaves."""
        running = self._running
        memory = self._hybrid
        if not memory.regular:
            return memory.blocks_added(running.decoders, running.tick, steps)
        turns = self._turns
        turns.note(steps, self.longest)
        return turns.added

    def _apply(self, steps: int) -> None:
        """Takes, gives back and publishes the blocks of the open stretch."""
        if are_common(self._running, self._hybrid):
            # What leaves may have to be published before, as far as it is filled after all steps.
            self._running.tick += steps
            self._turns.take()
        else:
            self._apply_in_turn(steps)

    def _apply_in_turn(self, steps: int) -> None:
        """Does what a stretch planned, each request in its turn."""
        running = self._running
        memory = self._hybrid
        log = self._log
        first = running.tick
        step = log.step
        publish_known(running, memory)
        size = memory.block_size
        busy = running.decoders.busy(memory.offsets)
        for tick in range(first, first + steps):
            if not busy[tick % size] and not memory.fresh:
                continue
            running.tick = tick
            log.step = step + tick - first
            for request in due(running, memory):
                computed = tick - request.lag
                memory.leave(request, computed - memory.late)
                take_turn(running, memory, request, computed)
