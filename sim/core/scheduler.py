"""The scheduler: who computes what in the next step, and where its KV goes.

    plan = scheduler.plan(now)                # decide
    outcome = backend.execute(plan)           # simulate it, or run it on a GPU
    scheduler.commit(plan, outcome, now)      # publish, finish

This file keeps the state and what can happen to a request (admit, preempt, finish, cancel). In which
order these happen within a step is the profile's rule: `mixed.py` (vLLM) and `phased.py` (nano-vLLM).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pagecast.sim.core import mixed, phased
from pagecast.sim.core.cache import Hit, KVCacheManager
from pagecast.sim.core.decoders import Decoders
from pagecast.sim.core.events import Event, EventKind
from pagecast.sim.core.forks import Forks
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import DONE, Chunk, Outcome, StepPlan
from pagecast.sim.core.profile import VLLM, Profile
from pagecast.sim.core.request import NEVER, Request, State
from pagecast.sim.core.serving import serve_ticks
from pagecast.sim.core.waiting import ByPriority, FirstComeFirstServed, WaitingQueue


class Scheduler:
    """One replica's decisions. Requests are submitted at any time; plans are made and committed in order.

    `log`: keep events in `events` (whoever reads them empties the list). `shortcuts=False` makes every
    step by the general rule, as a reference for tests.
    """

    def __init__(
        self, limits: Limits, profile: Profile = VLLM, *, log: bool = False, shortcuts: bool = True
    ) -> None:
        limits.check()
        self.limits = limits
        self.profile = profile
        self.cache = KVCacheManager(
            limits.num_blocks,
            limits.block_size,
            caching=limits.caching,
            unfindable_first=profile.unfindable_first,
        )
        self.cache.settle = self._settle
        self.pool = self.cache.pool
        self.events: list[Event] | None = [] if log else None
        self.pool.events = self.events
        self.waiting: WaitingQueue = ByPriority() if limits.policy == "priority" else FirstComeFirstServed()
        self.running: dict[Request, None] = {}  # admission order; admitted and not ended
        self.decoders = Decoders(limits.block_size)
        self.prefilling: dict[Request, None] = {}  # running, chunks still to come
        self.joining: dict[Request, None] = {}  # running, prompt completed by the plan being made
        self.parked: dict[Request, None] = {}  # running, beyond the batch size (phased profiles)
        self.draining: dict[int, list[Request]] = {}  # by step: requests that end with its commit
        self.forks = Forks()
        self.requests: dict[str, Request] = {}
        self.in_flight: deque[StepPlan] = deque()
        self.step = 0  # number of the next plan
        self.tick = 0  # number of the next decode step (see `Decoders`)
        self.blocked = False  # the head of the queue can't be admitted until something ends
        self.preemptions = 0
        self.failed_allocations = 0
        self._admissions = 0
        self._shortcuts = shortcuts
        # `delay`: generated blocks become findable with the plan that fills them, or one step later where
        # that plan could not know their content (pipelining) or nothing is published before its commit.
        self.delay = 0 if profile.publish_at_schedule and limits.pipeline_depth == 0 else 1

    # ---- requests come and go

    def submit(self, request: Request) -> bool:
        """Queues a request. False: it was rejected, and `request.reason` says why.

        Errors: ValueError where a live request has the same id, or a length is below 1.
        """
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(f"request {request.id}: prompt and output must have at least one token")
        if request.id in self.requests:
            raise ValueError(f"request {request.id} is live already; ids may repeat only after the end")
        reason = self.limits.refusal(request.prompt_tokens, request.output_tokens)
        if reason:
            request.state = State.REJECTED
            request.reason = reason
            self._event(EventKind.REJECTED, request, detail=reason)
            return False
        request.state = State.WAITING
        request.queue_depth = self.waiting.size
        self.requests[request.id] = request
        if self.forks.hold(request):
            return True
        if not self.waiting.size or self.limits.policy == "priority":
            self.blocked = False
        self.waiting.add(request)
        return True

    def cancel(self, id: str, now: int) -> bool:
        """Ends a request in any state and gives its blocks back. False: no such live request."""
        request = self.requests.get(id)
        if request is None:
            return False
        if request.table:
            committed = self._committed(request)
            self.cache.publish(request, min(committed, self._publishable(request)))
            self.cache.withdraw(request, committed)
        request.output_tokens = max(self._emitted(request), 0)
        self._leave(request)
        self._end(request, State.CANCELLED, EventKind.CANCELLED, now)
        return True

    def _committed(self, request: Request) -> int:
        """Tokens whose KV is certainly there: what no plan in flight still computes."""
        flying = 0
        for plan in self.in_flight:
            for chunk in plan.chunks:
                if chunk.request is request:
                    return chunk.start
            flying += request in plan.decodes
        return self._computed(request) - flying

    def _computed(self, request: Request) -> int:
        """Tokens planned so far."""
        if request.state is State.DECODE and request not in self.parked:
            return self.tick - request.lag
        return request.computed

    def _publishable(self, request: Request) -> int:
        """Tokens whose blocks may be found as of the last plan."""
        delay = self.delay if request.state is State.DECODE else 0
        return self._computed(request) - delay

    def _leave(self, request: Request) -> None:
        """Takes a request out of whatever it is in; its blocks are not touched."""
        state = request.state
        if state is State.DECODE:
            self._stop_decoding(request)
        if request in self.running:
            del self.running[request]
        elif not self.forks.drop(request):
            self.waiting.remove(request)
        self.prefilling.pop(request, None)
        if self.draining:
            for ending in self.draining.values():
                if request in ending:
                    ending.remove(request)

    def _stop_decoding(self, request: Request) -> None:
        request.computed = self._computed(request)
        request.known = request.computed + 1
        if request in self.parked:
            del self.parked[request]
        else:
            self.decoders.remove(request)

    def _end(self, request: Request, state: State, kind: EventKind, now: int) -> None:
        request.finished_ns = now
        self.cache.release(request)
        request.state = state
        request.parent = None
        del self.requests[request.id]
        self.blocked = False
        self._event(kind, request, detail=request.reason)
        self._let_in_forks(request)

    def _let_in_forks(self, parent: Request) -> None:
        """Queues what waited for a request's prompt, ahead of all that came later."""
        forks = self.forks.release(parent)
        if forks:
            self.blocked = False
        for fork in forks if self.limits.policy == "priority" else reversed(forks):
            self.waiting.put_back(fork)

    def evict(self, blocks: int) -> int:
        """Forgets the cached content of up to `blocks` free blocks, the next in eviction order.

        Returns how many blocks that were; they stay free.
        """
        self.blocked = False
        return self.cache.evict(blocks)

    # ---- planning

    def free_steps(self) -> int:
        """How many steps from now on are pure decode steps in which nothing has to be decided.

        No arrival, cancellation or early stop may come in between; that is for the caller to know. The
        last of them may be one with which requests end. 0: the next plan is not of this kind.
        """
        decoders = self.decoders
        n = decoders.count
        if not n or self.prefilling or not (self.blocked or not self.waiting.size):
            return 0
        if self.parked and n < self.limits.max_num_seqs:
            return 0
        tick = self.tick
        steps = decoders.next_end() - tick + 1
        free = self.pool.queue.count
        if (steps // self.limits.block_size + 1) * n > free:
            steps = min(steps, decoders.ticks_within(tick, free))
        if steps > 1 and self.in_flight and not self._silent(self.in_flight[-1]):
            return 1
        return steps

    def _silent(self, plan: StepPlan) -> bool:
        # Nothing happens at its commit that a later plan could see.
        return plan.last not in self.draining and (self.profile.publish_at_schedule or not plan.chunks)

    def plan(self, now: int) -> StepPlan | None:
        """Decides the next step. None: nothing can be computed before a commit or an arrival."""
        if self._shortcuts and self.free_steps():
            return self.decode(1)
        return self.decide(now)

    def decide(self, now: int) -> StepPlan | None:
        """The same by the profile's full rule, for when `free_steps` is 0."""
        self.pool.step = self.step
        if self.profile.mixed:
            return mixed.plan(self, now)
        return phased.plan(self, now)

    def decode(self, steps: int) -> StepPlan:
        """Plans `steps` decode steps at once, of those that `free_steps` counted.

        All but the last are committed as well: there is nothing to be seen in between.
        """
        decoders, tick, step = self.decoders, self.tick, self.step
        if decoders.explicit or self.events is not None:
            serve_ticks(self, steps)
        else:
            decoders.grow(tick, steps, self.pool.take)
            self.step = step + steps
            self.tick = tick + steps
        plan = StepPlan(
            step,
            steps,
            tick,
            decoders.count,
            decoders.context(tick),
            decoders.longest(tick),
            (),
            len(self.running),
            self.waiting.size,
            self.cache.used_blocks,
            (),
            decoders.snapshot(),
        )
        self.finish_planning(plan)
        return plan

    def admit(self, request: Request, hit: Hit, now: int, shared: int = 0) -> None:
        """Moves the first waiting request into the running ones, with the prefix that was found for it.

        `shared` tokens more it will have by a copy (see `compute`).
        """
        request.state = State.PREFILL
        self._admissions += 1
        request.order = self._admissions
        request.computed = tokens = hit.blocks * self.limits.block_size + shared
        request.reused_tokens += tokens
        if request.cached_tokens == NEVER:
            request.cached_tokens = tokens
            request.admitted_ns = now
        elif tokens < request.lost_tokens:
            request.recomputed_tokens += request.lost_tokens - tokens
        self._event(EventKind.ADMITTED, request, detail=f"cached={tokens}")
        if hit.blocks:
            self.cache.reuse(request, hit)

    def compute(self, request: Request, tokens: int, shared: int = 0) -> Chunk:
        """Plans a chunk of a request's known tokens; its blocks are allocated already.

        `shared`: it begins that far into a block which is to be copied from the request's parent.
        """
        start = request.computed
        copied = -1
        if shared and request.parent is not None:
            number = start // self.limits.block_size
            copied = request.parent.blocks()[number]
            self._event(EventKind.COPIED, request, (copied, request.blocks()[number]))
        request.computed = reached = start + tokens
        if self.profile.publish_at_schedule:
            self.cache.publish(request, reached)
        last = reached == request.known
        if last:
            self.prefilling.pop(request, None)
            self.joining[request] = None
        else:
            self.prefilling[request] = None
        return Chunk(request, start, tokens, last, copied)

    def _begin_decode(self, request: Request, next_tick: int) -> None:
        self._let_in_forks(request)
        known = request.known
        request.lag = next_tick - known
        ticks = request.prompt_tokens + request.output_tokens - known - 1
        request.last_step = next_tick + ticks - 1
        if not ticks:
            request.state = State.DRAINING
            self.draining.setdefault(self.step - 1, []).append(request)
            return
        request.state = State.DECODE
        self.cache.open_tail(request)
        if self.decoders.count < self.limits.max_num_seqs:
            self.decoders.add(request)
        else:
            self.parked[request] = None

    def unpark(self) -> None:
        """Lets parked requests decode where the batch has room again."""
        while self.parked and self.decoders.count < self.limits.max_num_seqs:
            request = next(iter(self.parked))
            del self.parked[request]
            delay = self.tick - request.lag - request.known
            request.lag += delay
            request.last_step += delay
            self.decoders.add(request)

    def preempt(self, request: Request, *, served: bool) -> None:
        """Takes a running request's blocks away and puts it back in the queue, to be computed again.

        `served`: this step had given it its token already, which it gives back.
        """
        self.preemptions += 1
        request.preemptions += 1
        computed = self._computed(request)
        if request.state is not State.PREFILL:
            # Of its output, whatever a plan before this one has computed may still be found.
            late = self.limits.pipeline_depth and not served
            self.cache.publish(request, computed - 1 if late else computed)
            self.cache.withdraw(request, computed)
        if request.state is State.DECODE:
            self._stop_decoding(request)
        elif request.state is State.DRAINING:
            # Its last token is in flight; the commit will find it waiting and end it.
            request.known = request.prompt_tokens + request.output_tokens
        else:
            self.prefilling.pop(request, None)
            self.joining.pop(request, None)
        request.lost_tokens = computed
        request.computed = 0
        del self.running[request]
        self._event(EventKind.PREEMPTED, request)
        self.cache.release(request)
        request.state = State.WAITING
        self.waiting.put_back(request)
        self.blocked = False

    def finish_planning(self, plan: StepPlan) -> None:
        """Closes a plan: who completed its prompt decodes next; who computed its last token only waits."""
        ended = self.decoders.pop_ended(self.tick - 1)
        if ended:
            for request in ended:
                request.state = State.DRAINING
                request.computed = request.prompt_tokens + request.output_tokens - 1
            self.draining[plan.last] = ended
        if self.joining:
            for request in self.joining:
                self._begin_decode(request, self.tick)
            self.joining.clear()
        self.in_flight.append(plan)

    # ---- committing

    def commit(self, plan: StepPlan, outcome: Outcome = DONE, now: int = 0) -> list[Request]:
        """Takes note that a plan was executed. Returns the requests that ended with it, in order.

        Plans are committed in the order they were made. Errors: ValueError for any other order.
        """
        if not self.in_flight or self.in_flight[0] is not plan:
            raise ValueError(f"step {plan.step} is not the oldest plan in flight")
        self.pool.step = self.step
        ended = self._fail(outcome, now) if outcome.failed else []
        self.in_flight.popleft()
        for chunk in plan.chunks:
            request = chunk.request
            if not self.profile.publish_at_schedule and request.table and request.alive:
                self.cache.publish(request, chunk.start + chunk.tokens)
            if chunk.last and request.first_token_ns == NEVER:
                request.first_token_ns = now
        for request in self.draining.pop(plan.step + plan.steps - 1, ()):
            self._finish(request, now)
            ended.append(request)
        if outcome.stopped:
            for early in self._live(outcome.stopped):
                early.output_tokens = self._emitted(early)
                self._finish(early, now)
                ended.append(early)
        return ended

    def _fail(self, outcome: Outcome, now: int) -> list[Request]:
        """Ends what failed in the plan that is about to be committed, whose blocks count as not computed.

        The newest goes first: it may hold blocks that an older one was to fill.
        """
        reasons = dict(outcome.failed)
        failed = self._live(reasons)[::-1]
        for request in failed:
            request.reason = reasons[request.id]
            self.cancel(request.id, now)
        return failed

    def _live(self, ids: Iterable[str]) -> list[Request]:
        """The live ones of these requests, in admission order."""
        live = dict.fromkeys(self.requests[id] for id in ids if id in self.requests)
        return sorted(live, key=lambda request: request.order)

    def _emitted(self, request: Request) -> int:
        """Output tokens a request has been given by the plans committed so far."""
        if request.state in (State.DECODE, State.DRAINING):
            return self._committed(request) + 1 - request.prompt_tokens
        return request.known - request.prompt_tokens

    def _finish(self, request: Request, now: int) -> None:
        if request.table:
            self.cache.publish(request, request.prompt_tokens + request.output_tokens - 1)
        self._leave(request)
        request.known = request.prompt_tokens + request.output_tokens
        self._end(request, State.FINISHED, EventKind.FINISHED, now)

    # ---- small things

    def _settle(self, request: Request) -> None:
        # Called in the waiting loop, when this tick's tokens are given out: they count.
        done = request.computed if request in self.parked else self.tick + 1 - request.lag
        if request.state is State.DRAINING:
            done = request.computed
        self.cache.publish(request, done - self.delay)

    def may_find_more(self, request: Request, hit: Hit) -> bool:
        """Whether a waiting request's hit may grow while others just decode: they are writing its prefix."""
        keys = request.keys
        if hit.blocks >= (request.known - 1) // self.limits.block_size:
            return False
        if self.joining:
            return True  # their runs are not in the index yet
        if keys.explicit:
            return self.decoders.explicit > 0
        segment = next(i for i, end in enumerate(keys.ends) if hit.blocks < end)
        run = self.pool.index.get(keys.digests[segment])
        while run is not None:
            if run.writer is not None:
                return True
            run = run.next
        return False

    def _event(
        self, kind: EventKind, request: Request, blocks: tuple[int, ...] = (), detail: str = ""
    ) -> None:
        if self.events is not None:
            self.events.append(Event(self.step, kind, request.id, blocks, detail))
