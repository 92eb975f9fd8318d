"""A replica in a fleet: its scheduler, its process, what is sent to it and what it leaves behind."""

from __future__ import annotations

from pagecast.sim.core.limits import Limits
from pagecast.sim.core.request import NEVER
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.fleet.gauges import Gauges, Scrape, gauges
from pagecast.sim.fleet.inbox import Inbox
from pagecast.sim.fleet.view import View
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replay.recorder import Recorder
from pagecast.sim.replay.served import Served
from pagecast.sim.replica.arrivals import NEVER_NS
from pagecast.sim.replica.replica import Replica
from pagecast.sim.scenario import Scenario


class Member(Served):
    """Replica number `number` of a fleet."""

    def __init__(
        self,
        number: int,
        name: str,
        role: str,
        inbox: Inbox,
        feed: Feed,
        replica: Replica,
        *,
        keep_steps: bool,
    ) -> None:
        super().__init__(name, replica, Recorder(keep_steps=keep_steps), feed)
        self.number = number
        self.role = role
        self.inbox = inbox
        self.feed = feed
        self.started_ns = int(replica.env.now)
        self.ready_ns = self.started_ns
        self.gone_ns: int | None = None
        self.draining = False
        self._scrape: Scrape | None = None

    @property
    def scenario(self) -> Scenario:
        """The scenario of its kind."""
        return self.spec.scenario

    @property
    def limits(self) -> Limits:
        """The limits of its kind."""
        return self.spec.limits

    @property
    def costs(self) -> StepCosts:
        """The step costs of its kind."""
        return self.spec.costs

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
            limits=self.limits,
            costs=self.costs,
            gauges=self._scrape.read if self._scrape else self.gauges,
            first_token_ns=self.first_token_ns,
            changed_ns=self.changed_ns,
        )

    def changed_ns(self) -> int:
        """When the replica changed last."""
        return self.replica.changed_ns

    def first_token_ns(self, row: int) -> int:
        """When a live request got its first token; `NEVER_NS` where it has not."""
        request = self.scheduler.requests.get(str(row))
        if request is None or request.first_token_ns == NEVER:
            return NEVER_NS
        return request.first_token_ns
