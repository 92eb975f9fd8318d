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
from pagecast.planner_app.server.errors import ApiError, backend_failed
from pagecast.planner_app.server.generation import NEVER, Generation
from pagecast.planner_app.server.history import History
from pagecast.planner_app.server.live_arrivals import LiveArrivals, LiveFeed
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import DEFAULT_SCOPE, Scope
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request, State
from pagecast.sim.replica.observer import Observer as ReplicaObserver
from pagecast.sim.replica.replica import UNREADABLE, Replica
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.replica.transfers import Ended
from pagecast.sim.runs.transfers import DISK, RecordedTransfer

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


class LiveObserver(ReplicaObserver):
    """Tells a backend and its history what their replica does.

    With a host tier the history notes every plan that computes nothing; else only those that preempt.
    """

    def __init__(self, backend: SimulatedBackend, replica: Replica) -> None:
        self._backend = backend
        self._replica = replica
        self._history = backend.history
        self._preemptions = 0

    def planned(self, plan: StepPlan | None, now: int) -> None:
        """Notes a plan. A server has no makespan and never ends, so times that only it needs are dropped."""
        before, self._preemptions = self._preemptions, self._replica.scheduler.preemptions
        copies = self._replica.copies
        if plan is None or not plan.computes:
            if copies is not None or self._preemptions != before:
                self._history.note_idle(now)
            return
        self._history.note_planned(now)
        if copies is not None:
            copies.forget_times()

    def step(self, plan: StepPlan, outcome: Outcome, start_ns: int, end_ns: int) -> None:
        """Hands out the tokens of a step."""
        if self._replica.speculation is not None:
            self._replica.speculation.forget_times()
        self._backend.note_step(plan, outcome, end_ns)

    def ended(self, request: Request, now: int) -> None:
        """Ends a generation; one that waited for ever is ended in its client's place."""
        if request.reason == UNREADABLE:
            self._history.note_outside(now, request.index, cancelled=True)
        self._backend.note_end(request)

    def transferred(self, ended: Ended, now: int, *, disk: bool) -> None:
        """Notes ends of transfers."""
        kind = DISK if disk else ""
        records = [RecordedTransfer(job, now, kind, lost=job in ended.lost) for job in ended.jobs]
        self._history.note_transferred(records, now)


class SimulatedBackend:
    """Implements `GenerationBackend` with one simulated replica of `spec`.

    `answers` says what is generated. `scale`: simulated seconds per second. `log_events`: the scheduler keeps
    a log, for its KV events.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        answers: Answers,
        *,
        max_model_len: int,
        scale: float = 1.0,
        log_events: bool = False,
    ) -> None:
        self.limits = spec.limits
        self._lookahead = spec.key_lookahead
        self.max_model_len = max_model_len
        self.observer: Observer | None = None
        self.clock = WallClock(scale)
        self.scheduler = spec.scheduler(log=log_events)
        self._retention = spec.scenario.cache.retention
        self._drafts = SpeculationUse.of(
            0 if spec.speculation is None else spec.speculation.num_speculative_tokens
        )
        self._answers = answers
        self._live: dict[int, Generation] = {}
        self.history = History()
        self._arrivals = LiveArrivals(self.history)
        self._feed = LiveFeed()
        self._env = simpy.Environment()
        # Clients want every token as it comes: steps are planned one by one.
        self._replica = Replica(
            self._env, spec, self._arrivals, self._feed, scheduler=self.scheduler, fast_forward=False
        )
        self._replica.observe(LiveObserver(self, self._replica))
        self._wake: asyncio.Event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._failed: BaseException | None = None

    # ---- requests

    def submit(self, generation: Generation) -> None:
        if self._failed is not None:
            generation.refuse(backend_failed("simulation", self._failed))
            return
        now = self.now()
        output = self._answers.write(generation, self.max_model_len)
        keys = BlockKeys.of_ids(
            self.limits.block_size,
            np.asarray(generation.prompt, np.int64),
            _scope(generation),
            lookahead=self._lookahead,
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

    def cancel(self, generation: Generation) -> None:
        if generation.number not in self._live or generation.done:
            return
        now = self.now()
        self._arrivals.leave(generation.number, now)
        self._wake.set()

    # ---- the wall clock

    def now(self) -> int:
        """In simulated time, and no earlier than what is simulated."""
        return max(self.clock.now(), int(self._env.now))

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._flushing = asyncio.create_task(self._flush())

    async def stop(self) -> None:
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
        offloading, copies = self.scheduler.offloading, self._replica.copies
        if offloading is None or copies is None:
            return None
        transfers = copies.transfers
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
        return None if self._replica.speculation is None else self._drafts

    @property
    def unrecorded(self) -> str:
        return self.history.failed

    @property
    def alive(self) -> bool:
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
        self._replica.resume()
        while self._due():
            # The replica runs on by itself while nobody else of its environment is due: this lets it do what
            # is due next, and no more.
            fence = env.timeout(int(env.peek()) + 1 - env.now)
            while not fence.processed:
                env.step()
            self._replica.resume()
            if time.monotonic() - start_s > _SLICE_S:
                self.history.flush()
                await asyncio.sleep(0)
                start_s = time.monotonic()
        self.history.flush()  # no client hears of what a kill could still take from the recording

    # ---- what the replica did

    def note_step(self, plan: StepPlan, outcome: Outcome, end_ns: int) -> None:
        """Hands out the tokens of a step that has ended."""
        live = self._live
        gaps: dict[int, int] = {}
        first: list[Generation] = []
        generated = 0
        accepted = self._count_drafts(plan, outcome)
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

    def _count_drafts(self, plan: StepPlan, outcome: Outcome) -> dict[str, int]:
        """Counts the draft tokens of a step; returns how many of each request were accepted."""
        if self._replica.speculation is None:
            return {}
        self._drafts.count(plan, outcome)
        self.history.note_verified(plan, outcome)
        return dict(outcome.accepted)

    def note_end(self, request: Request) -> None:
        """Ends a generation as its request has ended."""
        self.history.note_ended(request)
        generation = self._live.get(request.index)
        if generation is None:
            return
        generation.preemptions = request.preemptions
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
        running, waiting = set[str](), set[str]()
        for generation in self._live.values():
            if generation.adapter:
                (waiting if generation.admitted_ns == NEVER else running).add(generation.adapter)
        return sorted(running), sorted(waiting)

    def preemptions(self) -> int:
        return self.scheduler.preemptions


def _scope(generation: Generation) -> Scope:
    if not generation.adapter and not generation.salt:
        return DEFAULT_SCOPE
    return Scope(adapter=generation.adapter, salt=generation.salt)
