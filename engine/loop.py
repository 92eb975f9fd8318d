"""Step loop of the engine: a step is planned, launched, and committed when its tokens are there.

At pipeline depth 1 the next step is planned and launched while the device still computes the last one:

    host    [plan k+1][launch k+1][ wait for k ][commit k][plan k+2] ...
    device  [        step k                   ][      step k+1     ] ...

Who computes what, and where, is the scheduler's to decide; here its plans are only carried out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Protocol

import torch
from pagecast.engine.host_tier import HostTier, HostTransfer
from pagecast.engine.runner import Flight, Runner
from pagecast.engine.sequence import NO_ROW, Sequence
from pagecast.sim.core.drafter import Drafter
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.pipeline import Pipeline
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.scheduler import Scheduler

NOT_FINITE = "the model's logits are not finite"


class Clock:
    """Nanoseconds since it was made; no two readings are equal, so they order what happened.

    `start_ns` is its zero on the system's monotonic clock, which other processes read too.
    """

    def __init__(self) -> None:
        self.start_ns = time.perf_counter_ns()
        self._last = 0

    def now(self) -> int:
        """Later than every reading before it."""
        self._last = max(self._last + 1, time.perf_counter_ns() - self.start_ns)
        return self._last


class Log(Protocol):
    """Is told what a recorded run consists of; times are the clock's."""

    def idle(self, start_ns: int) -> None:
        """A plan was made that computed nothing, and yet preempted requests or began transfers. With a host
        tier, any plan that computed nothing."""

    def step(self, plan: StepPlan, start_ns: int, planned_ns: int) -> None:
        """A plan was made between these times."""

    def committed(self, plan: StepPlan, outcome: Outcome, end_ns: int) -> None:
        """The oldest plan in flight was committed."""

    def transferred(self, transfers: Iterable[HostTransfer], now_ns: int) -> None:
        """The scheduler was told that these transfers have ended."""


