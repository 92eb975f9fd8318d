"""vLLM v1's step for models whose layers keep different tokens.

The order is that of `VllmMix`. But a running request first gives back what left its windows, also where it
then finds too few blocks; and a waiting request is admitted only where the blocks of its first chunk are
free, beside the check of its whole sequence, which counts no more than a window ever holds.

Source: vllm/v1/core/kv_cache_manager.py, `KVCacheManager.allocate_slots` (0.24).
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from pagecast.sim.core.decoders import admission_order
from pagecast.sim.core.engines.vllm.mix import VllmMix, enough_for_all
from pagecast.sim.core.engines.vllm.tuned import Tuning
from pagecast.sim.core.engines.vllm.versions import VllmRules
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.rules.rules import Admission, Victim
from pagecast.sim.core.running import Running
from pagecast.sim.core.step import Step
from pagecast.sim.core.stretch.common_turns import CommonTurns, are_common
from pagecast.sim.core.stretch.turns import due, publish_known, take_turn


class VllmHybridMix(VllmMix):
    """Prompts and decodes share a step. It is made for one memory, the one that it is called with."""

    def __init__(
        self,
        admission: Admission,
        victim: Victim,
        rules: VllmRules,
        memory: KvMemory,
        tuning: Tuning | None = None,
    ) -> None:
        super().__init__(admission, victim, rules, tuning)
        self._memory = memory

    def _serve_unvisited(self, step: Step, memory: Memory) -> list[Request]:
        """The running requests that take, publish or give back blocks in this step, in admission order."""
        hybrid = self._memory
        running = step.running
        hybrid.begin_step()
        publish_known(running, hybrid)
        if running.chunked and self.tuning is not None:
            return step.all_in_turn()
        apart = _fresh(running, hybrid)
        if apart is not None and _take_together(step, hybrid, apart):
            return sorted([*apart, *running.chunked], key=admission_order) if apart else list(running.chunked)
        wanting = due(running, hybrid)
        if running.chunked:
            return sorted({**dict.fromkeys(wanting), **running.chunked}, key=admission_order)
        return wanting

    def _schedule_decode(self, step: Step, memory: Memory, queue: Queue, request: Request) -> bool:
        hybrid = self._memory
        running = step.running
        computed = running.planned(request)
        memory.leave(request, step.read_from(request, computed))
        blocks = memory.missing(request, computed + 1)
        if not self._make_room(step, memory, queue, request, blocks):
            return False
        if request.state is State.DECODE and request not in step.left_out:
            take_turn(running, hybrid, request, computed)
        return True

    def _schedule_waiting(self, step: Step, memory: Memory, queue: Queue) -> None:
        self._memory.refused_blocks = 0
        super()._schedule_waiting(step, memory, queue)


def _fresh(running: Running, memory: KvMemory) -> Collection[Request] | None:
    """Decoding requests whose windows do not depend on one token in flight yet: they are served one by one.

    They come last, as their prompts were completed last. None: one of them comes before some other.
    """
    if not memory.late or not memory.fresh:
        return ()
    decoding = running.decoders.requests
    memory.keep_fresh(decoding)
    fresh = memory.fresh
    return fresh if fresh.keys() >= set(islice(reversed(decoding), len(fresh))) else None


def _take_together(step: Step, memory: KvMemory, apart: Collection[Request]) -> bool:
    """Lets decoding requests but for those `apart` have their turns together, ahead of all chunks.

    False: that is not possible.

    It is nearly always: nobody will be preempted, and no chunk publishes what they write.
    """
    running = step.running
    if step.drafting or not are_common(running, memory) or not enough_for_all(step, memory):
        return False
    if any(memory.writers.may_write(request.keys) for request in running.chunked):
        return False
    if memory.leaves_blanks and _chunks_come_first(running):
        return False
    if running.decoders.count:
        turns = CommonTurns(running, memory)
        turns.note(1, running.decoders.contexts(running.tick)[1], apart)
        turns.take()
    return True


def _chunks_come_first(running: Running) -> bool:
    """Whether the turn of some chunk comes before that of a decoding request."""
    if not running.chunked or not running.decoders.count:
        return False
    first = min([request.order for request in running.chunked])
    return first < next(reversed(running.decoders.requests)).order
