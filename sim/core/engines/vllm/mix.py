"""vLLM v1's step: running requests first, in admission order, then waiting ones, under one token budget.

There are no phases: every request's computed tokens catch up with its known tokens, and a long prompt takes
what the budget leaves. Out of blocks, a victim is preempted, and nobody is admitted in that step.

Source: vllm/v1/core/sched/scheduler.py, `Scheduler.schedule` (0.24).
"""

from __future__ import annotations

from pagecast.sim.core.decoders import admission_order
from pagecast.sim.core.engines.vllm.tuned import TunedPass, Tuning
from pagecast.sim.core.engines.vllm.versions import VllmRules
from pagecast.sim.core.engines.vllm.waiting import WaitingPass
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.rules.rules import Admission, Victim
from pagecast.sim.core.step import Step


class VllmMix:
    """Prompts and decodes share a step (chunked prefill).

    `tuning`: the settings that most servers leave alone. With them, where prompts are being computed,
    all requests are visited one by one, in admission order.
    """

    def __init__(
        self, admission: Admission, victim: Victim, rules: VllmRules, tuning: Tuning | None = None
    ) -> None:
        self.admission = admission
        self.victim = victim
        self.rules = rules
        self.tuning = tuning
        self._waiting: WaitingPass | None = None

    def fill(self, step: Step, memory: Memory, queue: Queue) -> None:
        """Schedules the running requests, and waiting ones if nobody was preempted."""
        tuning = self.tuning
        if tuning is not None:
            tuning.begin(step, queue)
        self._schedule_running(step, memory, queue)
        step.end_decodes()
        if not step.preempted:
            self._schedule_waiting(step, memory, queue)
        if tuning is not None:
            tuning.end(step, queue)

    # ---- running requests

    def _schedule_running(self, step: Step, memory: Memory, queue: Queue) -> None:
        """Gives running requests tokens and blocks in admission order, preempting where blocks run out."""
        running = step.running
        for request in self._serve_unvisited(step, memory):
            if request.state is State.WAITING or request in step.left_out:
                continue  # preempted earlier in this pass, or left out
            if request in running.chunked:
                scheduled = self._schedule_chunk(step, memory, queue, request)
            elif step.in_turn:
                scheduled = self._schedule_turn(step, memory, queue, request)
            else:
                scheduled = self._schedule_decode(step, memory, queue, request)
            if scheduled or (self.rules.goes_on_after_own_preemption and request in step.preempted):
                continue
            # It preempted itself, found no blocks and nobody to preempt, or no budget was left: this step
            # leaves it out, and those behind it.
            step.leave_out([other for other in running.decoders.requests if other.order >= request.order])
            return

    def _serve_unvisited(self, step: Step, memory: Memory) -> list[Request]:
        """The running requests to be visited one by one, in admission order; the others are served here.

        Decodes that neither begin nor fill a block need no visit (see `Step`). Those that do are served here
        together where blocks suffice, which is nearly always; else they are visited. So most decodes never
        reach the caller's loop: a rule about them belongs before this call.
        """
        chunked = step.running.chunked
        if step.running.knows_ahead():
            step.publish_behind()
        if not chunked and step.decode_all():
            return []
        if chunked and self.tuning is not None:
            return step.all_in_turn()
        if step.drafting:
            return sorted(chunked, key=admission_order)
        if enough_for_all(step, memory):
            step.decode_all()
            return list(chunked)
        # A request that fills a block needs none, but publishes it in its turn.
        decoding = {**step.crossing(), **step.filling()}
        return sorted([*decoding, *chunked], key=admission_order)

    def _schedule_chunk(self, step: Step, memory: Memory, queue: Queue, request: Request) -> bool:
        tuning = self.tuning
        tokens = step.next_chunk(request) if tuning is None else tuning.next_chunk(step, request)
        if not tokens:
            return True
        memory.leave(request, step.read_from(request, request.computed_tokens))
        blocks = memory.missing(request, step.with_lookahead(request.computed_tokens + tokens))
        if not self._make_room(step, memory, queue, request, blocks):
            return False
        step.compute(request, tokens)
        if tuning is not None:
            tuning.note_chunk(step, request)
        return True

    def _schedule_turn(self, step: Step, memory: Memory, queue: Queue, request: Request) -> bool:
        """Lets a request decode where all take their tokens one by one."""
        if step.left() <= 0 or not self._schedule_decode(step, memory, queue, request):
            return False
        step.turns += request.state is State.DECODE and request not in step.left_out
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
        """Preempts until `blocks` are free. False: the request itself had to go, or nobody may.

        vLLM walks its running list by index. For a victim before that index it steps back by one; before 0.28
        only if the victim had tokens in this step. If it had none (all are in flight, or it was left out),
        those versions pass over the request that comes next.
        """
        passed_over = 0
        while memory.free_blocks < blocks:
            step.failed_allocations += 1
            victim = self.victim.choose(step, memory, queue)
            if self.rules.spares_computed and step.lifecycle.keeps_blocks_of(victim):
                return False
            before = victim.order < request.order
            idle = victim.state is State.DRAINING or victim in step.left_out
            idle = idle or (victim in step.running.chunked and not step.computes(victim))
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
        """Admits waiting requests in order until the batch, the budget or the blocks are used up."""
        if self._waiting is None:
            parts = (step, memory, queue, self.admission, self.rules)
            tuning = self.tuning
            self._waiting = WaitingPass(*parts) if tuning is None else TunedPass(*parts, tuning)
        self._waiting.run()


def enough_for_all(step: Step, memory: Memory) -> bool:
    """Whether free blocks suffice for all running requests, and every chunk comes after all decodes.

    Then nobody is preempted, and decodes may take their blocks together ahead of the chunks.
    """
    running = step.running
    blocks = len(step.crossing()) * memory.crossing_blocks
    for request in running.chunked:
        blocks += memory.missing(request, request.computed_tokens + step.next_chunk(request))
    if blocks > memory.free_blocks:
        return False
    return not running.chunked or next(reversed(running.requests)) in running.chunked
