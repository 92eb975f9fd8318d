"""vLLM v1's waiting requests where KV is offloaded to host memory (OffloadingConnector).

A waiting request asks the host tier for what follows its prefix hit. It may be passed over, to ask again in
the next step; or it is given blocks and stays in the queue, passed over, until its load has ended. Those
behind it are admitted meanwhile. A load is begun only if it leaves free what others still need.

Source: vllm/v1/core/sched/scheduler.py, `Scheduler.schedule` (0.24).
"""

from __future__ import annotations

from pagecast.sim.core.engines.vllm.hybrid import VllmHybridMix
from pagecast.sim.core.engines.vllm.mix import VllmMix, gates_of
from pagecast.sim.core.engines.vllm.versions import VllmRules
from pagecast.sim.core.memory.head_start import NO_START, HeadStart
from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.rules.rules import Admission
from pagecast.sim.core.step import Step


class VllmOffloadingMix(VllmMix):
    """`VllmMix` with a host tier."""

    def _schedule_waiting(self, step: Step, memory: Memory, queue: Queue) -> None:
        WaitingPass(step, queue, self.admission, self.rules).run()


class VllmHybridOffloadingMix(VllmHybridMix):
    """`VllmHybridMix` with a host tier."""

    def _admit(self, step: Step, memory: Memory, queue: Queue) -> None:
        WaitingPass(step, queue, self.admission, self.rules).run()


class WaitingPass:
    """One step's way through the queue: each waiting request is admitted, passed over, or ends it."""

    def __init__(self, step: Step, queue: Queue, admission: Admission, rules: VllmRules) -> None:
        assert step.offloading is not None
        self.step = step
        self.queue = queue
        self.admission = admission
        self.offloading = step.offloading
        self.memory = step.offloading.memory
        self.budget = step.budget()
        self.aside: list[Request] = []
        # Whether an admission that the rule allows may still lack room now.
        self._checks_room = step.drafting or bool(step.limits.groups)
        self._gates = gates_of(step, rules) if step.gated else []
        self._lasting = True  # whoever was passed over is, until a request comes or goes

    def run(self) -> None:
        """Goes through the queue until the batch, the budget or the blocks are used up."""
        queue = self.queue
        queue.blocked = queue.passed_over = queue.gated = False
        if not queue.size:
            return
        running = self.step.running.requests
        while self.budget > 0:
            request = queue.first()
            if request is None:
                queue.blocked = bool(self.aside) and self._lasting
                break
            if len(running) >= self.step.limits.max_num_seqs:
                queue.blocked = True
                break
            if request.in_flight_tokens or not self._takes(request):
                break
        if self.aside:
            queue.bring_back(self.aside)
            queue.gated = self._lasting
            if not self._lasting:
                queue.passed_over = len(running) < self.step.limits.max_num_seqs

    def _takes(self, request: Request) -> bool:
        """Admits a request or passes it over. False: it can't be admitted now, nor can those behind it."""
        if request.state is State.LOADING:
            if request in self.offloading.loading:
                self._pass_over(request)
                return True
            self.step.lifecycle.receive(request)
        for gate in self._gates:
            if not gate.opens(request):
                self._pass_over(request, lasting=gate.lasting)
                return True
        if request.state is State.LOADING:
            return self._go_on(request)
        hit = self.memory.find(request)
        external = self.offloading.ask(request, hit.tokens)
        if external is None:
            self._pass_over(request)
            return True
        return self._load(request, hit, external) if external else self._admit(request, hit)

    def _pass_over(self, request: Request, *, lasting: bool = False) -> None:
        self._lasting &= lasting
        self.queue.set_aside(request)
        self.aside.append(request)

    def _refuse(self, request: Request, hit: Hit) -> bool:
        self.step.refuse(request, hit)
        if not self.offloading.settled:
            self.queue.blocked = False
        return False

    def _load(self, request: Request, hit: Hit, external: int) -> bool:
        step = self.step
        whole = hit._replace(tokens=hit.tokens + external)
        room_tokens = whole.tokens if self.memory.recomputes_block else step.with_lookahead(whole.tokens)
        # What a windowed group needs depends on where the load ends.
        refused = whole if step.limits.groups else hit
        if not self.admission.admits(step, self.memory, self.queue, request, whole):
            return self._refuse(request, refused)
        reserved = self.offloading.reserved_blocks(step.limits.max_model_len)
        if not self.memory.fits_now(request, whole, room_tokens, reserved):
            return self._refuse(request, refused)
        step.load(request, hit, external)
        for gate in self._gates:
            gate.hold(request)
        self._pass_over(request)
        return True

    def _admit(self, request: Request, hit: Hit) -> bool:
        step = self.step
        if not self.admission.admits(step, self.memory, self.queue, request, hit):
            return self._refuse(request, hit)
        start = step.head_start(request, hit)
        done = hit.tokens + start.tokens
        tokens = step.joining_tokens(done, request.known_tokens - done, self.budget)
        if not tokens:
            return False
        if self._checks_room and not self.memory.fits_now(request, hit, step.with_lookahead(done + tokens)):
            return self._refuse(request, hit)
        step.admit(request, hit, start.tokens)
        self._run(request, tokens, start)
        return True

    def _go_on(self, request: Request) -> bool:
        """Admits a request that a load has brought tokens to; it holds their blocks."""
        step, memory = self.step, self.memory
        limit = step.limits.max_model_len
        known_tokens = request.known_tokens if limit is None else min(request.known_tokens, limit)
        if memory.still_needed(request, known_tokens) > memory.free_blocks:
            return self._wait()
        memory.leave(request, request.computed_tokens)
        done = request.computed_tokens
        tokens = step.joining_tokens(done, request.known_tokens - done, self.budget)
        if not tokens:
            self.queue.passed_over = True
            return False
        if (
            memory.missing(request, step.with_lookahead(request.computed_tokens + tokens))
            > memory.free_blocks
        ):
            return self._wait()
        step.admit_loaded(request)
        self._run(request, tokens, NO_START)
        return True

    def _wait(self) -> bool:
        """Ends the pass: the first request holds blocks and finds too few more. It is asked in every step."""
        self.step.failed_allocations += 1
        self.queue.passed_over = True
        return False

    def _run(self, request: Request, tokens: int, start: HeadStart) -> None:
        self.budget -= tokens + self.step.slots
        self.step.run(request)
        for gate in self._gates:
            gate.enter(request)
        self.step.compute(request, tokens, start)
