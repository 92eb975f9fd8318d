"""Scheduler: who computes what in the next step, and where its KV goes.

    plan = scheduler.plan(now)                # decide one step
    outcome = backend.execute(plan)           # simulate it, or run it on a GPU
    scheduler.commit(plan, outcome, now)      # publish, finish

A simulation skips over steps in which nothing is decided, as far as it knows that nobody interferes:

    steps = scheduler.stride.quiet()          # 0: call `decide`
    plan = scheduler.stride.plan(steps)       # one plan for all of them
    plan = scheduler.cut(plan, begun)         # only where somebody interferes after all

This is the facade. What can happen to a request is in `lifecycle.py`; in which order it happens within a
step is the profile's rule (`rules/`); the blocks are behind `memory/kv_memory.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagecast.sim.core.drafter import Drafter
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import Event, EventLog
from pagecast.sim.core.group_spec import KvKind
from pagecast.sim.core.hybrid_stride import HybridStride
from pagecast.sim.core.kv_events import KvEventStream
from pagecast.sim.core.lifecycle import Lifecycle
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.fair_eviction import FairEviction
from pagecast.sim.core.memory.hybrid_memory import HybridMemory
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.memory.partial_reuse import PartialReuse
from pagecast.sim.core.memory.radix_memory import RadixMemory
from pagecast.sim.core.memory.tenant_ledger import TenantLedger
from pagecast.sim.core.plan import DONE, Outcome, StepPlan
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.radix_lifecycle import RadixLifecycle
from pagecast.sim.core.radix_stride import RadixStride
from pagecast.sim.core.request import Request
from pagecast.sim.core.rules.profiles import VLLM
from pagecast.sim.core.rules.rules import Profile
from pagecast.sim.core.rules.sglang import SglangMix
from pagecast.sim.core.running import Running
from pagecast.sim.core.step import Step
from pagecast.sim.core.stride import Stride
from pagecast.sim.core.tiers.offloading import Offloading
from pagecast.sim.core.tiers.tiered_offloading import TieredOffloading


class Scheduler:
    """One replica's decisions. Requests are submitted at any time; plans are made and committed in order.

    `log`: keep events in `events` (whoever reads them empties the list). `kv_events`: who is told, in vLLM's
    vocabulary, which contents can be found. `drafter`: the requests speculate.
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
    ) -> None:
        limits.check()
        if drafter is not None:
            _check_drafter(limits, profile, drafter)
        self.limits = limits
        self.profile = profile
        self.log = EventLog(enabled=log, kv=kv_events)
        self.running = Running(
            limits.block_size, pipeline_depth=limits.pipeline_depth, at_commit=profile.publish_at_commit
        )
        self.memory = self._make_memory(limits, profile)
        self.queue = Queue(profile.order(limits), self.memory)
        if drafter is not None and drafter.recomputes_block:
            self.memory.leave_out_last_blocks()
        self.offloading = self._make_offloading(limits, profile)
        life = RadixLifecycle if isinstance(self.memory, RadixMemory) else Lifecycle
        self.lifecycle = life(
            limits,
            self.memory,
            self.queue,
            self.running,
            self.log,
            drafter,
            self.offloading,
            None if profile.intake is None else profile.intake(limits),
        )
        self._step = Step(self.lifecycle, self.memory, drafter)
        self._mix = profile.mix(limits) if not limits.groups else profile.hybrid_mix(limits)
        self.stride = self._make_stride()

    def _make_stride(self) -> Stride:
        if isinstance(self._mix, SglangMix) and isinstance(self.memory, RadixMemory):
            return RadixStride(self.lifecycle, self.memory, self._step, self._mix)
        if isinstance(self.memory, HybridMemory):
            return HybridStride(self.lifecycle, self.memory, self._step)
        return Stride(self.lifecycle, self.memory, self._step)

    def _make_memory(self, limits: Limits, profile: Profile) -> KvMemory:
        if limits.groups:
            return HybridMemory(limits, self.log)
        if profile.memory is not None:
            return profile.memory(limits, self.log)
        eviction = profile.eviction(limits)
        ledger = None if limits.tenants is None else TenantLedger()
        if isinstance(eviction, FairEviction):
            ledger = eviction.ledger
        partial = None
        if limits.partial_reuse and limits.caching:
            partial = PartialReuse(limits.block_size, copies=limits.partial_reuse == "copy")
        return KvMemory(
            limits.num_blocks,
            limits.block_size,
            log=self.log,
            progress=self.running.findable,
            caching=limits.caching,
            eviction=eviction,
            ledger=ledger,
            partial_reuse=partial,
            groups=profile.groups,
        )

    def _make_offloading(self, limits: Limits, profile: Profile) -> Offloading | None:
        if limits.host is None:
            return None
        if not profile.offloads:
            raise BadInput(f"the profile {profile.name} has no KV offloading; choose vllm")
        drops_last = self.memory.recomputes_block
        kind = TieredOffloading if limits.host.disk else Offloading
        return kind(limits.host, limits, self.memory, self.running, self.log, drops_last=drops_last)

    # ---- requests come and go

    def submit(self, request: Request) -> bool:
        """Queues a request. False: it was rejected, and `request.reason` says why.

        Errors: ValueError where a live request has the same id, or a length is below 1.
        """
        if self.stride.open is not None:
            self.stride.settle()
        return self.lifecycle.submit(request)

    def cancel(self, id: str, now: int) -> bool:
        """Ends a request in any state and gives its blocks back. False: no such live request."""
        self.stride.settle()
        if self.memory.timed is not None:
            self.memory.at(now)
        return self.lifecycle.cancel(id, now)

    def preempt(self, request: Request) -> None:
        """Takes a running request's blocks away and queues it again, between steps."""
        self.stride.settle()
        self.lifecycle.preempt(request)

    def evict(self, blocks: int) -> int:
        """Forgets the cached content of up to `blocks` free blocks, the next in eviction order.

        Returns how many blocks that were; they stay free.
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

        `once`: do not decide again where all that could run was preempted. An engine plans in a loop, and
        what arrives in between has its place there.
        """
        if self.memory.timed is not None:
            self.refresh(now)
        if self.stride.quiet():
            return self.stride.plan(1)
        return self.decide(now, once=once)

    def refresh(self, now: int) -> None:
        """Lets time pass in the memory: retention that is over by `now` ends. `plan` calls it.

        Only where `memory.timed` is set. A caller of `stride.plan` calls it first, and plans no step of a
        stretch at or after `memory.due_ns`.
        """
        if now >= self.memory.due_ns:
            self.stride.settle()
            self.queue.blocked = False
            self.memory.revert(now)
        self.memory.at(now)

    def decide(self, now: int, *, once: bool = False) -> StepPlan | None:
        """Decides the next step by the profile's full rule, which `plan` skips in a quiet stretch."""
        if self.stride.open is not None:
            self.stride.settle()
        step = self._step
        while True:
            step.begin(now)
            self._mix.fill(step, self.memory, self.queue)
            plan = step.seal()
            if plan is not None or not step.preempted or self.running.in_flight or once:
                return plan
            # All that could run was preempted and its blocks are free now, so somebody can run.

    def cut(self, plan: StepPlan, steps: int) -> StepPlan:
        """Shortens a stretch in flight to its first `steps` steps, those that have begun by now.

        For whoever must decide or look before the stretch is over. Returns the plan to be committed in its
        place. From then on the scheduler is as if no more steps had ever been planned.
        """
        return self.stride.cut(plan, steps)

    # ---- committing

    def commit(self, plan: StepPlan, outcome: Outcome = DONE, now: int = 0) -> list[Request]:
        """Takes note that a plan was executed. Returns the requests that ended with it, in order.

        Plans are committed in the order they were made. Errors: ValueError for any other order.
        """
        in_flight = self.running.in_flight
        if not in_flight or in_flight[0] is not plan:
            raise ValueError(f"step {plan.step} is not the oldest plan in flight")
        # The newest plan may be an open stretch. It is settled where it is the plan committed here, or where
        # the outcome may change something. Otherwise it stays open: `Stride.quiet` made sure that this
        # commit changes nothing it could see.
        done = outcome is DONE
        changes = not done and bool(outcome.stopped or outcome.failed or outcome.accepted)
        if changes or self.stride.open is plan:
            self.stride.settle()
        failed = self.lifecycle.fail(outcome, now) if changes and outcome.failed else []
        in_flight.popleft()
        if self.memory.timed is not None:
            self.memory.at(now)
        if self.offloading is not None:
            self.lifecycle.give_back_deferred(plan)
        if done and not plan.chunks and plan.step + plan.steps - 1 not in self.running.draining:
            return []
        endings = self.lifecycle.commit(plan, outcome, now)
        if outcome.transferred:
            endings = [*endings, *self.transferred(outcome.transferred, outcome.lost, now)]
        return failed + endings if failed else endings

    def transferred(self, jobs: Sequence[int], lost: Sequence[int] = (), now: int = 0) -> list[Request]:
        """Takes note, between commits, that transfers to or from the host tier have ended, in this order.

        `lost`: those of them that failed. A store that failed is no store. The tokens of a load that failed
        are computed, or its request ends (`kv_load_failure_policy`): those that ended are returned.
        """
        offloading = self.offloading
        assert offloading is not None
        failed: list[Request] = []
        if lost and offloading.spec.kv_load_failure_policy == "fail":
            failed = [request for number in lost if (request := offloading.loader(number)) is not None]
        for request in failed:
            request.reason = "a load from host memory failed"
            self.cancel(request.id, now)
        offloading.transferred(jobs, lost)
        return failed

    # ---- figures

    @property
    def events(self) -> list[Event] | None:
        """The log so far; None where none is kept."""
        return self.log.events

    @property
    def requests(self) -> dict[str, Request]:
        """The live requests by id."""
        return self.lifecycle.requests

    @property
    def step(self) -> int:
        """The number of the next plan."""
        return self.log.step

    @property
    def preemptions(self) -> int:
        """How often a request lost its blocks so far."""
        return self.lifecycle.preemptions

    @property
    def failed_allocations(self) -> int:
        """How often blocks were asked for in vain so far."""
        return self._step.failed_allocations

    def tokens_of(self, request: Request) -> int:
        """Tokens whose KV a running request has, those of plans in flight included."""
        return self.running.planned(request)


def _check_drafter(limits: Limits, profile: Profile, drafter: Drafter) -> None:
    """Errors: BadInput where requests can't speculate under this profile and these limits."""
    if profile.publish_at_commit:
        raise BadInput(f"the profile {profile.name} has no speculative decoding; choose vllm")
    chunked = any(group.kind is KvKind.CHUNK for group in limits.groups)
    if chunked and drafter.recomputes_block:
        raise BadInput("EAGLE and MTP do not work with chunked local attention (as in vLLM)")
    reserved = drafter.reserved * limits.max_num_seqs
    if limits.max_num_batched_tokens <= reserved:
        raise BadInput(
            f"max_num_batched_tokens ({limits.max_num_batched_tokens}) leaves no token beside the {reserved} "
            f"that the drafter needs for max_num_seqs ({limits.max_num_seqs}); raise one or lower the other"
        )
