"""Admission of waiting requests in a step of vLLM v1, with a host tier or without.

In order, each is admitted, passed over, or ends the way: it can't be admitted now, nor can those behind it.
Admission looks at the whole known sequence; only the first chunk's blocks are taken. Where layers keep
different tokens, or requests speculate, these may not be free though the sequence is admitted.

With a host tier (OffloadingConnector) a request asks it for what follows its prefix hit. It may be passed
over, to ask again in the next step; or it is given blocks and stays in the queue, passed over, until its load
has ended. A load is begun only if it leaves free what others still need.

Source: vllm/v1/core/sched/scheduler.py, `Scheduler.schedule` (0.24 to 0.33).
"""

from __future__ import annotations

from pagecast.sim.core.engines.vllm.versions import VllmRules
from pagecast.sim.core.group_spec import aligned_tokens
from pagecast.sim.core.memory.head_start import NO_START, HeadStart
from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.rules.adapters import AdapterSlots
from pagecast.sim.core.rules.candidates import Gate, TenantCeilings
from pagecast.sim.core.rules.rules import Admission
from pagecast.sim.core.step import Step
from pagecast.sim.core.tiers.offloading import Offloading


class WaitingPass:
    """The way through the queue, until the batch, the budget or the blocks are used up.

    One object serves all steps: `run` clears it. `whole`: an admission needs room for the whole known
    sequence.
    """

    def __init__(
        self, step: Step, memory: Memory, queue: Queue, admission: Admission, rules: VllmRules
    ) -> None:
        self.step = step
        self.memory = memory
        self.queue = queue
        self.admission = admission
        self.rules = rules
        self.whole = True
        self.offloading = step.offloading
        self.budget = 0
        self.aside: list[Request] = []
        # Whether an admission that the rule allows may still lack room now.
        self._checks_room = step.drafting or bool(step.limits.groups)
        self._gates: list[Gate] = []
        # Requests whose prompts this plan completes: they count as prefills until the plan is made.
        self._completed: dict[Request, None] = {}
        self._lasting = True  # whoever was passed over is, until a request comes or goes

    def run(self) -> None:
        """Goes through the queue."""
        queue = self.queue
        queue.blocked = queue.asks_again = queue.gated = False
        if not queue.size:
            return
        step = self.step
        self.budget = step.budget()
        self._lasting = True
        if self.aside:
            self.aside = []
        if self.offloading is not None:
            self._completed = dict(step.running.joining)
        if step.gated:
            self._gates = gates_of(step, self.rules)
        running = step.running.requests
        most = step.limits.max_num_seqs
        while self.budget > 0:
            request = queue.first()
            if request is None:
                queue.blocked = bool(self.aside) and self._lasting
                break
            if len(running) >= most:
                queue.blocked = True
                break
            if not self._takes(request):
                break
        if self.aside:
            queue.bring_back(self.aside)
            queue.gated = self._lasting
            if not self._lasting:
                queue.asks_again = len(running) < most

    def margin(self) -> int:
        """Free blocks that an admission leaves over: none without the setting `watermark` (`TunedPass`)."""
        return 0

    def _takes(self, request: Request) -> bool:
        """Admits a request or passes it over. False: it can't be admitted now, nor can those behind it."""
        offloading = self.offloading
        if request.state is State.LOADING:
            assert offloading is not None
            if request in offloading.loading:
                return self._pass_over(request)
            self.step.lifecycle.receive(request)
        if request.in_flight_tokens:
            # Preempted between steps: what its last step yields comes first.
            return self.rules.passes_over_stale and self._pass_over(request)
        for gate in self._gates:
            if not gate.opens(request):
                return self._pass_over(request, lasting=gate.lasting)
        if offloading is None:
            return self._admit(request, self.memory.find(request))
        if request.state is State.LOADING:
            return self._go_on(offloading, request)
        hit = self.memory.find(request)
        external = offloading.ask(request, hit.tokens)
        if external is None:
            return self._pass_over(request)
        return self._load(offloading, request, hit, external) if external else self._admit(request, hit)

    def _pass_over(self, request: Request, *, lasting: bool = False) -> bool:
        self._lasting &= lasting
        self.queue.set_aside(request)
        self.aside.append(request)
        return True

    def _refuse(self, request: Request, hit: Hit) -> bool:
        self.step.refuse(request, hit)
        if self.offloading is not None and not self.offloading.settled:
            self.queue.blocked = False
        return False

    def _load(self, offloading: Offloading, request: Request, hit: Hit, external: int) -> bool:
        step = self.step
        whole = hit._replace(tokens=hit.tokens + external)
        alone = self.rules.offload.loads_without_lookahead or self.memory.recomputes_block
        room_tokens = whole.tokens if alone else step.with_lookahead(whole.tokens)
        # What a windowed group needs depends on where the load ends.
        refused = whole if step.limits.groups else hit
        if not self.admission.admits(step, self.memory, self.queue, request, whole):
            return self._refuse(request, refused)
        reserved = self._reserved_blocks(offloading) + self.margin()
        if not self.memory.fits_now(request, whole, room_tokens, reserved):
            return self._refuse(request, refused)
        step.load(request, hit, external, room_tokens)
        for gate in self._gates:
            gate.hold(request)
        return self._pass_over(request)

    def _reserved_blocks(self, offloading: Offloading) -> int:
        """Blocks that a load leaves to others, and to its own drafts."""
        limits, completed = self.step.limits, self._completed
        starts = {chunk.request: chunk.start for chunk in self.step.chunks}
        drafts = self.step.draft_step if self.rules.offload.reserves_drafts else 0
        if not drafts:
            return offloading.reserved_blocks(limits.max_model_len, completed, starts)
        if self.rules.offload.reserves_drafts == 1:
            own = -(-drafts // (aligned_tokens(limits.groups) if limits.groups else limits.block_size))
            return offloading.reserved_blocks(limits.max_model_len, completed, starts, beside=own) + own
        # States have blocks for drafts by themselves.
        sizes = [group.block_size for group in limits.groups if not group.rules.scattered]
        sizes = sizes or [limits.block_size]
        own = sum(-(-drafts // size) for size in sizes)
        return offloading.reserved_blocks(limits.max_model_len, completed, starts, drafts=drafts) + own

    def _admit(self, request: Request, hit: Hit) -> bool:
        step = self.step
        if not self.admission.admits(step, self.memory, self.queue, request, hit):
            return self._refuse(request, hit)
        start = step.head_start(request, hit)
        done = hit.tokens + start.tokens
        tokens = self._first_tokens(request, done)
        if not tokens:
            return False
        room_tokens = step.with_lookahead(done + tokens)
        if self._checks_room and not self.memory.fits_now(request, hit, room_tokens, self.margin()):
            return self._refuse(request, hit)
        step.admit(request, hit, start)
        self._run(request, tokens, start)
        return True

    def _first_tokens(self, request: Request, done: int) -> int:
        """Tokens that a request joins with, `done` of its tokens being there; 0: not in this step."""
        return self.step.joining_tokens(done, request.known_tokens - done, self.budget)

    def _go_on(self, offloading: Offloading, request: Request) -> bool:
        """Admits a request that a load has brought tokens to; it holds their blocks."""
        step, memory = self.step, offloading.memory
        limit = step.limits.max_model_len
        known_tokens = request.known_tokens if limit is None else min(request.known_tokens, limit)
        free_blocks = memory.free_blocks - self.margin()
        if self.whole and memory.still_needed(request, request.computed_tokens, known_tokens) > free_blocks:
            return self._wait()
        memory.leave(request, request.computed_tokens)
        done = request.computed_tokens
        tokens = self._first_tokens(request, done)
        if not tokens:
            self.queue.asks_again = True
            return False
        if memory.missing(request, step.with_lookahead(done + tokens)) > memory.free_blocks - self.margin():
            return self._wait()
        step.admit_loaded(request)
        self._completed[request] = None
        self._run(request, tokens, NO_START)
        return True

    def _wait(self) -> bool:
        """Ends the pass: the first request holds blocks and finds too few more. It is asked in every step."""
        self.step.failed_allocations += 1
        self.queue.asks_again = True
        return False

    def _run(self, request: Request, tokens: int, start: HeadStart) -> None:
        self.budget -= tokens + self.step.slots
        self.step.run(request)
        for gate in self._gates:
            gate.enter(request)
        self.step.compute(request, tokens, start)


def gates_of(step: Step, rules: VllmRules) -> list[Gate]:
    """The adapters and the ceilings of tenants, where there are any."""
    gates: list[Gate] = []
    if step.limits.max_loras is not None:
        computing = step.running.requests if rules.counts_running_adapters else step.computing()
        gates.append(AdapterSlots(computing, step.limits.max_loras))
    if step.limits.tenants is not None and step.limits.tenants.limited:
        gates.append(TenantCeilings(step))
    return gates
