"""nano-vLLM's step, in phases: prompts or decodes, never both, and prompts first.

A prompt's blocks are taken whole at admission. Only the first prompt of a step may be chunked, and it keeps
its place at the head of the queue until it is done. Blocks are published when a step is committed.

Source: nano-vLLM, nanovllm/engine/scheduler.py and block_manager.py (bb823b3).
"""

from __future__ import annotations

from pagecast.sim.core.memory.head_start import NO_START
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.rules.candidates import Candidates, TenantCeilings
from pagecast.sim.core.rules.rules import Admission, Victim
from pagecast.sim.core.step import Step


class NanoVllmMix:
    """A step prefills or decodes."""

    def __init__(self, admission: Admission, victim: Victim) -> None:
        self.admission = admission
        self.victim = victim

    def fill(self, step: Step, memory: Memory, queue: Queue) -> None:
        """Prefills what can be prefilled; only where there is nothing of that kind, decodes.

        Where blocks run out, running requests are preempted, the newest first.
        """
        self._prefill(step, memory, queue)
        if not step.chunks:
            step.running.unpark(step.limits.max_num_seqs)
            while not step.decode_all():
                step.failed_allocations += 1
                step.preempt(self.victim.choose(step, memory, queue))
            step.end_decodes()

    def _prefill(self, step: Step, memory: Memory, queue: Queue) -> None:
        """Prefills the prompt in progress, if any, then waiting ones in order, whole but for the first."""
        limits = step.limits
        budget = limits.max_num_batched_tokens
        queue.blocked = False
        limited = step.limits.tenants is not None and step.limits.tenants.limited
        choice: Candidates | None = None
        while len(step.chunks) < limits.max_num_seqs and budget > 0:
            started = next(iter(step.running.chunked), None)
            if started is None and limited and choice is None:
                choice = Candidates(queue, [TenantCeilings(step)])
            request = started or (queue.first() if choice is None else choice.first())
            if request is None:
                return
            start = NO_START
            if started is None:
                hit = memory.find(request)
                if not self.admission.admits(step, memory, queue, request, hit):
                    step.refuse(request, hit)
                    return
                start = step.head_start(request, hit)
                missing = request.known_tokens - hit.tokens - start.tokens
                if budget < missing and step.chunks:
                    return
                step.admit(request, hit, start)
                memory.grow(request, request.known_tokens)
            else:
                missing = request.known_tokens - request.computed_tokens
                if budget < missing and step.chunks:
                    return
            tokens = min(missing, budget)
            budget -= tokens
            if tokens == missing:
                step.run(request)
            step.compute(request, tokens, start)
