"""Stride under SGLang's rules: decode steps in which nothing has to be evicted."""

from __future__ import annotations

from pagecast.sim.core.engines.sglang.memory import RadixMemory
from pagecast.sim.core.engines.sglang.mix import SglangMix
from pagecast.sim.core.lifecycle import Lifecycle
from pagecast.sim.core.step import Step
from pagecast.sim.core.stretch.stride import Stride


class RadixStride(Stride):
    """Plans stretches of decode steps over a `RadixMemory`."""

    def __init__(self, lifecycle: Lifecycle, memory: RadixMemory, step: Step, mix: SglangMix) -> None:
        super().__init__(lifecycle, memory, step)
        self._radix = memory
        self._mix = mix

    def quiet(self) -> int:
        """How many steps from now on are decode steps in which nobody is admitted, evicted or retracted."""
        if self.open is not None:
            self.settle()
        running = self._running
        decoders = running.decoders
        count = decoders.count
        if not count or running.chunked or not self._mix.is_quiet(self._queue, count):
            return 0
        in_flight = running.in_flight
        if in_flight and (in_flight[-1].chunks or in_flight[-1].last in running.draining):
            return 0
        tick = running.tick
        self.count = count
        self.context, self.longest = decoders.contexts(tick)
        quiet = self._radix.quiet(decoders, tick, count, decoders.quiet(tick))
        return quiet if self._mix.inbox is None else min(quiet, self._mix.inbox.quiet())

    def _apply(self, steps: int) -> None:
        """Takes the pages of the open stretch."""
        self._radix.take(self._crossings)
        self._mix.ratio.decode(steps)
        if self._mix.inbox is not None:
            self._mix.inbox.decode(steps)
