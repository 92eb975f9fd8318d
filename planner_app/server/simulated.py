"""Simulated backend: the replica that replays use, driven by the wall clock.

The replica runs in simulated time, up to the present and no further. What arrives is stamped with the
present, so the replica knows its future as far as it is simulated, and a replay of the recorded arrivals
makes the same decisions at the same nanoseconds. Clients hear of a token when the clock has reached its
time; how much later than that is its lateness.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from math import inf

import numpy as np
import simpy
from pagecast.planner_app.server.answers import Answers
from pagecast.planner_app.server.backend import HostTierUse, Observer, ReplicaLoad, SpeculationUse
from pagecast.planner_app.server.errors import ApiError, backend_failed, queue_is_full
from pagecast.planner_app.server.generation import NEVER, Generation
from pagecast.planner_app.server.history import History
from pagecast.planner_app.server.live_replica import LiveArrivals, LiveFeed, LiveReplica, LiveSpeculation
from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import DEFAULT_SCOPE, Scope
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import StepPlan
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.retention import Retention
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.machine.host_link import HostLinks
from pagecast.sim.replay.recorder import Recorder

_FLUSH_S = 0.2  # between two flushes of what keeps the history
_SLICE_S = 0.002  # after so long the event loop has its turn


class WallClock:
    """Simulated nanoseconds since it was made: `scale` of them in a nanosecond of the wall clock."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self._start = time.monotonic_ns()

    def now(self) -> int:
        """The present."""
        return int((time.monotonic_ns() - self._start) * self.scale)

    def seconds_until(self, at_ns: int) -> float:
        """Wall-clock seconds until a simulated time; 0 where it has come."""
        return max(at_ns - self.now(), 0) / self.scale / 1e9


class LiveRecorder(Recorder):
    """Passes on what a replica did, and keeps nothing."""

    def __init__(self, backend: SimulatedBackend) -> None:
        super().__init__()
        self._backend = backend

    def step(self, plan: StepPlan, start_ns: int, end_ns: int) -> None:
        """See `Recorder`."""
        self._backend.note_step(plan, end_ns)

    def request(self, request: Request) -> None:
        """See `Recorder`."""
        self._backend.note_end(request)


