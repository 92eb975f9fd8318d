"""One server as a SimPy process: it plans, waits as long as the step takes, and commits.

The host makes a plan and launches it (`host_ns`), then the device computes (`device_ns`). At pipeline depth
0 the host waits for the device; at depth 1 it makes the next plan meanwhile:

    depth 0   host  [plan k]........[plan k+1]........        depth 1   host   [k+1]......[k+2]......
              device        [ k    ]          [ k+1  ]                  device [   k     ][   k+1   ]

Arrivals are handled by the host between steps, one after another, and join the first plan made after
them. Where the scheduler says that nothing will be decided for a while, those steps are one flight, which
`cut` shortens to the steps begun by now when somebody wants to look in.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import simpy
from pagecast.sim.core.pipeline import Pipeline
from pagecast.sim.core.plan import DONE
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.core.stretch.stride import Stride
from pagecast.sim.replica.arrivals import NEVER_NS, ArrivalSource, RequestSource
from pagecast.sim.replica.clock import FlightTimes, StepClock
from pagecast.sim.replica.copies import Copies
from pagecast.sim.replica.disk_transfers import DiskTransfers
from pagecast.sim.replica.observer import Observer, Observers
from pagecast.sim.replica.scheduler_spec import speculation_of
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.replica.transfers import Ended
from simpy.events import URGENT

UNREADABLE = "waited for ever for blocks that the disk could not read, as in vLLM 0.24"
_COMMITS_PER_EVENT = 1024
"""A lone replica runs ahead of the environment's clock; so often it lets the environment catch up."""


