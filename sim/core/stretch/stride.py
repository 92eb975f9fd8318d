"""Stride: plans and applies stretches.

Such a plan is a stretch. In each of its steps the same requests decode one token each, and nobody is
admitted or preempted; requests may end with its last step. Each part of the scheduler says for how many
steps it is quiet: decoding requests until the next of them ends, memory until free blocks run short, the
queue while nobody can be admitted. A stretch is at most the least of these long.

A stretch is open from its plan until it is settled. While it is open its blocks are not taken and its
requests have not moved, so it can still be cut to the steps that have begun. Settling applies all its
steps, begun or not, and every call that changes or decides anything settles an open stretch first. So whoever
wants to read the scheduler, submit or cancel at some instant within a stretch cuts it first.
"""

from __future__ import annotations

from pagecast.sim.core.events import EventLog
from pagecast.sim.core.lifecycle import Lifecycle
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.plan import StepPlan
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request
from pagecast.sim.core.running import Running
from pagecast.sim.core.step import Step


class Stride:
    """Plans stretches of decode steps. `open` is the stretch whose blocks are still to be taken.

    A variant has its own `quiet`, `_blocks_added` and `_apply`: when nothing has to be decided, which blocks
    a stretch takes, and taking them.

    `quiet` sets `count`, `context` and `longest`: the requests of the next decode step, the tokens of
    context of all of them, and of the longest.
    """

    def __init__(self, lifecycle: Lifecycle, memory: Memory, step: Step) -> None:
        self.open: StepPlan | None = None
        self.count = 0
        self.context = 0
        self.longest = 0
        self._lifecycle = lifecycle
        self._memory = memory
        self._queue: Queue = lifecycle.queue
        self._running: Running = lifecycle.running
        self._log: EventLog = lifecycle.log
        self._step = step
        self._order: list[Request] = []  # who begins a block within the open stretch
        self._crossings = 0

    def quiet(self) -> int:
        """How many steps from now on are decode steps in which nothing has to be decided.

        No arrival, cancellation or early stop may come in between: that is for the caller to know, who plans
        fewer steps or cuts the stretch. Requests may end with the last of these steps. 0: the next step is
        not of this kind.
        """
        if self.open is not None:
            self.settle()
        running = self._running
        decoders = running.decoders
        count = decoders.count
        queue = self._queue
        if not count or running.chunked or (queue.size and not queue.is_quiet()):
            return 0
        if running.output_at_end and running.draining:
            return 0  # TensorRT-LLM counts a block for a request in its last step, too
        if running.parked and count < self._lifecycle.limits.max_num_seqs:
            return 0
        tick = running.tick
        self.count = count
        self.context, self.longest = decoders.contexts(tick)
        steps = self._memory.quiet(decoders, tick, count, decoders.quiet(tick))
        offloading = self._lifecycle.offloading
        if offloading is not None:
            quiet = offloading.quiet_steps
            if quiet < steps:
                steps = quiet
        if steps <= 1:
            return steps
        in_flight = running.in_flight
        if running.commit_lag and (running.left_out or not in_flight) and running.knows_ahead():
            return 1  # this step publishes blocks that a later one would not
        if in_flight:
            # The commit of a plan in flight may change something that a later plan could see.
            newest = in_flight[-1]
            if newest.step + newest.steps - 1 in running.draining or (running.at_commit and newest.chunks):
                return 1
        return steps

    def _blocks_added(self, steps: int) -> int:
        """Blocks that a stretch of `steps` steps from now on takes; notes who takes them."""
        running = self._running
        self._order, self._crossings = running.decoders.crossings(running.tick, steps)
        return self._crossings

    def plan(self, steps: int) -> StepPlan:
        """Plans `steps` decode steps, at most as many as `quiet` has just counted.

        The plan is in flight at once; blocks, positions and the step's number change with `settle`.
        """
        running = self._running
        added = self._blocks_added(steps)
        plan = self.open = self._step.seal_stretch(steps, self.count, self.context, self.longest, added)
        if steps == 1:
            # A step that has begun can't be cut.
            self.settle()
        if running.left_out:
            running.left_out = frozenset()
        running.in_flight.append(plan)
        return plan

    def settle(self) -> None:
        """Does what the open stretch planned: its blocks are taken, its requests are that much further."""
        plan = self.open
        if plan is None:
            return
        self.open = None
        running = self._running
        log = self._log
        tick = running.tick + plan.steps
        step = log.step + plan.steps
        self._apply(plan.steps)
        # Set, not counted up: where steps are applied one by one the clocks went along.
        running.tick = tick
        log.step = step
        at_end = running.decoders.pop_ended(tick - 1)
        if at_end:
            self._lifecycle.drain(at_end, step - 1)

    def _apply(self, steps: int) -> None:
        """Takes and publishes the blocks of the open stretch. `settle` sets the clocks afterwards."""
        running = self._running
        if running.decoders.explicit or self._memory.writers.rivals or self._log.events is not None:
            # Each block has a key of its own to publish, or an order among rivals, or a line in the log.
            for _ in range(steps):
                self._step.decode_all()
                running.tick += 1
                self._log.step += 1
            return
        # Else what is filled is found by the positions of its writers. So only blocks have to be taken, and
        # a stretch costs as much as the blocks that it takes, however long it is.
        if self._crossings:
            self._memory.grow_many(self._order, self._crossings)
        if steps == 1 and running.knows_ahead():
            self._step.publish_known()

    def cut(self, plan: StepPlan, steps: int) -> StepPlan:
        """Shortens the open stretch to its first `steps` steps and settles it. Returns the plan as it is now.

        A plan that is not the open stretch is returned as it is: all its steps have begun.
        """
        if plan is not self.open:
            return plan
        if steps < plan.steps:
            used = self._memory.used_blocks + self._blocks_added(steps)
            plan = self.open = plan._replace(steps=steps, used_blocks=used)
            self._running.in_flight[-1] = plan
        self.settle()
        return plan