class SimulatedBackend:
    """Implements `GenerationBackend` with one simulated replica.

    `answers` says what is generated. `most_waiting`: requests that may wait before others are rejected
    (None: any number). `retention`: of every request's content. `swap_ns_per_token`: see `Replica`.
    """

    def __init__(
        self,
        limits: Limits,
        profile: Profile,
        costs: StepCosts,
        answers: Answers,
        *,
        max_model_len: int,
        scale: float = 1.0,
        most_waiting: int | None = None,
        observer: Observer | None = None,
        log_events: bool = False,
        links: HostLinks | None = None,
        speculation: LiveSpeculation | None = None,
        retention: Retention | None = None,
        swap_ns_per_token: float = 0.0,
    ) -> None:
        self.limits = limits
        self.max_model_len = max_model_len
        self.observer = observer
        self.clock = WallClock(scale)
        self.scheduler = Scheduler(limits, profile, log=log_events, drafter=speculation)
        self._speculation = speculation
        most = 0 if speculation is None else speculation.config.num_speculative_tokens
        self._drafts = SpeculationUse.of(most)
        self._answers = answers
        self._most_waiting = most_waiting
        self._retention = retention
        self._live: dict[int, Generation] = {}
        self.history = History()
        self._arrivals = LiveArrivals(self.history)
        self._feed = LiveFeed(limits.block_size)
        self._env = simpy.Environment()
        self._replica = LiveReplica(
            self._env,
            self.scheduler,
            costs,
            self._arrivals,
            self._feed,
            LiveRecorder(self),
            fast_forward=False,
            links=links,
            speculation=speculation,
            swap_ns_per_token=swap_ns_per_token,
        )
        self._replica.history = self.history
        self._replica.keeps_idle = links is not None
        self._wake: asyncio.Event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._failed: BaseException | None = None

    # ---- requests

    def submit(self, generation: Generation) -> None:
        """See `GenerationBackend`."""
        refused = self._refusal(generation)
        if refused is not None:
            generation.refuse(refused)
            return
        now = self.now()
        output = self._answers.write(generation, self.max_model_len)
        keys = BlockKeys.of_ids(
            self.limits.block_size, np.asarray(generation.prompt, np.int64), _scope(generation)
        )
        keys.extend(output)
        request = Request(
            str(generation.number),
            keys,
            len(generation.prompt),
            len(output),
            arrival_ns=now,
            priority=generation.priority,
            index=generation.number,
        )
        request.adapter = generation.adapter
        request.retention = self._retention
        generation.arrival_ns = now
        self._live[generation.number] = generation
        self.history.note_coming(request, generation)
        self._feed.add(request)
        self._arrivals.arrive(generation.number, now)
        self._wake.set()

    def _refusal(self, generation: Generation) -> ApiError | None:
        if self._failed is not None:
            return backend_failed("simulation", self._failed)
        if self._most_waiting is not None and self.load().waiting >= self._most_waiting:
            return queue_is_full(self._most_waiting)
        return None

    def cancel(self, generation: Generation) -> None:
        """See `GenerationBackend`."""
        if generation.number not in self._live or generation.done:
            return
        now = self.now()
        self._arrivals.leave(generation.number, now)
        self._wake.set()

    # ---- the wall clock

    def now(self) -> int:
        """See `GenerationBackend`: in simulated time, and no earlier than what is simulated."""
        return max(self.clock.now(), int(self._env.now))

    async def start(self) -> None:
        """See `GenerationBackend`."""
        self._task = asyncio.create_task(self._run())
        self._flushing = asyncio.create_task(self._flush())

    async def stop(self) -> None:
        """See `GenerationBackend`."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._flushing is not None:
            self._flushing.cancel()
        for generation in list(self._live.values()):
            self._end(generation, "abort", self.clock.now(), "the server was stopped")
        self.history.close()

    def host_tier(self) -> HostTierUse | None:
        """See `GenerationBackend`."""
        offloading = self.scheduler.offloading
        transfers = self._replica.transfers
        if offloading is None or transfers is None:
            return None
        return HostTierUse(
            transfers.load.bytes,
            transfers.load.busy_ns / 1e9,
            transfers.store.bytes,
            transfers.store.busy_ns / 1e9,
            offloading.host.used / offloading.host.room,
            offloading.host.refused_stores,
            transfers.load.sizes,
            transfers.store.sizes,
        )

    def speculation(self) -> SpeculationUse | None:
        """See `GenerationBackend`."""
        return None if self._speculation is None else self._drafts

    @property
    def alive(self) -> bool:
        """See `GenerationBackend`."""
        return self._failed is None

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            self.history.flush()

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                await self._advance()
                next_ns = self._env.peek()
                if next_ns == inf:
                    await self._wake.wait()
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self.clock.seconds_until(int(next_ns)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failed = error
            for generation in list(self._live.values()):
                generation.error = backend_failed("simulation", error)
                self._end(generation, "error", self.clock.now(), str(error))
            raise

    def _due(self) -> bool:
        return bool(self._env.peek() <= self.clock.now())

    async def _advance(self) -> None:
        """Simulates up to the present, an event at a time, and lets others have their turn."""
        env = self._env
        start_s = time.monotonic()
        self._replica.go_on()
        while self._due():
            # The replica runs on by itself while nobody else of its environment is due: this lets it do what
            # is due next, and no more.
            fence = env.timeout(int(env.peek()) + 1 - env.now)
            while not fence.processed:
                env.step()
            self._replica.go_on()
            if time.monotonic() - start_s > _SLICE_S:
                await asyncio.sleep(0)
                start_s = time.monotonic()

    # ---- what the replica did

    def note_step(self, plan: StepPlan, end_ns: int) -> None:
        """Hands out the tokens of a step that has ended."""
        live = self._live
        gaps: dict[int, int] = {}
        first: list[Generation] = []
        generated = 0
        accepted = self._count_drafts(plan)
        for request in plan.decodes:
            generation = live.get(request.index)
            if generation is None or generation.count >= len(generation.tokens):
                continue
            gap = end_ns - generation.last_ns
            gaps[gap] = gaps.get(gap, 0) + 1
            generated += 1
            generation.count += 1
            generation.last_ns = end_ns
            bell = generation.bell
            if not bell.rung:
                bell.ring()
        for chunk in plan.chunks:
            generation = live.get(chunk.request.index)
            if generation is None:
                continue
            if generation.admitted_ns == NEVER:
                generation.admitted_ns = chunk.request.admitted_ns
                generation.cached_tokens = chunk.request.cached_tokens
                generation.external_tokens = chunk.request.external_tokens
            if not chunk.last:
                continue
            if generation.first_ns == NEVER:
                generation.first_ns = end_ns
                first.append(generation)
            else:
                gap = end_ns - generation.last_ns
                gaps[gap] = gaps.get(gap, 0) + 1
            tokens = 1 + accepted.get(chunk.request.id, 0)
            tokens = min(tokens, len(generation.tokens) - generation.count)
            generated += tokens
            generation.count += tokens
            generation.last_ns = end_ns
            generation.bell.ring()
        self.history.note_committed(plan, end_ns)
        if self.observer is not None:
            tokens = plan.decode_n
            for computed, _ in plan.prefill:
                tokens += computed
            late = int((self.clock.now() - end_ns) / self.clock.scale)
            self.observer.step(tokens, generated, gaps, first, late)

    def _count_drafts(self, plan: StepPlan) -> dict[str, int]:
        """Counts the draft tokens of a step; returns how many of each request were accepted."""
        if self._speculation is None:
            return {}
        outcome = self._speculation.latest
        self._drafts.count(plan, outcome)
        self.history.note_verified(plan, outcome)
        return dict(outcome.accepted)

    def note_end(self, request: Request) -> None:
        """Ends a generation as its request has ended."""
        self.history.note_ended(request)
        generation = self._live.get(request.index)
        if generation is None:
            return
        if request.state is State.FINISHED:
            self._end(generation, generation.ending, request.finished_ns)
        elif request.state is State.REJECTED:
            generation.error = ApiError(request.reason)
            self._end(generation, "error", request.finished_ns, request.reason)
        else:
            self._end(generation, "abort", request.finished_ns, request.reason)

    def _end(self, generation: Generation, finish_reason: str, now: int, reason: str = "") -> None:
        self._live.pop(generation.number, None)
        generation.finish_reason = finish_reason
        generation.reason = reason
        generation.finished_ns = now
        generation.bell.ring()
        if self.observer is not None:
            self.observer.ended(generation)

    # ---- figures

    def load(self) -> ReplicaLoad:
        """See `GenerationBackend`."""
        scheduler = self.scheduler
        running = len(scheduler.running.requests)
        waiting = len(scheduler.queue) + self._arrivals.coming
        return ReplicaLoad(
            running,
            waiting,
            scheduler.memory.used_blocks,
            self.limits.num_blocks,
        )

    def adapters(self) -> tuple[list[str], list[str]]:
        """See `GenerationBackend`."""
        running, waiting = set[str](), set[str]()
        for generation in self._live.values():
            if generation.adapter:
                (waiting if generation.admitted_ns == NEVER else running).add(generation.adapter)
        return sorted(running), sorted(waiting)

    def preemptions(self) -> int:
        """See `GenerationBackend`."""
        return self.scheduler.preemptions


def _scope(generation: Generation) -> Scope:
    if not generation.adapter and not generation.salt:
        return DEFAULT_SCOPE
    return Scope(adapter=generation.adapter, salt=generation.salt)
