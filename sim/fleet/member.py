"""A replica in a fleet: its scheduler, its process, what is sent to it and what it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence

import simpy
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.request import NEVER
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.fleet.gauges import Gauges, Scrape, gauges
from pagecast.sim.fleet.inbox import HandoffInbox, Inbox, OnEnd, OnFail
from pagecast.sim.fleet.view import View
from pagecast.sim.replay.clients import NEVER_NS
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replay.recorder import Recorder
from pagecast.sim.replay.replica import Replica
from pagecast.sim.replay.rollout import RevisionWatch
from pagecast.sim.replay.speculating import speculate
from pagecast.sim.scenario import Scenario
from pagecast.sim.speculation.recorded import RecordedDrafts


class Member:
    """Replica number `number` of a fleet. Replicas of equal scenarios have one `kind`.

    `engine_blocks_per_block`: how many of the engine's blocks one block of a sequence takes. `outputs`: the
    trace's output lengths, for admission that reserves. `recorded`: the draft tokens that it has recorded.
    """

    def __init__(
        self,
        env: simpy.Environment,
        number: int,
        name: str,
        scenario: Scenario,
        *,
        kind: str,
        limits: Limits,
        engine_blocks_per_block: float,
        costs: StepCosts,
        feed: Feed,
        role: str,
        on_end: OnEnd,
        on_fail: OnFail,
        outputs: Sequence[int],
        recorded: RecordedDrafts | None,
        keep_steps: bool,
        fast_forward: bool = True,
    ) -> None:
        self.number = number
        self.name = name
        self.scenario = scenario
        self.kind = kind
        self.role = role
        self.feed = feed
        self.limits = limits
        self.engine_blocks_per_block = engine_blocks_per_block
        self.costs = costs
        self.speculation = speculate(recorded, scenario, costs)
        self.scheduler = Scheduler(limits, scenario.rules(costs, outputs), drafter=self.speculation)
        self.recorder = Recorder(keep_steps=keep_steps)
        self.inbox = (Inbox if role == "both" else HandoffInbox)(on_end, on_fail)
        self.replica = Replica(
            env,
            self.scheduler,
            costs,
            self.inbox,
            feed,
            self.recorder,
            fast_forward=fast_forward,
            speculation=self.speculation,
            links=scenario.host_links(costs),
            swap_ns_per_token=scenario.swap_ns_per_token() if scenario.swaps else 0.0,
            scrub_ns_per_block=scenario.scrub_ns_per_block() if scenario.scrub_private_blocks else 0.0,
        )
        self.started_ns = int(env.now)
        self.ready_ns = self.started_ns
        self.gone_ns: int | None = None
        self.draining = False
        self.revision: RevisionWatch | None = None  # its old blocks, where the model's revision changes
        self._scrape: Scrape | None = None

    def send(self, row: int, now: int, arrival_ns: int | None) -> None:
        """Gives the replica a request, or without an arrival takes one back that its client gave up."""
        self.inbox.put(row, now, arrival_ns)
        self.replica.wake(now)

    def stop(self, now: int) -> list[int]:
        """Ends the replica at once. Returns the rows that it had not served."""
        self.replica.stop()
        self.gone_ns = now
        if self.revision is not None:
            self.revision.lose_all(now)
        rows = [request.index for request in self.scheduler.requests.values()]
        self.scheduler.requests.clear()
        return rows + self.inbox.take_all()

    def gauges(self, now: int) -> Gauges:
        """The engine's gauges at `now`, which is not before its latest change."""
        return gauges(self.replica, now)

    def view(self, metrics_period_ns: int) -> View:
        """The replica in a router's account. Gauges are read every so often, or with 0 as they are."""
        if metrics_period_ns:
            self._scrape = Scrape(self.replica, metrics_period_ns)
        return View(
            self.number,
            self.name,
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            max_num_seqs=self.limits.max_num_seqs,
            costs=self.costs,
            gauges=self._scrape.read if self._scrape else self.gauges,
            first_token_ns=self.first_token_ns,
            changed_ns=self.changed_ns,
        )

    def changed_ns(self) -> int:
        """When the replica changed last."""
        return self.replica.clock

    def first_token_ns(self, row: int) -> int:
        """When a live request got its first token; `NEVER_NS` where it has not."""
        request = self.scheduler.requests.get(str(row))
        if request is None or request.first_token_ns == NEVER:
            return NEVER_NS
        return request.first_token_ns
