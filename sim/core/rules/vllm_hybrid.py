"""vLLM v1's step for models whose layers keep different tokens.

The order is that of `VllmMix`. But a running request first gives back what left its windows, also where it
then finds too few blocks; and a waiting request is admitted only where the blocks of its first chunk are
free, beside the check of its whole sequence, which counts no more than a window ever holds.

Source: vllm/v1/core/kv_cache_manager.py, `KVCacheManager.allocate_slots` (0.24).
"""

from __future__ import annotations

from pagecast.sim.core.common_turns import CommonTurns, are_common
from pagecast.sim.core.decoders import admission_order
from pagecast.sim.core.memory.hybrid_memory import HybridMemory
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.rules.vllm import VllmMix, candidates, enough_for_all
from pagecast.sim.core.step import Step
from pagecast.sim.core.turns import due, publish_known, take_turn


class VllmHybridMix(VllmMix):
    """Prompts and decodes share a step; `memory` is a `HybridMemory`."""

    def fill(self, step: Step, memory: KvMemory, queue: Queue) -> None:
        """Schedules the running requests, and waiting ones if nobody was preempted."""
        assert isinstance(memory, HybridMemory)
        self._schedule_all(step, memory, queue)
        step.end_decodes()
        if not step.preempted:
            self._admit_waiting(step, memory, queue)

    # ---- running requests

    def _schedule_all(self, step: Step, memory: HybridMemory, queue: Queue) -> None:
        """Visits, in admission order, the requests that take, publish or give back blocks in this step."""
        running = step.running
        memory.filled.clear()
        publish_known(running, memory)
        if _take_together(step, memory):
            wanting = list(running.chunked)
        else:
            wanting = due(running, memory)
            if running.chunked:
                wanting = sorted({**dict.fromkeys(wanting), **running.chunked}, key=admission_order)
        for request in wanting:
            if request.state is State.WAITING or request in step.left_out:
                continue
            if request in running.chunked:
                scheduled = self._compute_chunk(step, memory, queue, request)
            else:
                scheduled = self._decode(step, memory, queue, request)
            if not scheduled:
                # It had to preempt itself: those behind it are left out of this step.
                step.leave_out([other for other in running.decoders.requests if other.order > request.order])
                return

    def _compute_chunk(self, step: Step, memory: HybridMemory, queue: Queue, request: Request) -> bool:
        tokens = step.next_chunk(request)
        if not tokens:
            return True
        memory.leave(request, request.computed_tokens)
        blocks = memory.missing(request, step.with_lookahead(request.computed_tokens + tokens))
        if not self._make_room(step, memory, queue, request, blocks):
            return False
        step.compute(request, tokens)
        return True

    def _decode(self, step: Step, memory: HybridMemory, queue: Queue, request: Request) -> bool:
        running = step.running
        computed = running.planned(request)
        memory.leave(request, computed)
        blocks = memory.missing(request, computed + 1)
        if not self._make_room(step, memory, queue, request, blocks):
            return False
        if request.state is State.DECODE and request not in step.left_out:
            take_turn(running, memory, request, computed)
        return True

    # ---- waiting requests

    def _admit_waiting(self, step: Step, memory: HybridMemory, queue: Queue) -> None:
        """Admits waiting requests in order until the batch, the budget or the blocks are used up."""
        queue.blocked = False
        budget = step.budget()
        choice = candidates(step, queue)
        while budget > 0 and queue.size:
            if len(step.running.requests) >= step.limits.max_num_seqs:
                memory.refused_blocks = 0
                queue.blocked = True
                return
            request = queue.first() if choice is None else choice.first()
            if request is None:
                return
            if request.in_flight_tokens:
                return  # preempted between steps: what its last step yields comes first
            hit = memory.find(request)
            tokens = min(request.known_tokens - hit.tokens, budget)
            admitted = self.admission.admits(step, memory, queue, request, hit)
            if not admitted or not memory.fits_now(request, hit, step.with_lookahead(hit.tokens + tokens)):
                step.refuse(request, hit)
                return
            budget -= tokens
            step.admit(request, hit)
            step.run(request)
            step.compute(request, tokens)


def _take_together(step: Step, memory: HybridMemory) -> bool:
    """Lets all decoding requests have their turns together, ahead of all chunks. False: that is not possible.

    It is nearly always: nobody will be preempted, and no chunk publishes what they write.
    """
    running = step.running
    if step.drafting or not are_common(running, memory) or not enough_for_all(step, memory):
        return False
    if any(memory.writers.may_write(request.keys) for request in running.chunked):
        return False
    if running.decoders.count:
        turns = CommonTurns(running, memory)
        turns.note(1, running.decoders.contexts(running.tick)[1])
        turns.take()
    return True