class Replica:
    """Serves what `arrivals` brings, with a scheduler's decisions and a cost model's times.

    `scheduler`: one that `spec` has made, where it needs a log or block numbers; by default a plain one.
    `fast_forward=False` makes every step a flight of its own; the outcome is the same to the nanosecond.

    Where `arrivals.open` is true, others add requests while the replica runs, at the environment's time,
    and call `wake` after each; the replica waits where it has nothing to do. `changed_ns` is the time of its
    latest change, which may be ahead of the environment's.
    """

    def __init__(
        self,
        env: simpy.Environment,
        spec: ReplicaSpec,
        arrivals: ArrivalSource,
        feed: RequestSource,
        observers: Sequence[Observer] = (),
        *,
        scheduler: Scheduler | None = None,
        fast_forward: bool = True,
    ) -> None:
        self.env = env
        self.spec = spec
        self.arrivals = arrivals
        self.feed = feed
        self.scheduler = scheduler or spec.scheduler()
        self.speculation = speculation_of(self.scheduler)
        offloading = self.scheduler.offloading
        self.copies = None if offloading is None else Copies(spec.links, offloading)
        self.changed_ns = 0
        self._observers = Observers()
        for observer in observers:
            self.observe(observer)
        self._clock = StepClock(spec, self.scheduler)
        self._memory = self.scheduler.memory
        self._expiry = self._memory.expiry
        self._disk = None if self.copies is None else self.copies.disk
        # A step that overwrites evicted blocks is no part of a stretch.
        self._strides = fast_forward and not spec.scrub_ns_per_block
        self._pipeline: Pipeline[FlightTimes] = Pipeline(self.scheduler)
        self._idle: simpy.Event | None = None  # what it waits for where it has nothing to do
        self._stopped = False
        self.process = env.process(self._run())

    def observe(self, observer: Observer) -> None:
        """Tells `observer` what happens from now on."""
        self._observers.add(observer)

    def cut(self, now: int) -> None:
        """Ends the stretch in flight with the steps begun before `now`, so that the scheduler is as of `now`.

        To be called by another process of the environment, at its time. What the replica does afterwards is
        the same as without.
        """
        plan = self.scheduler.stride.open
        if plan is None:
            return
        shorter = self.scheduler.cut(plan, self._clock.begun(plan, now))
        if shorter is not plan:
            self._pipeline.replace_newest(shorter, self._clock.stretch(shorter))
            self.process.interrupt()

    def used_blocks(self, now: int) -> int:
        """Blocks that requests hold at `now`, not before the latest change. It changes nothing."""
        scheduler = self.scheduler
        used = self._memory.used_blocks
        plan = scheduler.stride.open
        if plan is None:
            return used
        steps = self._clock.begun(plan, now)
        running = scheduler.running
        return used + self._memory.blocks_added(running.decoders, running.tick, steps)

    @property
    def device_free_ns(self) -> int:
        """When the device will have computed all that was launched."""
        return self._clock.device_free

    def wake(self, now: int) -> None:
        """Takes note that `arrivals` has a new entry, which joins the first step planned from `now` on."""
        if self._idle is not None:
            self._idle.succeed()
            self._idle = None
        elif self.scheduler.stride.open is not None:
            self.cut(now)

    def resume(self) -> None:
        """Starts the process again where it ended for want of arrivals, and there is a new one."""
        if not self.process.is_alive and self.arrivals.next_ns < NEVER_NS:
            self.process = self.env.process(self._run())

    def stop(self) -> None:
        """Ends the process now: the steps in flight are lost. To be called by another process."""
        self._note_ended_steps(int(self.env.now))
        self._stopped = True
        if self._idle is not None:
            self._idle.succeed()
            self._idle = None
        elif self.process.is_alive:
            self.process.interrupt()

    def _note_ended_steps(self, now: int) -> None:
        """Notes the steps of stretches in flight that ended before `now`, and the blocks held at `now`."""
        self.cut(now)
        flights = self._pipeline.flights
        for plan, (start_ns, last_begins_ns, _) in flights:
            if plan.steps == 1:
                continue
            if plan is flights[-1][0]:
                ended, end_ns = self._clock.ended(plan, now)
            else:  # the plan after it was made when its last step began
                ended, end_ns = plan.steps - 1, last_begins_ns
            if ended:
                for note in self._observers.step:
                    note(plan._replace(steps=ended), DONE, start_ns, end_ns)
        for hear in self._observers.stopped:
            hear(self._memory.used_blocks)

    # ---- the loop

    def _run(self) -> Generator[Any, Any, None]:
        env = self.env
        others = env._queue  # what other processes have to do; `env.peek` is slow where it is empty
        pipeline = self._pipeline
        flights = pipeline.flights
        depth = pipeline.depth
        arrivals = self.arrivals
        copies = self.copies
        speculation = self.speculation
        changing = self._observers.changing
        note_step = self._observers.step
        now = int(env.now)  # the host's clock: ahead of the environment's while nobody else is due
        unseen = 0  # commits since the environment's clock was moved
        while not self._stopped:
            if len(flights) <= depth:
                goal = flights[-1][1][1] if flights else now
                if goal < now:
                    goal = now
                if others and self._others_first(goal) and (yield from self._cut_short(goal)):
                    continue
                now = goal
                if flights and copies is not None and copies.reports:
                    self._tell_all(copies.before(flights[-1][0]), now)
                if arrivals.next_ns <= now:
                    now = self._take_in(now)
                    if others and others[0][0] <= now:
                        continue  # more may arrive while these are handled
                launched = self._plan(now)
                if launched is not None:
                    now = launched
                    if len(flights) <= depth:
                        continue
                elif not flights:
                    if copies is not None and copies.busy:
                        now = yield from self._wait_for_copies(copies, now)
                        continue
                    goal = arrivals.next_ns
                    if goal == NEVER_NS:
                        if not arrivals.open:
                            break
                        self._idle = env.event()
                        yield self._idle
                        now = max(now, int(env.now))
                        continue
                    if not (others and others[0][0] <= goal and (yield from self._cut_short(goal))):
                        now = goal
                    continue
            plan, (start_ns, _, end_ns) = flights[0]
            if end_ns > now:
                if (others and others[0][0] <= end_ns) or unseen > _COMMITS_PER_EVENT:
                    unseen = 0
                    if (yield from self._cut_short(end_ns)):
                        continue
                now = end_ns
            unseen += 1
            for look in changing:
                look(now)
            self.changed_ns = now
            outcome = DONE if speculation is None else speculation.outcome(plan, now)
            if copies is not None and copies.reports:
                self._tell_all(copies.before(plan), now)
            endings = pipeline.commit(outcome, now)
            for note in note_step:
                note(plan, outcome, start_ns, end_ns)
            if copies is not None and copies.reports:
                self._tell_all(copies.after(plan), now)
            for request in endings:
                self._ended(request, now)
        if now > env.now and not self._stopped:
            yield env.timeout(now - env.now)

    def _others_first(self, goal: int) -> bool:
        """Whether other processes have something to do before a step planned at `goal`: earlier, or urgently
        at that time, as arrivals are."""
        time, priority, *_ = self.env._queue[0]
        return bool(time < goal or (time == goal and (priority == URGENT or goal > self.env.now)))

    def _cut_short(self, goal: int) -> Generator[Any, Any, bool]:
        """Waits until `goal`. True: a flight was cut meanwhile, and its times are others now."""
        try:
            yield self.env.timeout(goal - self.env.now)
        except simpy.Interrupt:
            return True
        return False

    def _take_in(self, now: int) -> int:
        """Handles arrivals and cancellations, one after another; each takes the host some time."""
        arrivals = self.arrivals
        scheduler = self.scheduler
        for look in self._observers.changing:
            look(now)
        while arrivals.next_ns <= now and (due := arrivals.take(now)) is not None:
            row, arrival_ns = due
            if arrival_ns is None:
                request = scheduler.requests.get(str(row))
                if request is not None and scheduler.cancel(request.id, now):
                    self._ended(request, now)
                continue
            request = self.feed.request(row, arrival_ns)
            now += self.spec.costs.arrival_ns(request.prompt_tokens)
            if not scheduler.submit(request):
                request.finished_ns = now
                self._ended(request, now)
        return now

    def _ended(self, request: Request, now: int) -> None:
        if self.speculation is not None:
            self.speculation.ended(request)
        if request.state is not State.FINISHED:
            self.arrivals.failed(request)
        self.arrivals.ended(request.index, now)
        for note in self._observers.ended:
            note(request, now)

    # ---- planning

    def _plan(self, now: int) -> int | None:
        """Plans at `now` and launches. Returns when that is done; None: nothing can be planned."""
        for look in self._observers.changing:
            look(now)
        self.changed_ns = now
        disk = self._disk
        if disk is not None:
            self._advance_disk(disk, now)
        scheduler = self.scheduler
        clock = self._clock
        # The step after a prompt step has a penalty of its own, so it is not part of a stretch.
        warm = clock.costs.warm_ns(clock.prompt_tokens) if clock.prompt_tokens else 0
        if self._expiry is not None:
            scheduler.refresh(now)
        if self._strides and not warm:
            stride = scheduler.stride
            quiet = stride.quiet()
            if quiet:
                return self._plan_stretch(stride, now, quiet)
            plan = scheduler.decide(now)
        else:
            plan = scheduler.plan(now)
        if scheduler.aborted:
            self._end_aborted(now)
        if disk is not None:
            disk.take(now)
        for note in self._observers.planned:
            note(plan, now)
        if plan is None:
            return None
        copies = self.copies
        if copies is not None and not plan.computes:
            return copies.transfers.begin(plan, now + clock.host_ns(1), clock.device_free)
        host = now + clock.host_ns(len(plan.decodes) + len(plan.chunks))
        if copies is not None:
            host = copies.launch(plan, host, clock.device_free)
        times = clock.step(plan, now, host, warm)
        self._pipeline.add(plan, times)
        return times[1]

    def _plan_stretch(self, stride: Stride, now: int, quiet: int) -> int:
        """Plans as many steps as begin before the next arrival, of `quiet` without decisions."""
        clock = self._clock
        due = self.arrivals.next_ns
        if self._expiry is not None:
            due = min(due, self._expiry.due_ns)
        host = clock.host_ns(stride.count)
        launched = now + host
        copies = self.copies
        if copies is not None:
            launched = copies.launch_stretch(launched, clock.device_free)
        pipeline = self._pipeline
        ahead = bool(pipeline.flights)
        plan = stride.plan(clock.stretch_steps(stride, quiet, due, now, host, launched, ahead=ahead))
        for note in self._observers.planned:
            note(plan, now)
        if copies is not None and copies.transfers.under_way:
            copies.follow(clock.launches(plan, host))
        pipeline.add(plan, clock.stretch(plan))
        return launched

    def _end_aborted(self, now: int) -> None:
        aborted = self.scheduler.aborted
        for request in aborted:
            self._ended(request, now)
        aborted.clear()

    # ---- copies

    def _tell_all(self, reports: Iterator[Ended], now: int) -> None:
        for ended in reports:
            self._tell(ended, now)

    def _tell(self, ended: Ended, now: int) -> None:
        """Tells the scheduler of transfers that have ended."""
        for request in self.scheduler.transferred(*ended, now):
            self._ended(request, now)
        if self._disk is not None:
            self._disk.take(now)
        for note in self._observers.transferred:
            note(ended, now, disk=False)

    def _advance_disk(self, disk: DiskTransfers, now: int) -> None:
        """Tells the scheduler of the jobs between host and disk that have ended."""
        ended = disk.advance(now)
        if ended is not None:
            for note in self._observers.transferred:
                note(ended, now, disk=True)

    def _wait_for_copies(self, copies: Copies, now: int) -> Generator[Any, Any, int]:
        """Lets time pass until a transfer ends or something arrives, where nothing can be computed before."""
        clock = self._clock
        copies.transfers.begin(None, now, clock.device_free)
        ends = copies.next_ns(now + max(clock.host_ns(1), 1))
        if copies.wait_for_ever(bool(self.scheduler.requests)):
            self._give_up_waiting(now)
        goal = max(now, min(self.arrivals.next_ns, *ends))
        others = self.env._queue
        if others and others[0][0] <= goal:
            self._idle = self.env.event()
            yield self._idle | self.env.timeout(max(goal - self.env.now, 0))
            self._idle = None
            goal = max(now, min(goal, int(self.env.now)))
        done = copies.transfers.ended(goal)
        if done is not None:
            self._tell(done, goal)
            goal += clock.host_ns(1)
        return goal

    def _give_up_waiting(self, now: int) -> None:
        """Ends requests that wait for ever for what the disk can't read, in their clients' place."""
        for request in list(self.scheduler.requests.values()):
            if request.state is State.WAITING:
                request.reason = UNREADABLE
                self.scheduler.cancel(request.id, now)
                self._ended(request, now)