class Loop:
    """Serves sequences until they end; `make_runner` gets the table of live sequences, and so does
    `make_drafter`, where requests speculate.

    `ended` is called with each sequence that ends, whichever way.
    """

    def __init__(
        self,
        limits: Limits,
        make_runner: Callable[[dict[Request, Sequence]], Runner],
        *,
        ended: Callable[[Sequence], None],
        make_drafter: Callable[[dict[Request, Sequence]], Drafter] | None = None,
        log_events: bool = False,
    ) -> None:
        self._log_events = log_events
        self._sequences: dict[Request, Sequence] = {}
        self.drafter = None if make_drafter is None else make_drafter(self._sequences)
        self.scheduler = Scheduler(limits, log=log_events, drafter=self.drafter)
        self.clock = Clock()
        self.log: Log | None = None
        self.runner = make_runner(self._sequences)
        self._ended = ended
        self._pipeline: Pipeline[Flight | str] = Pipeline(self.scheduler)
        self._preemptions = 0
        self._nothing = False  # the last plan computed nothing, and nothing has happened since
        self.waited_ns = 0  # the host's time spent waiting for the device

    @property
    def busy(self) -> bool:
        """Whether any sequence is live."""
        return bool(self._sequences)

    def restart(self, limits: Limits | None = None) -> None:
        """Begins as if nothing had ever been served: an empty cache, step 0, time 0. Nothing may be live.

        `limits`: those that the scheduler has from now on.
        """
        assert not self._sequences and not len(self._pipeline)
        limits = limits or self.scheduler.limits
        self.scheduler = Scheduler(limits, log=self._log_events, drafter=self.drafter)
        self._pipeline = Pipeline(self.scheduler)
        self.clock = Clock()
        self._preemptions = 0
        self._nothing = False
        if self.runner.host is not None:
            self.runner.host.restart(self.clock.now)

    def submit(self, sequence: Sequence) -> bool:
        """Queues a sequence. False: it was rejected, and has ended."""
        self._nothing = False
        self._sequences[sequence.request] = sequence
        if self.scheduler.submit(sequence.request):
            sequence.make_room()
            return True
        self._end(sequence.request)
        return False

    def cancel(self, id: str, reason: str = "") -> bool:
        """Ends a live sequence. False: there is none of that id."""
        request = self.scheduler.requests.get(id)
        if request is None:
            return False
        request.reason = reason
        self._nothing = False
        self.scheduler.cancel(id, self.clock.now())
        self._end(request)
        return True

    def step(self) -> bool:
        """Launches the next step if there is one and the pipeline has room, and lands the oldest otherwise.

        False: there was nothing to do. Errors: EngineFailed where a GPU of several is gone.
        """
        self.runner.check()
        pipeline = self._pipeline
        host = self.runner.host
        if host is not None and host.busy:
            self._report_transfers(host)
        launched = pipeline.has_room and not self._nothing and self._launch()
        if len(pipeline) and (not launched or pipeline.is_full):
            self._land()
            return True
        if not launched and host is not None and host.busy:
            host.nap()
            return True
        return launched

    def drain(self) -> None:
        """Cancels everything and waits for the device."""
        for request in list(self._sequences):
            self.cancel(request.id)
        while len(self._pipeline):
            self._land()
        host = self.runner.host
        while host is not None and host.busy:
            self._report_transfers(host)

    def _report_transfers(self, host: HostTier) -> None:
        """Tells the scheduler which transfers have ended. Stores of steps that have not landed wait for that:
        what they copied may turn out to be a failure."""
        ended = host.ended(self._pipeline.oldest[0].step if len(self._pipeline) else None)
        if not ended:
            return
        now = self.clock.now()
        jobs = [transfer.job for transfer in ended]
        self.scheduler.transferred(jobs, [transfer.job for transfer in ended if transfer.lost])
        self._nothing = False
        if self.log is not None:
            self.log.transferred(ended, now)

    def _launch(self) -> bool:
        start = self.clock.now()
        plan = self.scheduler.plan(start)
        planned = self.clock.now()
        preempted = self.scheduler.preemptions != self._preemptions
        if preempted:
            self._release_preempted()
        host = self.runner.host
        if plan is None:
            self._nothing = host is not None
            if (preempted or self._nothing) and self.log is not None:
                self.log.idle(start)
            return False
        if not plan.computes:
            self.runner.transfer(plan)
            if self.log is not None:
                self.log.idle(start)
            return True
        if self.log is not None:
            self.log.step(plan, start, planned)
        try:
            flight = self.runner.launch(plan, self.scheduler.memory)
        except BaseException as error:
            # Nothing of this step can be trusted, nor of one that would build on it. It is in flight for the
            # scheduler all the same, and lands as a failure.
            if host is not None:
                host.lose(plan.stores)
            full = isinstance(error, torch.OutOfMemoryError)
            what = "out of memory" if full else type(error).__name__
            self._pipeline.add(plan, f"{what} in step {plan.step}: {error}")
            if not full:
                raise
            while len(self._pipeline) > 1:
                self._land()
        else:
            self._pipeline.add(plan, flight)
        return True

    def _release_preempted(self) -> None:
        self._preemptions = self.scheduler.preemptions
        for request, sequence in self._sequences.items():
            if request.preemptions != sequence.preemptions:
                self.runner.rows.free(sequence)

    def _land(self) -> None:
        """Waits for the oldest step, hands out its tokens and commits it."""
        plan, flight = self._pipeline.oldest
        self._nothing = False
        stopped: list[str] = []
        failed: list[tuple[str, str]] = []
        accepted: list[tuple[str, int]] = []
        heard: list[tuple[Sequence, int]] = []
        if isinstance(flight, str):
            computing = (*plan.decodes, *(chunk.request for chunk in plan.chunks))
            failed = [(request.id, flight) for request in computing if request in self._sequences]
        else:
            self._hand_out(flight, stopped, failed, accepted, heard)
        if failed and self.runner.host is not None:
            ids = {id for id, _ in failed}
            self.runner.host.spoil(store for store in plan.stores if store.request.id in ids)
        now = self.clock.now()
        outcome = Outcome(tuple(stopped), tuple(failed), tuple(accepted))
        for request in self._pipeline.commit(outcome, now):
            self._end(request)
        if self.log is not None:
            self.log.committed(plan, outcome, now)
        for sequence, token in heard:
            self._tell(sequence, token)

    def _hand_out(
        self,
        flight: Flight,
        stopped: list[str],
        failed: list[tuple[str, str]],
        accepted: list[tuple[str, int]],
        heard: list[tuple[Sequence, int]],
    ) -> None:
        block_size = self.runner.rows.block_size
        start = time.perf_counter_ns()
        tokens = flight.wait()
        self.waited_ns += time.perf_counter_ns() - start
        yields: Iterable[tuple[Sequence | None, int]] = zip(flight.takers, tokens, strict=True)
        if self.drafter is not None:
            yields = _verified(flight.takers, tokens, accepted)
        for sequence, token in yields:
            if sequence is None or sequence.done:
                continue
            if token < 0:
                failed.append((sequence.request.id, NOT_FINITE))
                continue
            sequence.append(token, block_size)
            if token in sequence.stops:
                stopped.append(sequence.request.id)
            if sequence.listener is not None:
                heard.append((sequence, token))

    def _tell(self, sequence: Sequence, token: int) -> None:
        if sequence.listener is None:
            return
        try:
            sequence.listener(sequence, token)
        except Exception as error:
            # Whoever listens may fail; the others' requests go on.
            sequence.listener = None
            if not sequence.done:
                self.cancel(sequence.request.id, f"{type(error).__name__}: {error}")

    def _end(self, request: Request) -> None:
        sequence = self._sequences.pop(request)
        sequence.done = True
        sequence.reason = request.reason
        if sequence.row != NO_ROW:
            self.runner.rows.free(sequence)
        if request.state is State.FINISHED:
            last = int(sequence.ids[sequence.length - 1])
            sequence.finish_reason = "stop" if last in sequence.stops else "length"
        elif request.state is State.CANCELLED:
            sequence.finish_reason = "failed" if request.reason else "cancelled"
        else:
            sequence.finish_reason = "rejected"
        self._ended(sequence)


def _verified(
    takers: list[Sequence | None], tokens: list[int], accepted: list[tuple[str, int]]
) -> Iterator[tuple[Sequence, int]]:
    """The tokens that sequences get which speculate; adds to `accepted` how many were accepted of each."""
    place = 0
    for sequence, rows in groupby(takers):
        count = len(list(rows))
        drawn = tokens[place : place + count]
        place += count
        if sequence is None or sequence.done:
            continue
        yielded, right = sequence.verify(drawn)
        if count > 1:
            accepted.append((sequence.request.id, right))
        for token in yielded:
            yield sequence, token
