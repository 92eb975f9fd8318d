"""vLLM v1's step: running requests first, in admission order, then waiting ones, under one token budget.

There are no phases: every request's computed tokens catch up with its known tokens, and a long prompt takes
what the budget leaves. Out of blocks, a victim is preempted, and nobody is admitted in that step.

Source: vllm/v1/core/sched/scheduler.py, `Scheduler.schedule` (0.24).
"""

from __future__ import annotations

from pagecast.sim.core.decoders import admission_order
from pagecast.sim.core.engines.vllm.versions import VllmRules
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.rules.adapters import AdapterSlots
from pagecast.sim.core.rules.candidates import Candidates, Gate, TenantCeilings
from pagecast.sim.core.rules.rules import Admission, Victim
from pagecast.sim.core.step import Step


class VllmMix:
    """Prompts and decodes share a step (chunked prefill)."""

    def __init__(self, admission: Admission, victim: Victim, rules: VllmRules) -> None:
        self.admission = admission
        self.victim = victim
        self.rules = rules

    def fill(self, step: Step, memory: Memory, queue: Queue) -> None:
        """Schedules the running requests, and waiting ones if nobody was preempted."""
        self._schedule_running(step, memory, queue)
        step.end_decodes()
        if not step.preempted:
            self._schedule_waiting(step, memory, queue)

    # ---- running requests

    def _schedule_running(self, step: Step, memory: Memory, queue: Queue) -> None:
        """Gives running requests tokens and blocks in admission order, preempting where blocks run out."""
        running = step.running
        for request in self._wanting(step, memory):
            if request.state is State.WAITING or request in step.left_out:
                continue  # preempted earlier in this pass, or left out
            if request in running.chunked:
                scheduled = self._schedule_chunk(step, memory, queue, request)
            else:
                scheduled = self._schedule_decode(step, memory, queue, request)
            if not scheduled and not self.rules.goes_on_after_own_preemption:
                # It had to preempt itself: those behind it are left out of this step.
                step.leave_out([other for other in running.decoders.requests if other.order > request.order])
                return

    def _wanting(self, step: Step, memory: Memory) -> list[Request]:
        """The running requests to visit; the others have their tokens without being visited.

        It also gives all decoding requests their blocks, where there are enough. Of the decoding requests
        those are visited that begin or fill a block: see `Step`.
        """
        chunked = step.running.chunked
        if not chunked and step.decode_all():
            return []
        if step.drafting:
            return sorted(chunked, key=admission_order)
        if enough_for_all(step, memory):
            step.decode_all()
            return list(chunked)
        # A request that fills a block needs none, but publishes it in its turn.
        decoding = {**step.crossing(), **step.filling()}
        return sorted([*decoding, *chunked], key=admission_order)

    def _schedule_chunk(self, step: Step, memory: Memory, queue: Queue, request: Request) -> bool:
        tokens = step.next_chunk(request)
        if not tokens:
            return True
        memory.leave(request, step.read_from(request, request.computed_tokens))
        blocks = memory.missing(request, step.with_lookahead(request.computed_tokens + tokens))
        if not self._make_room(step, memory, queue, request, blocks):
            return False
        step.compute(request, tokens)
        return True

    def _schedule_decode(self, step: Step, memory: Memory, queue: Queue, request: Request) -> bool:
        begins = request in step.crossing()
        fills = request in step.filling()
        blocks = memory.crossing_blocks if begins else 0
        if not self._make_room(step, memory, queue, request, blocks):
            return False
        if request.state is State.DECODE:
            step.decode(request, begins=begins, fills=fills)
        return True

    def _make_room(self, step: Step, memory: Memory, queue: Queue, request: Request, blocks: int) -> bool:
        """Preempts until `blocks` are free. False: the request itself had to go.

        vLLM walks its running list by index. For a victim before that index it steps back by one; before 0.28
        only if the victim had tokens in this step. If it had none (all are in flight, or it was left out),
        those versions pass over the request that comes next.
        """
        passed_over = 0
        while memory.free_blocks < blocks:
            step.failed_allocations += 1
            victim = self.victim.choose(step, memory, queue)
            before = victim.order < request.order
            idle = victim.state is State.DRAINING or victim in step.left_out
            idle = idle or (step.running.speculates(victim) and not step.computes(victim))
            passed_over += before and idle and self.rules.skips_after_idle_victim
            step.preempt(victim, had_turn=before and not idle)
            if victim is request:
                return False
        if passed_over:
            behind = [other for other in step.running.requests if other.order > request.order]
            step.leave_out(behind[:passed_over])
        return True

    # ---- waiting requests

    def _schedule_waiting(self, step: Step, memory: Memory, queue: Queue) -> None:
        """Admits waiting requests in order until the batch, the budget or the blocks are used up.

        Admission looks at the whole known sequence; only the first chunk's blocks are taken. Where layers
        keep different tokens, or requests speculate, these may not be free though the sequence is admitted.
        """
        queue.blocked = False
        if not queue.size:
            return
        budget = step.budget()
        running = step.running.requests
        checks_room = step.drafting or bool(step.limits.groups)
        choice = candidates(step, queue, self.rules) if step.gated else None
        while budget > 0 and queue.size:
            if len(running) >= step.limits.max_num_seqs:
                queue.blocked = True
                return
            request = queue.first() if choice is None else choice.first()
            if request is None:
                return
            if request.in_flight_tokens:
                return  # preempted between steps: what its last step yields comes first
            hit = memory.find(request)
            if not self.admission.admits(step, memory, queue, request, hit):
                step.refuse(request, hit)
                return
            start = step.head_start(request, hit)
            done = hit.tokens + start.tokens
            tokens = step.joining_tokens(done, request.known_tokens - done, budget)
            if not tokens:
                return
            if checks_room and not memory.fits_now(request, hit, step.with_lookahead(done + tokens)):
                step.refuse(request, hit)
                return
            budget -= tokens + step.slots
            step.admit(request, hit, start.tokens)
            step.run(request)
            step.compute(request, tokens, start)


def candidates(step: Step, queue: Queue, rules: VllmRules) -> Candidates | None:
    """The waiting requests that adapters and ceilings let pass; None where there are neither."""
    gates = gates_of(step, rules)
    return Candidates(queue, gates) if gates else None


def gates_of(step: Step, rules: VllmRules) -> list[Gate]:
    """The adapters and the ceilings of tenants, where there are any."""
    gates: list[Gate] = []
    if step.limits.max_loras is not None:
        computing = step.running.requests if rules.counts_running_adapters else step.computing()
        gates.append(AdapterSlots(computing, step.limits.max_loras))
    if step.limits.tenants is not None and step.limits.tenants.limited:
        gates.append(TenantCeilings(step))
    return gates


def enough_for_all(step: Step, memory: Memory) -> bool:
    """Whether nobody will be preempted and every chunk comes after all decodes: nearly always."""
    running = step.running
    blocks = len(step.crossing()) * memory.crossing_blocks
    for request in running.chunked:
        blocks += memory.missing(request, request.computed_tokens + step.next_chunk(request))
    if blocks > memory.free_blocks:
        return False
    return not running.chunked or next(reversed(running.requests)) in running.chunked
