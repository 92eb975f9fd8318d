"""Making of a fleet's members, at its start or later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import simpy
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.limits import Limits
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.fleet.handoff import HandoffFeed
from pagecast.sim.fleet.inbox import OnEnd, OnFail
from pagecast.sim.fleet.index.events import EventIndex
from pagecast.sim.fleet.member import Member
from pagecast.sim.fleet.query import Prompts
from pagecast.sim.fleet.routers.registry import Parts
from pagecast.sim.fleet.view import View
from pagecast.sim.replay.replicates import ChangeCosts
from pagecast.sim.replay.rollout import watch_revision
from pagecast.sim.replay.tenancy import with_accounts
from pagecast.sim.replay.windows import blocks_per_block
from pagecast.sim.scenario import Scenario
from pagecast.sim.speculation.recorded import RecordedDrafts
from pagecast.traces.schema import Trace


class Builder:
    """Makes members of the scenarios of a trace. What equal members share is made once."""

    def __init__(
        self,
        env: simpy.Environment,
        trace: Trace,
        prompts: Prompts,
        parts: Parts,
        costs: StepCosts | None,
        *,
        change: ChangeCosts | None = None,
        keep_steps: bool,
        fast_forward: bool,
    ) -> None:
        self.env = env
        self._trace = trace
        self._outputs: list[int] = trace.integers("output_tokens").tolist()
        self._recorded = RecordedDrafts.of(trace)
        self._prompts = prompts
        self._parts = parts
        self._costs = costs
        self._change = change
        self._keep_steps = keep_steps
        self._fast_forward = fast_forward
        self._made: dict[str, tuple[float, Limits, StepCosts]] = {}
        self._block_size = 0

    def member(
        self, number: int, name: str, scenario: Scenario, role: str, on_end: OnEnd, on_fail: OnFail
    ) -> tuple[Member, View]:
        """A member, and how the router sees it. Errors: BadInput for a block size that can't be."""
        kind = scenario.model_dump_json()
        if kind not in self._made:
            engine_blocks = blocks_per_block(self._trace, scenario)
            costs = self._costs or scenario.step_costs()
            if self._change is not None:
                costs = self._change(costs)
            limits = with_accounts(scenario.limits(engine_blocks), self._trace)
            self._made[kind] = (engine_blocks, limits, costs)
        engine_blocks, limits, costs = self._made[kind]
        if role != "both" and not scenario.enable_prefix_caching:
            raise BadInput("fleet: disaggregation needs prefix caching")
        feed = self._prompts.feed(scenario.block_size)
        member = Member(
            self.env,
            number,
            name,
            scenario,
            kind=kind,
            limits=limits,
            engine_blocks_per_block=engine_blocks,
            costs=costs,
            feed=feed if role == "both" else HandoffFeed(feed),
            role=role,
            on_end=on_end,
            on_fail=on_fail,
            outputs=self._outputs,
            recorded=None if self._recorded is None else self._recorded.again(),
            keep_steps=self._keep_steps,
            fast_forward=self._fast_forward,
        )
        clock = partial(getattr, member.replica, "clock")
        if self._parts.events is not None:
            self._feed_index(self._parts.events, member, clock)
        member.revision = watch_revision(scenario, member.scheduler, feed.new_keys, clock)
        return member, member.view(self._parts.metrics_period_ns)

    def _feed_index(self, events: EventIndex, member: Member, clock: Callable[[], int]) -> None:
        """Tells an index what a member stores and evicts."""
        scenario = member.scenario
        remedy = self._parts.without_events
        if self._block_size not in (0, scenario.block_size):
            raise BadInput(
                f"an index fed by events needs one block size; give all groups the same, or {remedy}"
            )
        self._block_size = scenario.block_size
        try:
            member.scheduler.memory.watch(events.feed(member.number, clock))
        except BadInput as error:
            raise BadInput(
                f"an index fed by events can't follow {scenario.model} under the profile "
                f"{scenario.profile}: {error}; {remedy}"
            ) from None
