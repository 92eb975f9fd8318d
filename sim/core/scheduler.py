"""Scheduler: who computes what in the next step, and where its KV goes.

    plan = scheduler.plan(now)                # decide one step
    outcome = backend.execute(plan)           # simulate it, or run it on a GPU
    scheduler.commit(plan, outcome, now)      # note tokens, finish requests

Blocks are allocated by `plan`, and under most rules published by it too.

A simulation skips over steps in which nothing is decided, as far as it knows that nobody interferes:

    steps = scheduler.stride.quiet()          # 0: call `decide`
    plan = scheduler.stride.plan(steps)       # one plan for all of them
    plan = scheduler.cut(plan, begun)         # only where somebody interferes after all

This is the facade over the parts that a profile makes (`engines/`). What can happen to a request is in
`lifecycle.py`; in which order it happens within a step is the profile's rule; the blocks are
behind `memory/memory.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagecast.sim.core.drafter import Drafter
from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.events import Event, EventLog
from pagecast.sim.core.kv_events import KvEventStream
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import DONE, Outcome, StepPlan
from pagecast.sim.core.request import Request


class Scheduler:
    """One replica's decisions. Requests are submitted at any time; plans are made and committed in order.

    `log`: keep events in `events` (whoever reads them empties the list). `kv_events`: who is told, in vLLM's
    vocabulary, which contents can be found. `drafter`: the requests speculate. Not `numbered`: nobody will
    ask `memory` for the numbers of blocks, which saves time in models with several kinds of layers.
    `stride` plans many decode steps as one; `cut` such a stretch before anything else is done within it.
    `memory` may be read at any time, and is changed by the scheduler alone.
    """

    def __init__(
        self,
        limits: Limits,
        profile: Profile = VLLM,
        *,
        log: bool = False,
        drafter: Drafter | None = None,
        kv_events: KvEventStream | None = None,
        numbered: bool = True,
    ) -> None:
        parts = profile.parts(limits, EventLog(enabled=log, kv=kv_events), drafter, numbered=numbered)
        lifecycle = parts.lifecycle
        self.limits = limits
        self.profile = profile
        self.log = lifecycle.log
        self.running = lifecycle.running
        self.memory = lifecycle.memory
        self.queue = lifecycle.queue
        self.offloading = lifecycle.offloading
        self.lifecycle = lifecycle
        self.requests = lifecycle.requests
        self.stride = parts.stride
        self.aborted = parts.step.aborted  # requests that planning ended, until the caller clears the list
        self._step = parts.step
        self._mix = parts.mix
        self._in_flight = lifecycle.running.in_flight
        self._expiry = lifecycle.memory.expiry
        # Blocks that the host tier keeps for plans in flight.
        self._deferred = None if lifecycle.offloading is None else lifecycle.offloading.deferred_frees

    # ---- requests come and go

    def submit(self, request: Request) -> bool:
        """Queues a request. False: it was rejected, and `request.reason` says why.
        Errors: ValueError where a live request has the same id, or a length is below 1."""
        if self.stride.open is not None:
            self.stride.settle()
        return self.lifecycle.submit(request)

    def cancel(self, id: str, now: int) -> bool:
        """Ends a request in any state and gives its blocks back. False: no such live request."""
        self.stride.settle()
        if self._expiry is not None:
            self._expiry.now = now
        return self.lifecycle.cancel(id, now)

    def preempt(self, request: Request) -> None:
        """Takes a running request's blocks away and queues it again, between steps."""
        self.stride.settle()
        self.lifecycle.preempt(request)

    def evict(self, blocks: int) -> int:
        """Forgets the content of up to `blocks` free blocks, the next to be evicted; returns how many.

        SGLang's radix tree forgets whole leaves, so that it may be more, and does not count them as
        evictions.
        """
        self.stride.settle()
        self.queue.blocked = False
        return self.memory.evict(blocks)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content. False, and nothing is done, while a request holds blocks (as vLLM)."""
        self.stride.settle()
        if self.memory.used_blocks:
            return False
        kv, self.log.kv = self.log.kv, None
        self.evict(self.limits.num_blocks)
        self.log.kv = kv
        if kv is not None:
            kv.cleared()
        return True

    # ---- planning

    def plan(self, now: int, *, once: bool = False) -> StepPlan | None:
        """Decides the next step. None: nothing can be computed before a commit or an arrival.

        `once`: do not decide again where all that could run was preempted, as an engine that plans in a loop.
        """
        if self._expiry is not None:
            self.refresh(now)
        if self.stride.quiet():
            return self.stride.plan(1)
        return self.decide(now, once=once)

    def refresh(self, now: int) -> None:
        """Ends retention that is over by `now`, where `memory.expiry` is set. `plan` calls it.

        A caller of `stride.plan` calls it first, and plans no step of a stretch at or after the time
        `memory.expiry.due_ns`.
        """
        expiry = self._expiry
        assert expiry is not None
        if now >= expiry.due_ns:
            self.stride.settle()
            self.queue.blocked = False
            expiry.end_retention(now, self.log)
        expiry.now = now

    def decide(self, now: int, *, once: bool = False) -> StepPlan | None:
        """Decides the next step by the profile's full rule, which `plan` skips in a quiet stretch."""
        if self.stride.open is not None:
            self.stride.settle()
        step = self._step
        while True:
            aborted = len(self.aborted)
            step.begin(now)
            self._mix.fill(step, self.memory, self.queue)
            plan = step.seal()
            if plan is not None or self.running.in_flight or once:
                return plan
            if not step.preempted and len(self.aborted) == aborted:
                return None
            # All that could run was preempted or aborted and its blocks are free now, so somebody can run.

    def cut(self, plan: StepPlan, steps: int) -> StepPlan:
        """Shortens a stretch in flight to its first `steps` steps, those that have begun by now.
        Returns the plan to be committed in its place. From then on no more steps were ever planned."""
        return self.stride.cut(plan, steps)

    # ---- committing

    def commit(self, plan: StepPlan, outcome: Outcome = DONE, now: int = 0) -> list[Request]:
        """Takes note that a plan was executed. Returns the requests that ended with it, in order.
        Plans are committed in the order they were made. Errors: ValueError for any other order."""
        in_flight = self._in_flight
        if not in_flight or in_flight[0] is not plan:
            raise ValueError(f"step {plan.step} is not the oldest plan in flight")
        # The newest plan may be an open stretch. It is settled where it is the plan committed here, or where
        # the outcome may change something. Otherwise it stays open: `Stride.quiet` made sure that this
        # commit changes nothing it could see.
        if self.stride.open is plan:
            self.stride.settle()
        if outcome is not DONE:
            return self._commit_outcome(plan, outcome, now)
        in_flight.popleft()
        if self._expiry is not None:
            self._expiry.now = now
        if self._deferred:
            self.lifecycle.give_back_deferred(plan)
        if not plan.chunks and plan.step + plan.steps - 1 not in self.running.draining:
            return []
        return self.lifecycle.commit(plan, outcome, now)

    def _commit_outcome(self, plan: StepPlan, outcome: Outcome, now: int) -> list[Request]:
        """Commits a plan with results that could not be known when it was made."""
        if outcome.stopped or outcome.failed or outcome.accepted:
            self.stride.settle()
        if self._expiry is not None:
            self._expiry.now = now
        failed = self.lifecycle.fail(outcome, now) if outcome.failed else []
        self._in_flight.popleft()
        if self._deferred:
            self.lifecycle.give_back_deferred(plan)
        endings = self.lifecycle.commit(plan, outcome, now)
        if outcome.transferred:
            endings = [*endings, *self.transferred(outcome.transferred, outcome.lost, now)]
        return failed + endings if failed else endings

    def transferred(self, jobs: Sequence[int], lost: Sequence[int] = (), now: int = 0) -> list[Request]:
        """Takes note, between commits, that transfers to or from the host tier have ended, in this order.
        `lost`: those of them that failed. Returns the requests that end because their load failed."""
        assert self.offloading is not None
        failed: list[Request] = []
        if lost:
            failed = self.offloading.fail_loads(lost)
            for request in failed:
                self.cancel(request.id, now)
        self.offloading.transferred(jobs, lost)
        return failed

    # ---- figures

    @property
    def events(self) -> list[Event] | None:
        """The log so far; None where none is kept."""
        return self.log.events

    @property
    def preemptions(self) -> int:
        """How often a request lost its blocks so far."""
        return self.lifecycle.preemptions

    @property
    def failed_allocations(self) -> int:
        """How often blocks were asked for in vain so far."""
        return self._step.failed_allocations
