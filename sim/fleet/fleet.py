"""A fleet as SimPy processes: clients, a router, and replicas that each go at their own pace.

A replica plans a stretch of many decode steps at once. A request that the router sends it cuts the stretch;
one that goes elsewhere does not. Where clients and replicas act at the same time, the clients come first, so
that a request joins the step planned at its arrival, as in a replay of one replica.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from functools import partial
from operator import attrgetter

import simpy
from pagecast.sim.core.request import State
from pagecast.sim.fleet.choices import Choices
from pagecast.sim.fleet.member import Member
from pagecast.sim.fleet.query import Prompts, Query
from pagecast.sim.fleet.routers.router import Router
from pagecast.sim.fleet.view import View
from pagecast.sim.replay.clients import Arrivals
from pagecast.sim.replay.recorder import Recorder
from pagecast.sim.replica.arrivals import NEVER_NS, NS
from simpy.events import URGENT


def call_at(env: simpy.Environment, time: int, action: Callable[[], None]) -> None:
    """Calls `action` at `time`, before what replicas do then."""
    event = env.event()
    event.callbacks = [lambda _: action()]
    event._ok = True
    event._value = None
    env.schedule(event, priority=URGENT, delay=time - env.now)


class Fleet:
    """Replicas behind one router.

    `place`: the member that serves each row now. `waiting`: rows without a replica, because none is ready or
    theirs was lost, and when each may be sent. `believed_tokens`: the prompt tokens that the router believed
    cached where it sent a row last. `choices`: what the router chose. `sent_again`: how often a request was
    sent whose replica had been lost. `unserved`: the requests that no replica ended. `log`: times, replica
    names and what happened to them. `on_empty(member)` is called when a draining replica has served its last.
    """

    def __init__(
        self,
        env: simpy.Environment,
        clients: Arrivals,
        prompts: Prompts,
        router: Router,
        *,
        hop_ns: int = 0,
        most_retries: int = 2,
        retry_ns: int = NS,
    ) -> None:
        self.env = env
        self.clients = clients
        self.prompts = prompts
        self.router = router
        self.hop_ns = hop_ns
        self.most_retries = most_retries
        self.retry_ns = retry_ns
        self.members: list[Member] = []
        self.views: dict[int, View] = {}
        self.ready: list[View] = []
        self.place: dict[int, Member] = {}
        self.waiting: dict[int, int] = {}
        self.believed_tokens = [0] * len(prompts.input_tokens)
        self.choices = Choices()
        self.sent_again = 0
        self.log: list[tuple[int, str, str]] = []
        self.unserved = Recorder()
        self.on_empty: Callable[[Member], None] = lambda member: None
        self._remaining = len(prompts.input_tokens)
        self._arrival_ns: dict[int, int] = {}
        self._client_times: set[int] = set()
        self._losses: dict[int, int] = {}  # how often each row's replica was lost
        self._given_up: set[int] = set()  # rows whose client left while a replica had them

    @property
    def over(self) -> bool:
        """Whether every request has ended, but for retries that were not needed."""
        return self._remaining == self.clients.skipped

    @property
    def routers(self) -> list[Choices]:
        """What each of the fleet's routers chose."""
        return [self.choices]

    def start(self) -> None:
        """Waits for the first client."""
        self._schedule_clients()

    # ---- replicas come and go

    def add(self, member: Member, view: View, ready_ns: int | None = None) -> None:
        """A replica that takes requests from now on, or from `ready_ns` on."""
        self.members.append(member)
        self.views[member.number] = view
        if ready_ns is None:
            self.ready.append(view)
            self._log_event(member, "ready")
            return
        self._log_event(member, "started")
        member.ready_ns = ready_ns
        call_at(self.env, ready_ns, partial(self._make_ready, member, view))

    def _make_ready(self, member: Member, view: View) -> None:
        if member.gone_ns is not None or member.draining:
            return
        insort(self.ready, view, key=attrgetter("number"))
        self._log_event(member, "ready")
        now = int(self.env.now)
        for row in [row for row in self.waiting if self.waiting[row] <= now]:
            self._resend(row)

    def drain(self, member: Member) -> None:
        """No more requests for a replica; `on_empty` hears when it has served its last."""
        member.draining = True
        self._log_event(member, "draining")
        self._remove_from_ready(member)
        if not self.views[member.number].requests:
            self._finish_drain(member)

    def _finish_drain(self, member: Member) -> None:
        self._log_event(member, "gone")
        self.router.on_leave(self.views[member.number])
        self.on_empty(member)

    def lose(self, member: Member) -> None:
        """A replica is gone at once, with all it had: its requests are sent again when that is noticed.

        But those whose client has left end here: the replica may not have heard of it yet.
        """
        now = int(self.env.now)
        self._log_event(member, "lost")
        self._remove_from_ready(member)
        member.stop(now)
        view = self.views[member.number]
        for row in list(view.prompts):
            view.remove(row)
            del self.place[row]
            if row in self._given_up:
                self._end_unserved(row, now, State.CANCELLED, "")
            else:
                self._retry(row, now)
        self.router.on_leave(view)

    def _remove_from_ready(self, member: Member) -> None:
        self.ready = [view for view in self.ready if view.number != member.number]

    def _log_event(self, member: Member, what: str) -> None:
        self.log.append((int(self.env.now), member.name, what))

    def _retry(self, row: int, now: int) -> None:
        losses = self._losses[row] = self._losses.get(row, 0) + 1
        if losses > self.most_retries:
            self._end_unserved(row, now, State.REJECTED, f"its replica was lost, {self.most_retries} retries")
            return
        self.waiting[row] = now + self.retry_ns
        call_at(self.env, now + self.retry_ns, partial(self._resend, row))

    def _resend(self, row: int) -> None:
        """Sends a request that waits, if its client still does and there is a replica."""
        if row in self.waiting and self.ready:
            del self.waiting[row]
            self.sent_again += row in self._losses
            self.route(row, int(self.env.now), self._arrival_ns[row])

    def reject_waiting(self) -> bool:
        """Rejects what waits for a replica that will never come. Returns whether there was any."""
        rows = list(self.waiting)
        for row in rows:
            del self.waiting[row]
            self._end_unserved(row, int(self.env.now), State.REJECTED, "no replica was left")
        return bool(rows)

    def _end_unserved(self, row: int, now: int, state: State, reason: str) -> None:
        feed = self.prompts.feed(self.members[0].limits.block_size)
        request = feed.request(row, self._arrival_ns[row])
        request.state = state
        request.finished_ns = now
        request.reason = reason
        if state is State.CANCELLED:
            request.output_tokens = 0
        self.unserved.ended(request, now)
        self._remaining -= 1
        self.clients.failed(request)
        self.clients.ended(row, now)
        self._schedule_clients()

    # ---- clients

    def _schedule_clients(self) -> None:
        """Has the clients' next act looked at when it is due."""
        due = self.clients.next_ns
        if due == NEVER_NS or due in self._client_times:
            return
        self._client_times.add(due)
        call_at(self.env, due, partial(self._serve_clients, due))

    def _serve_clients(self, due: int) -> None:
        self._client_times.discard(due)
        clients = self.clients
        while (entry := clients.take(due)) is not None:
            row, arrival_ns = entry
            if arrival_ns is None:
                self._cancel(row, due)
            else:
                self.route(row, due, arrival_ns)
        self._schedule_clients()

    def _cancel(self, row: int, now: int) -> None:
        """A client gives up."""
        member = self.place.get(row)
        if member is not None:
            self._given_up.add(row)
            self._deliver(member, row, now, None)
        elif row in self.waiting:
            del self.waiting[row]
            self._end_unserved(row, now, State.CANCELLED, "")

    # ---- routing

    def route(self, row: int, now: int, arrival_ns: int) -> None:
        """Has the router choose a replica, and sends the request there; it waits where none is ready."""
        self._arrival_ns[row] = arrival_ns
        if not self.ready:
            self.waiting[row] = now
            return
        query = Query(self.prompts, row, now, arrival_ns)
        view, cached_tokens = self.router.choose(query, self.ready)
        view.add(row, query.prompt_tokens)
        self.router.on_dispatch(query, view)
        self.believed_tokens[row] = cached_tokens
        self.choices.add(row, view, self.ready)
        member = self.place[row] = self.members[view.number]
        self._deliver(member, row, now, arrival_ns)

    def _deliver(self, member: Member, row: int, now: int, arrival_ns: int | None) -> None:
        if self.hop_ns:
            due = now + self.hop_ns
            call_at(self.env, due, partial(self._arrive, member, row, due, arrival_ns))
        else:
            member.send(row, now, arrival_ns)

    def _arrive(self, member: Member, row: int, now: int, arrival_ns: int | None) -> None:
        if self.place.get(row) is member:
            member.send(row, now, arrival_ns)

    def on_end(self, number: int, row: int, now: int) -> None:
        """A request has ended on a replica, finished, cancelled or rejected."""
        view = self.views[number]
        del self.place[row]
        view.remove(row)
        self._remaining -= 1
        self.router.on_end(row, view, now, self.prompts.output_tokens[row])
        self.clients.ended(row, now)
        self._schedule_clients()
        member = self.members[number]
        if member.draining and not view.requests:
            call_at(self.env, now, partial(self._finish_drain, member))
