"""Clock of a replica: when its host and its device are free, step by step.

The host plans and launches a step (`host_ns`), then the device computes it (`device_ns`). A stretch of decode
steps is timed in closed form, and can be cut to the steps begun by some time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pagecast.sim.core.plan import StepPlan
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.core.stretch.stride import Stride
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.decode_line import DecodeLine
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.replica.stretch_launches import StretchLaunches
from pagecast.sim.speculation.costs import SpeculationCosts, shape_of

FlightTimes = tuple[int, int, int]
"""A plan under way: planned at, host free to plan the next step at, done at. In nanoseconds."""


class StepClock:
    """Times of one replica's steps. It moves no time by itself: the caller asks in the order of launches.

    `host_ns`: the host's time for a step of so many requests, with what KV offloading adds to every step.
    `device_free`: when the device has computed all that was launched. `prompt_tokens`: tokens of the last
    step launched, if it had prompts.
    """

    def __init__(self, spec: ReplicaSpec, scheduler: Scheduler) -> None:
        self.costs = spec.costs
        self.host_ns: Callable[[int], int] = spec.costs.host_ns
        if spec.links is not None and spec.links.step_ns:
            self.host_ns = partial(_offloading_host_ns, spec.costs, spec.links.step_ns)
        self.device_free = 0
        self.prompt_tokens = 0
        self._draft_costs = spec.draft_costs
        self._swap_ns_per_token = spec.swap_ns_per_token
        self._scrub_ns_per_block = spec.scrub_ns_per_block
        self._memory = scheduler.memory
        self._depth = scheduler.limits.pipeline_depth
        # Of the newest stretch: device time of its steps, what each takes more than that, when its first step
        # begins, when it was planned, and when it was launched.
        self._line = DecodeLine(1, 0, 0, 0)
        self._gap = 0
        self._base = 0
        self._start = 0
        self._launched = 0

    # ---- single steps

    def step(self, plan: StepPlan, now: int, host: int, warm: int) -> FlightTimes:
        """Launches a step that was planned at `now`, and which the host has ready at `host`.

        `warm`: see `StepCosts.warm_ns`. The step ends no sooner than its last kernel is launched.
        """
        costs = self.costs
        n = plan.decode_n
        prefill = plan.prefill
        saved = self._saved(n)
        if self._draft_costs is not None:
            launched, duration = self._drafts(self._draft_costs, plan, host, warm - saved)
        elif prefill:
            batch = Batch(n, plan.decode_ctx, plan.decode_max, prefill, self.prompt_tokens)
            if saved:
                # Prompts share blocks too, but do not read them together.
                saved = min(saved, costs.shared_ns(plan.decode_ctx, n))
            duration = costs.device_ns(batch) - saved
            launched = host + costs.launch_ns(batch)
            tokens = n
            for chunk in prefill:
                tokens += chunk[0]
            self.prompt_tokens = tokens
        else:
            launched = host
            duration = costs.decode_line(n).ns(plan.decode_ctx, plan.decode_max) + warm - saved
            self.prompt_tokens = 0
        if self._scrub_ns_per_block and (ledger := self._memory.ledger) is not None:
            duration += round(ledger.to_scrub() * self._scrub_ns_per_block)
        if plan.swaps:
            # The step waits for them: its blocks are those that are moved out.
            duration += round(sum([swap.tokens for swap in plan.swaps]) * self._swap_ns_per_token)
        begin = self.device_free
        if begin < host:
            begin = host
        end = begin + duration
        if end < launched:
            end = launched
        self.device_free = end
        return now, launched, end

    def _drafts(self, draft_costs: SpeculationCosts, plan: StepPlan, host: int, more: int) -> tuple[int, int]:
        """Launch and device time of a step of requests that speculate. One without prompts is launched as a
        whole, and takes `more`."""
        shape = shape_of(plan)
        duration = draft_costs.device_ns(shape, self.prompt_tokens)
        if not shape.prompts:
            self.prompt_tokens = 0
            return host, duration + more
        batch = Batch(shape.rows, shape.context, shape.longest, shape.prompts)
        self.prompt_tokens = shape.rows + sum([chunk[0] for chunk in shape.prompts])
        return host + self.costs.launch_ns(batch), duration

    def _saved(self, requests: int) -> int:
        """Device time that decoding requests of a step save one another by sharing blocks.

        What they share changes only when one of them comes or goes: it is the same within a stretch.
        """
        shared = self._memory.shared_tokens()
        return self.costs.shared_ns(shared, requests) if shared else 0

    # ---- stretches

    def stretch_steps(
        self, stride: Stride, quiet: int, due: int, now: int, host: int, launched: int, *, ahead: bool
    ) -> int:
        """Begins a stretch that is planned at `now`: how many steps of `quiet` begin before `due`.

        `host`: the host's time for each. `launched`: when the first is launched. `ahead`: the device still
        computes a plan before it.
        """
        n = stride.count
        context = stride.context
        longest = stride.longest
        self._line = line = self.costs.decode_line(n)
        gap = -self._saved(n)
        self._start = now
        self._launched = launched
        self.prompt_tokens = 0
        if not self._depth:
            self._gap = gap = gap + host
            self._base = base = launched - host
            return line.steps_begun(context, longest, due - base, quiet, gap)
        self._gap = gap
        # Step i + 1 is planned when step i - 1 ends, if the device is the slower of the two.
        self._base = busy = self.device_free
        if quiet > 1 and ahead and busy >= launched and busy < due:
            if line.ns(context, longest) + gap > host:
                return 1 + line.steps_begun(context, longest, due - busy, quiet - 1, gap)
        elif busy < launched:
            self._base = launched
        return 1

    def stretch(self, plan: StepPlan) -> FlightTimes:
        """Launches the newest stretch, or launches it again after it was cut to `plan`.

        The first step begins at `_base`, and each takes `_gap` more than its device time: the host's time
        (at depth 0), less what requests save one another by sharing blocks. At depth 1 the first step is
        planned before `_base`, and each other one when the step before its predecessor ends.
        """
        steps = plan.steps
        context = plan.decode_ctx
        longest = plan.decode_max
        line = self._line
        base = self._base
        gap = self._gap
        self.device_free = end = base + line.ns(context, longest, steps) + gap * steps
        free = self._launched
        if steps > 1 and self._depth:
            free = base + line.ns(context, longest, steps - 1) + gap * (steps - 1)
        return self._start, free, end

    def begun(self, plan: StepPlan, now: int) -> int:
        """How many steps of the newest stretch begin before `now`."""
        within = now - self._base
        line = self._line
        if not self._depth:
            return line.steps_begun(plan.decode_ctx, plan.decode_max, within, plan.steps, self._gap)
        if within > 0 and plan.steps > 1:
            return 1 + line.steps_begun(plan.decode_ctx, plan.decode_max, within, plan.steps - 1, self._gap)
        return 1

    def ended(self, plan: StepPlan, now: int) -> tuple[int, int]:
        """How many steps of the newest stretch ended before `now`, and when the last of them did."""
        line, gap = self._line, self._gap
        context, longest = plan.decode_ctx, plan.decode_max
        steps = line.steps_begun(context, longest, now - self._base, plan.steps, gap) - 1
        return steps, self._base + line.ns(context, longest, steps) + gap * steps

    def launches(self, plan: StepPlan, host: int) -> StretchLaunches:
        """When each step of the newest stretch is launched."""
        times = (self._launched, self._base + host, self._gap)
        return StretchLaunches(plan.step, self._depth, self._line, plan.decode_ctx, plan.decode_max, times)


def _offloading_host_ns(costs: StepCosts, step_ns: int, requests: int) -> int:
    """Host time of a step of so many requests, with what KV offloading takes."""
    return costs.host_ns(requests) + step_ns
