"""One server as a SimPy process: it plans, waits as long as the step takes, and commits.

The host makes a plan and launches it (`host_ns`), then the device computes (`device_ns`). At pipeline depth
0 the host waits for the device; at depth 1 it makes the next plan meanwhile:

    depth 0   host  [plan k]........[plan k+1]........        depth 1   host   [k+1]......[k+2]......
              device        [ k    ]          [ k+1  ]                  device [   k     ][   k+1   ]

Arrivals are handled by the host between steps, one after another, and join the first plan made after
them. Where the scheduler says that nothing will be decided for a while, those steps are one event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import simpy
from pagecast.sim.core.plan import DONE, StepPlan
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.costs.step_costs import Batch, StepCosts
from pagecast.sim.replay.clients import NEVER_NS, Arrivals
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replay.recorder import Recorder


class Replica:
    """Serves what `arrivals` brings, with a scheduler's decisions and a cost model's times.

    `fast_forward=False` makes every step an event; the outcome is the same to the nanosecond.
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
        self._flying: deque[tuple[StepPlan, int]] = deque()  # plans and when the device is done
        self._device_free = 0
        self._after = 0  # tokens of the last step planned, if it had prompt chunks
        self.process = env.process(self._run())

    def _run(self) -> Generator[Any, Any, None]:
        env, s, arrivals = self.env, self.scheduler, self.arrivals
        depth = s.limits.pipeline_depth
        timeout = env.timeout
        flying = self._flying
        clock: int = int(env.now)
        now = clock  # the host's clock: ahead of the environment's by what is planned already
        while True:
            if len(flying) <= depth:
                due = arrivals.next_ns
                if due <= now:
                    now = self._take_in(now)
                    due = arrivals.next_ns
                planned = self._plan(now, due)
                if planned is not None:
                    now = planned
                    continue
                if not flying:
                    if due == NEVER_NS:
                        return
                    now = due
                    continue
            plan, end = flying.popleft()
            if end > now:
                now = end
            yield timeout(now - clock)
            clock = now
            self._commit(plan, now)

    def _take_in(self, now: int) -> int:
        """Handles what has arrived, and who has gone, one after another; each takes the host some time."""
        arrivals, s = self.arrivals, self.scheduler
        while arrivals.next_ns <= now:
            gone = arrivals.due_cancel(now)
            if gone is not None:
                request = s.requests.get(str(gone))
                if request is not None and s.cancel(request.id, now):
                    self._ended(request, now)
                continue
            arrival = arrivals.due(now)
            assert arrival is not None
            row, time = arrival
            request = self.feed.request(row, time)
            now += self.costs.arrival_ns(request.prompt_tokens)
            if not s.submit(request):
                request.finished_ns = now
                self._ended(request, now)
        return now

    def _plan(self, now: int, due: int) -> int | None:
        """Plans at `now`. Returns when the host is free again; None: nothing can be planned."""
        s = self.scheduler
        # What a step right after prompts loses is no other's: it is planned by itself.
        warm = self.costs.warm_ns(self._after) if self._after else 0
        free = s.free_steps() if self.fast_forward and not warm else 0
        if free:
            return self._plan_many(now, due, free)
        plan = s.decide(now) if self.fast_forward and not warm else s.plan(now)
        if plan is None:
            return None
        chunks = len(plan.chunks)
        host = launched = now + self.costs.host_ns(len(plan.decodes) + chunks)
        if chunks:
            prefill = plan.prefill
            batch = Batch(plan.decode_n, plan.decode_ctx, plan.decode_max, prefill, self._after)
            duration = self.costs.device_ns(batch)
            launched += self.costs.launch_ns(batch)
            self._after = plan.decode_n + sum([chunk[0] for chunk in prefill])
            # Prompts share blocks too, but do not read them together.
            n = plan.decode_n
            duration -= min(self._saved(n), self.costs.shared_ns(plan.decode_ctx, n))
        else:
            self._after = 0
            duration = self.costs.decode_line(plan.decode_n).ns(plan.decode_ctx, plan.decode_max)
            duration += warm - self._saved(plan.decode_n)
        self._launch(plan, now, host, duration, launched)
        return launched

    def _plan_many(self, now: int, due: int, free: int) -> int | None:
        """Plans as many steps as begin before the next arrival, of `free` without decisions."""
        s, flying = self.scheduler, self._flying
        decoders = s.decoders
        n = decoders.count
        context, longest = decoders.context(s.tick), decoders.longest(s.tick)
        line = self.costs.decode_line(n)
        host, saved = self.costs.host_ns(n), self._saved(n)
        self._after = 0
        if s.limits.pipeline_depth:
            # Step i + 1 is planned when step i - 1 ends, if the device is the slower of the two.
            busy = self._device_free
            first = line.ns(context, longest) - saved
            steps = 1
            if free > 1 and flying and first >= host and busy >= now + host and busy < due:
                steps += line.steps_begun(context, longest, due - busy, free - 1, -saved)
            plan = s.decode(steps)
            if steps == 1:
                self._launch(plan, now, now + host, first)
                return now + host
            self._commit(flying.popleft()[0], busy)
            last = steps - 1
            before = line.ns(context, longest, last) - saved * last
            self._launch(plan, now, busy, before + line.ns(context + last * n, longest + last) - saved)
            return busy + before
        steps = line.steps_begun(context, longest, due - now, free, host - saved)
        plan = s.decode(steps)
        duration = line.ns(context, longest, steps) + host * (steps - 1) - saved * steps
        self._launch(plan, now, now + host, duration)
        return now + host

    def _saved(self, requests: int) -> int:
        """Device time that decoding requests of a step save one another; what they share changes only when
        one of them comes or goes."""
        cache = self.scheduler.cache
        shared = cache.shared_blocks
        return self.costs.shared_ns(shared * cache.block_size, requests) if shared else 0

    def _launch(self, plan: StepPlan, now: int, ready: int, duration: int, launched: int = 0) -> None:
        """The device begins when it is free and the step's first kernel `ready`, and waits for the last."""
        free = self._device_free
        end = (free if free > ready else ready) + duration
        self._device_free = end = end if end > launched else launched
        self._flying.append((plan, end))
        self.recorder.step(plan, now, end)

    def _commit(self, plan: StepPlan, now: int) -> None:
        for request in self.scheduler.commit(plan, DONE, now):
            self._ended(request, now)
        if self.after_step is not None:
            self.after_step()

    def _ended(self, request: Request, now: int) -> None:
        self.arrivals.ended(request.index, now)
        self.recorder.request(request)
