"""Life cycle under SGLang's rules: when content gets into the radix tree, and what a retraction loses.

A prompt is inserted when its batch is committed, a part of it before the next batch is made (`SglangMix`),
and everything when the request ends. A retracted request loses all, the token in flight as well.

Source: SGLang 0.5.23, srt/managers/scheduler_components/batch_result_processor.py and schedule_batch.py.
"""

from __future__ import annotations

from pagecast.sim.core.decoders import admission_order
from pagecast.sim.core.engines.sglang.inbox import Inbox
from pagecast.sim.core.engines.sglang.memory import RadixMemory
from pagecast.sim.core.events import EventKind, EventLog
from pagecast.sim.core.lifecycle import Lifecycle
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import NEVER, Request, State
from pagecast.sim.core.running import Running


class RadixLifecycle(Lifecycle):
    """Moves requests from state to state over a `RadixMemory`.

    Requests that end with one step end in the order of their batch (`Request.order`). With an `inbox`
    requests wait there until the scheduler receives them.
    """

    def __init__(
        self,
        limits: Limits,
        memory: RadixMemory,
        queue: Queue,
        running: Running,
        log: EventLog,
        inbox: Inbox | None = None,
    ) -> None:
        super().__init__(limits, memory, queue, running, log)
        self.inbox = inbox
        self._radix = memory

    # ---- coming

    def _enqueue(self, request: Request) -> None:
        if self.inbox is None:
            super()._enqueue(request)
        else:
            self.inbox.requests[request] = None

    @property
    def coming(self) -> int:
        """Requests in the inbox."""
        return 0 if self.inbox is None else len(self.inbox.requests)

    def _take_out(self, request: Request) -> None:
        """Takes a request out of running set, queue or inbox; its pages are not touched."""
        if self.inbox is not None and request in self.inbox.requests:
            del self.inbox.requests[request]
        else:
            super()._take_out(request)

    def _never_refused(self) -> int:
        """0 tokens: `_never_fits` is asked of every request."""
        return 0

    def _never_fits(self, request: Request) -> str:
        """Why a request can never be served; SGLang admits none that leaves no token of the pool."""
        longest = self.limits.max_model_len
        if longest is not None and request.total_tokens > longest:
            return self.limits.refusal(request.prompt_tokens, request.output_tokens)
        size = self.limits.block_size
        pool = self.limits.num_blocks * size
        tokens_needed = -(-request.prompt_tokens // size) * size + request.output_tokens + size + 1
        if tokens_needed > pool:
            blocks = -(-tokens_needed // size)
            return f"needs {blocks} blocks of {size} tokens; the pool has {self.limits.num_blocks}"
        return self.limits.above_ceiling(request.total_tokens, request.tenant)

    def _most_output(self, request: Request) -> int:
        """The longest output that SGLang keeps of what a client asks for (`init_req_max_new_tokens`)."""
        limits = self.limits
        size, prompt = limits.block_size, request.prompt_tokens
        pool = limits.num_blocks * size
        longest = pool if limits.max_model_len is None else min(pool, limits.max_model_len)
        return min(longest - 2 - prompt, pool - -(-prompt // size) * size - size - 1)

    # ---- going back

    def preempt(self, request: Request, *, had_turn: bool = False) -> None:
        """Retracts a request: it loses its KV and the token in flight, and waits at the end of the queue."""
        self.preemptions += 1
        request.preemptions += 1
        running = self.running
        request.lost_tokens = running.planned(request)
        known_tokens = request.known_tokens if request.state is State.PREFILL else request.lost_tokens + 1
        if self._in_flight(request):
            known_tokens -= 1
        if request.state is State.DRAINING:
            running.forget_end(request)
        running.remove(request)
        request.computed_tokens = request.lost_tokens
        self._radix.release(request)
        request.computed_tokens = 0
        request.known_tokens = known_tokens
        self.log.add(EventKind.PREEMPTED, request.id)
        request.state = State.WAITING
        self.queue.put_back(request)

    def _in_flight(self, request: Request) -> bool:
        """Whether a plan in flight yields the request a token."""
        return any(plan.yields_token(request) for plan in self.running.in_flight)

    def _emitted(self, request: Request) -> int:
        """Output tokens that the plans committed so far have yielded. A retraction loses those in flight."""
        return self.running.emitted(request)

    # ---- ending

    def commit(self, plan: StepPlan, outcome: Outcome, now: int) -> list[Request]:
        """Applies the outcome of a plan that was executed. Returns the requests that ended, in order."""
        running = self.running
        ending = dict.fromkeys(running.draining.pop(plan.last, ()))
        for request in self._live(outcome.stopped):
            if request in running.requests and request not in ending:
                request.output_tokens = self._emitted(request)
                ending[request] = None
        endings = []
        for chunk in plan.chunks:
            request = chunk.request
            if not chunk.last or request not in running.requests:
                continue
            if request.first_token_ns == NEVER:
                request.first_token_ns = now
            if request in ending:
                endings.append(request)
                self.finish(request, now)
                del ending[request]
            else:
                self._radix.publish(request, chunk.start + chunk.tokens)
        for request in sorted(ending, key=admission_order) if len(ending) > 1 else list(ending):
            endings.append(request)
            self.finish(request, now)
        return endings

    def finish(self, request: Request, now: int) -> None:
        """Ends a request that has all its output; what was computed of it is inserted in the tree."""
        total = request.prompt_tokens + request.output_tokens
        computed = self.running.planned(request)
        self._radix.settle(request, computed)
        self._radix.publish(request, min(computed, total))
        self._take_out(request)
        request.known_tokens = total
        self._end(request, State.FINISHED, EventKind.FINISHED, now)
