"""A fleet as SimPy processes: clients, a router, and replicas that each go at their own pace.

A replica plans many decode steps at once and learns of a request only when the router sends it: then its
stretch is cut. Requests that go elsewhere leave it alone. What the clients do at some time comes before what
replicas do then, so that a request joins the step planned at its arrival, as in a replay of one replica.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import simpy
from pagecast.sim.fleet.member import Member
from pagecast.sim.fleet.query import Prompts, Query
from pagecast.sim.fleet.routers.router import Router
from pagecast.sim.fleet.view import View
from pagecast.sim.replay.clients import NEVER_NS, Arrivals
from simpy.events import URGENT


def at(env: simpy.Environment, time: int, action: Callable[[], None]) -> None:
    """Calls `action` at `time`, before what replicas do then."""
    event = env.event()
    event.callbacks = [lambda _: action()]
    event._ok = True
    event._value = None
    env.schedule(event, priority=URGENT, delay=time - env.now)


class Fleet:
    """Replicas behind one router.

    `place` has the member that serves each row now; `sent_to` the one it was sent to last, `believed` the
    prompt tokens that the router believed cached there, `arrivals_ns` when each row came.
    """

    def __init__(
        self,
        env: simpy.Environment,
        clients: Arrivals,
        prompts: Prompts,
        router: Router,
        *,
        hop_ns: int = 0,
    ) -> None:
        self.env = env
        self.clients = clients
        self.prompts = prompts
        self.router = router
        self.hop_ns = hop_ns
        self.members: list[Member] = []
        self.views: dict[int, View] = {}
        self.ready: list[View] = []
        rows = len(prompts.input_tokens)
        self.place: dict[int, Member] = {}
        self.sent_to = [-1] * rows
        self.believed = [0] * rows
        self.choices: list[int] = []  # the replica of each routed request, in order
        self._armed: set[int] = set()

    def add(self, member: Member, view: View) -> None:
        """A replica that takes requests from now on."""
        self.members.append(member)
        self.views[member.number] = view
        self.ready.append(view)

    def start(self) -> None:
        """Waits for the first client."""
        self._arm()

    # ---- clients

    def _arm(self) -> None:
        """Has the clients' next act looked at when it is due."""
        due = self.clients.next_ns
        if due == NEVER_NS or due in self._armed:
            return
        self._armed.add(due)
        at(self.env, due, partial(self._clients_act, due))

    def _clients_act(self, due: int) -> None:
        self._armed.discard(due)
        clients = self.clients
        while (entry := clients.take(due)) is not None:
            row, arrival_ns = entry
            if arrival_ns is None:
                self._give_up(row, due)
            else:
                self.route(row, due, arrival_ns)
        self._arm()

    def _give_up(self, row: int, now: int) -> None:
        member = self.place.get(row)
        if member is not None:
            self._deliver(member, row, now, None)

    # ---- routing

    def route(self, row: int, now: int, arrival_ns: int) -> None:
        """Has the router choose a replica, and sends the request there."""
        query = Query(self.prompts, row, now)
        view, cached_tokens = self.router.choose(query, self.ready)
        view.add(row, query.prompt_tokens)
        self.router.sent(query, view)
        number = view.number
        self.believed[row] = cached_tokens
        self.sent_to[row] = number
        self.choices.append(number)
        member = self.place[row] = self.members[number]
        self._deliver(member, row, now, arrival_ns)

    def _deliver(self, member: Member, row: int, now: int, arrival_ns: int | None) -> None:
        if self.hop_ns:
            due = now + self.hop_ns
            at(self.env, due, partial(member.send, row, due, arrival_ns))
        else:
            member.send(row, now, arrival_ns)

    def ended(self, number: int, row: int, now: int) -> None:
        """A request has ended on a replica, finished, cancelled or rejected."""
        view = self.views[number]
        del self.place[row]
        view.remove(row)
        self.router.ended(row, view, now, self.prompts.output_tokens[row])
        self.clients.ended(row, now)
        self._arm()


def run(env: simpy.Environment, every: int, progress: Callable[[], Any] | None) -> None:
    """Runs an environment until nothing is left to happen; calls `progress` every so many events."""
    step = env.step
    try:
        while True:
            for _ in range(every):
                step()
            if progress is not None:
                progress()
    except simpy.core.EmptySchedule:
        if progress is not None:
            progress()
