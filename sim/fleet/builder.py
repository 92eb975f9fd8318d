"""Builder of a fleet's members, at its start or later."""

from __future__ import annotations

from collections.abc import Callable

import simpy
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.fleet.handoff import HandoffFeed
from pagecast.sim.fleet.inbox import HandoffInbox, Inbox, OnEnd, OnFail
from pagecast.sim.fleet.index.events import EventIndex
from pagecast.sim.fleet.member import Member
from pagecast.sim.fleet.query import Prompts
from pagecast.sim.fleet.routers.registry import Parts
from pagecast.sim.fleet.view import View
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replica.replica import Replica
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.replica.workload import TraceWorkload
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace


class Builder:
    """Makes members of the scenarios of a trace. Members of equal scenarios share a spec."""

    def __init__(
        self,
        env: simpy.Environment,
        trace: Trace,
        prompts: Prompts,
        parts: Parts,
        make_costs: Callable[[Scenario], StepCosts],
        *,
        keep_steps: bool,
        fast_forward: bool,
    ) -> None:
        self.env = env
        self._workload = TraceWorkload(trace)
        self._prompts = prompts
        self._parts = parts
        self._make_costs = make_costs
        self._keep_steps = keep_steps
        self._fast_forward = fast_forward
        self._specs: dict[Scenario, ReplicaSpec] = {}
        self._block_size = 0

    def member(
        self, number: int, name: str, scenario: Scenario, role: str, on_end: OnEnd, on_fail: OnFail
    ) -> tuple[Member, View]:
        """A member, and how the router sees it. Errors: BadInput for a block size that can't be."""
        spec = self._spec(scenario)
        if role != "both" and not scenario.enable_prefix_caching:
            raise BadInput("fleet: disaggregation needs prefix caching")
        feed: Feed = self._prompts.feed(scenario.block_tokens, spec.key_lookahead)
        inbox = (Inbox if role == "both" else HandoffInbox)(on_end, on_fail)
        if role != "both":
            feed = HandoffFeed(feed)
        replica = Replica(self.env, spec, inbox, feed, fast_forward=self._fast_forward)
        member = Member(number, name, role, inbox, feed, replica, keep_steps=self._keep_steps)
        if self._parts.events is not None:
            self._feed_index(self._parts.events, member)
        return member, member.view(self._parts.metrics_period_ns)

    def _spec(self, scenario: Scenario) -> ReplicaSpec:
        if scenario not in self._specs:
            self._specs[scenario] = ReplicaSpec.of(scenario, self._workload, self._make_costs(scenario))
        return self._specs[scenario]

    def _feed_index(self, events: EventIndex, member: Member) -> None:
        """Tells an index what a member stores and evicts."""
        scenario = member.scenario
        remedy = self._parts.without_events
        if self._block_size not in (0, scenario.block_tokens):
            raise BadInput(
                f"an index fed by events needs one block size; give all groups the same, or {remedy}"
            )
        self._block_size = scenario.block_tokens
        try:
            member.scheduler.memory.watch(events.feed(member.number, member.changed_ns))
        except BadInput as error:
            raise BadInput(
                f"an index fed by events can't follow {scenario.model} under the rules of "
                f"{scenario.profile.label}: {error}; {remedy}"
            ) from None
