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

from collections.abc import Callable, Generator
from typing import Any

import simpy
from pagecast.sim.core.pipeline import Pipeline
from pagecast.sim.core.plan import DONE, StepPlan
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.costs.step_costs import Batch, StepCosts
from pagecast.sim.replay.clients import NEVER_NS, Arrivals
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replay.flight import Flight, Stretch
from pagecast.sim.replay.recorder import Recorder

_COMMITS_PER_EVENT = 1024
"""A lone replica runs ahead of the environment's clock; so often it lets the environment catch up."""


class Replica:
    """Serves what `arrivals` brings, with a scheduler's decisions and a cost model's times.

    `fast_forward=False` makes every step a flight of its own; the outcome is the same to the nanosecond.
    `after_step` is called between steps, for checks.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        costs: StepCosts,
        arrivals: Arrivals,
        feed: Feed,
        recorder: Recorder,
        *,
        fast_forward: bool = True,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self.env = env
        self.scheduler = scheduler
        self.costs = costs
        self.arrivals = arrivals
        self.feed = feed
        self.recorder = recorder
        self.fast_forward = fast_forward
        self.after_step = after_step
        self._pipeline: Pipeline[Flight] = Pipeline(scheduler)
        self._device_free = 0
        self._prompt_tokens = 0  # tokens of the last step planned, if it had prompts
        self._unseen = 0  # commits since the environment's clock was last moved
        self.process = env.process(self._run())

    def cut(self, now: int) -> None:
        """Ends the stretch in flight with the steps begun before `now`, so that the scheduler is as of `now`.

        To be called by another process of the environment, at its time. What the replica does afterwards is
        the same as without.
        """
        if not len(self._pipeline):
            return
        plan, flight = self._pipeline.newest
        if not isinstance(flight, Stretch):
            return
        steps = flight.begun(now, plan.steps)
        shorter = self.scheduler.cut(plan, steps)
        if shorter is not plan:
            flight.set_steps(steps)
            self._device_free = flight.end_ns
            self._pipeline.replace_newest(shorter)
            self.process.interrupt()

    # ---- the loop

    def _run(self) -> Generator[Any, Any, None]:
        pipeline = self._pipeline
        arrivals = self.arrivals
        now = int(self.env.now)  # the host's clock: ahead of the environment's while nobody else is due
        stalled = False  # whether nothing can be planned before the next commit
        while True:
            landing = stalled or pipeline.is_full
            if landing:
                goal = pipeline.oldest[1].end_ns
            elif len(pipeline):
                goal = pipeline.newest[1].free_ns
            else:
                goal = now
            if goal > now:
                if self._others_are_due(goal) and (yield from self._cut_short(goal)):
                    continue
                now = goal
            if landing:
                self._commit(now)
                stalled = False
                continue
            if arrivals.next_ns <= now:
                now = self._take_in(now)
            flight = self._plan(now)
            if flight is not None:
                now = flight.launched_ns
            elif len(pipeline):
                stalled = True
            elif arrivals.next_ns == NEVER_NS:
                break
            else:
                goal = arrivals.next_ns
                if self._others_are_due(goal) and (yield from self._cut_short(goal)):
                    continue
                now = goal
        if now > self.env.now:
            yield self.env.timeout(now - self.env.now)

    def _others_are_due(self, goal: int) -> bool:
        """Whether another process has something to do before `goal`, or the clock should be moved anyway."""
        queue = self.env._queue  # `peek` raises and catches an error where it is empty
        return bool(queue and queue[0][0] <= goal) or self._unseen >= _COMMITS_PER_EVENT

    def _cut_short(self, goal: int) -> Generator[Any, Any, bool]:
        """Waits until `goal`. True: a flight was cut meanwhile, and its times are others now."""
        self._unseen = 0
        try:
            yield self.env.timeout(goal - self.env.now)
        except simpy.Interrupt:
            return True
        return False

    def _take_in(self, now: int) -> int:
        """Handles what has arrived, and who has gone, one after another; each takes the host some time."""
        arrivals = self.arrivals
        scheduler = self.scheduler
        while (due := arrivals.take(now)) is not None:
            if due.arrival_ns is None:
                gone = scheduler.requests.get(str(due.row))
                if gone is not None and scheduler.cancel(gone.id, now):
                    self._ended(gone, now)
                continue
            request = self.feed.request(due.row, due.arrival_ns)
            now += self.costs.arrival_ns(request.prompt_tokens)
            if not scheduler.submit(request):
                request.finished_ns = now
                self._ended(request, now)
        return now

    # ---- planning

    def _plan(self, now: int) -> Flight | None:
        """Plans at `now` and launches. None: nothing can be planned."""
        scheduler = self.scheduler
        # The step after a prompt step has a penalty of its own, so it is not part of a stretch.
        warm = self.costs.warm_ns(self._prompt_tokens) if self._prompt_tokens else 0
        quiet = scheduler.quiet() if self.fast_forward and not warm else 0
        if quiet:
            return self._plan_stretch(now, quiet)
        plan = scheduler.decide(now) if self.fast_forward and not warm else scheduler.plan(now)
        if plan is None:
            return None
        return self._launch(plan, now, warm)

    def _launch(self, plan: StepPlan, now: int, warm: int) -> Flight:
        """Times one step. It ends no sooner than its last kernel is launched."""
        n = plan.decode_n
        host = now + self.costs.host_ns(len(plan.decodes) + len(plan.chunks))
        launched = host
        saved = self._saved(n)
        if plan.prefill:
            batch = Batch(n, plan.decode_ctx, plan.decode_max, plan.prefill, self._prompt_tokens)
            # Prompts share blocks too, but do not read them together.
            saved = min(saved, self.costs.shared_ns(plan.decode_ctx, n))
            duration = self.costs.device_ns(batch) - saved
            launched += self.costs.launch_ns(batch)
            self._prompt_tokens = n + sum([chunk[0] for chunk in plan.prefill])
        else:
            duration = self.costs.decode_line(n).ns(plan.decode_ctx, plan.decode_max) + warm - saved
            self._prompt_tokens = 0
        end = max(max(self._device_free, host) + duration, launched)
        return self._fly(plan, Flight(now, launched, end))

    def _plan_stretch(self, now: int, quiet: int) -> Flight:
        """Plans as many steps as begin before the next arrival, of `quiet` without decisions."""
        scheduler = self.scheduler
        n, context, longest = scheduler.decode_load()
        line = self.costs.decode_line(n)
        host = self.costs.host_ns(n)
        saved = self._saved(n)
        due = self.arrivals.next_ns
        self._prompt_tokens = 0
        if not scheduler.limits.pipeline_depth:
            stretch = Stretch(now, host, now, line, context, longest, host - saved, ahead=False)
        else:
            # Step i + 1 is planned when step i - 1 ends, if the device is the slower of the two.
            busy = self._device_free
            first = line.ns(context, longest) - saved
            if quiet == 1 or not len(self._pipeline) or first < host or busy < now + host or busy >= due:
                plan = scheduler.stride(1)
                return self._fly(plan, Flight(now, now + host, max(busy, now + host) + first))
            stretch = Stretch(now, host, busy, line, context, longest, -saved, ahead=True)
        steps = stretch.begun(due, quiet)
        stretch.set_steps(steps)
        return self._fly(scheduler.stride(steps), stretch)

    def _saved(self, requests: int) -> int:
        """Device time that decoding requests of a step save one another by sharing blocks.

        What they share changes only when one of them comes or goes.
        """
        shared = self.scheduler.memory.shared_tokens
        return self.costs.shared_ns(shared, requests) if shared else 0

    def _fly(self, plan: StepPlan, flight: Flight) -> Flight:
        self._device_free = flight.end_ns
        self._pipeline.add(plan, flight)
        return flight

    # ---- ends

    def _commit(self, now: int) -> None:
        plan, flight = self._pipeline.oldest
        ended = self._pipeline.commit(DONE, now)
        self.recorder.step(plan, flight.start_ns, flight.end_ns)
        self._unseen += 1
        for request in ended:
            self._ended(request, now)
        if self.after_step is not None:
            self.after_step()

    def _ended(self, request: Request, now: int) -> None:
        self.arrivals.ended(request.index, now)
        self.recorder.request(request)
