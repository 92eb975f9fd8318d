"""A replica of replays that is fed live: arrivals, requests and speculation as they happen."""

from __future__ import annotations

import numpy as np
import pandas as pd
from pagecast.planner_app.server.history import History
from pagecast.sim.core.plan import DONE, Outcome, StepPlan
from pagecast.sim.core.request import Request
from pagecast.sim.replay.clients import NEVER_NS, Arrivals
from pagecast.sim.replay.disk_transfers import DiskTransfers
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replay.replica import Replica
from pagecast.sim.replay.transfers import Ended
from pagecast.sim.runs.transfers import DISK, RecordedTransfer
from pagecast.sim.speculation.speculation import Speculation
from pagecast.traces.schema import REQUIRED, Trace

_NOBODY = Trace("live", pd.DataFrame({name: np.zeros(0, np.int64) for name in REQUIRED}))


class LiveArrivals(Arrivals):
    """Arrivals and departures that become known as they happen, instead of a trace's."""

    def __init__(self, history: History) -> None:
        super().__init__(_NOBODY)
        self._history = history
        self._waiting: set[int] = set()  # rows that have arrived, and which nobody has taken yet
        self._departures: dict[int, int] = {}  # of these, rows whose client has left, and when

    @property
    def coming(self) -> int:
        """Requests that have arrived, and which the replica has not taken in yet."""
        return len(self._waiting)

    def arrive(self, row: int, now: int) -> None:
        """A request arrives."""
        self._waiting.add(row)
        self._add_later(row, now)
        self._look_ahead()

    def leave(self, row: int, now: int) -> None:
        """A client has left before the end."""
        if row in self._waiting:
            self._departures[row] = now
        else:
            self._add_cancel(row, now)
        self._look_ahead()

    def take(self, now: int) -> tuple[int, int | None] | None:
        """See `Arrivals`."""
        due = super().take(now)
        if due is not None:
            self._history.note_outside(now, due[0], cancelled=due[1] is None)
        return due

    def take_arrival(self, now: int) -> tuple[int, int] | None:
        """See `Arrivals`."""
        arrival = super().take_arrival(now)
        if arrival is not None:
            row = arrival[0]
            self._waiting.discard(row)
            departure_ns = self._departures.pop(row, None)
            if departure_ns is not None:
                self._add_cancel(row, departure_ns)
                self._look_ahead()
        return arrival

    def ended(self, row: int, now: int) -> None:
        """See `Arrivals`."""


class LiveFeed(Feed):
    """Requests of the core, made from what clients ask for."""

    def __init__(self, block_size: int) -> None:
        super().__init__(_NOBODY, block_size)
        self._pending: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """Keeps a request until the replica takes it in."""
        self._pending[request.index] = request

    def request(self, row: int, arrival_ns: int) -> Request:
        """The request of a row, once."""
        return self._pending.pop(row)


class LiveReplica(Replica):
    """A replica that says when it plans, in steps of their own: clients want every token as it comes.

    Its process ends when there is nothing to do; `go_on` starts it again.
    """

    history: History
    keeps_idle = False  # whether every plan that computes nothing is noted, as a host tier asks for

    def go_on(self) -> None:
        """Starts the process again where it has ended and somebody has arrived."""
        if not self.process.is_alive and self.arrivals.next_ns < NEVER_NS:
            self.process = self.env.process(self._run())

    def _plan(self, now: int) -> int | None:
        before = self.scheduler.preemptions
        steps = len(self._pipeline)
        launched = super()._plan(now)
        if len(self._pipeline) == steps and (self.keeps_idle or self.scheduler.preemptions != before):
            self.history.note_idle(now)
        return launched

    def _tell(self, ends: Ended, now: int) -> None:
        super()._tell(ends, now)
        records = [RecordedTransfer(job, now, lost=job in ends.lost) for job in ends.jobs]
        self.history.note_transferred(records, now)

    def _give_up(self, request: Request, now: int) -> None:
        self.history.note_outside(now, request.index, cancelled=True)
        super()._give_up(request, now)

    def _advance_disk(self, disk: DiskTransfers, now: int) -> None:
        ended = disk.advance(now)
        if ended:
            records = [RecordedTransfer(job, now, DISK, lost=lost) for job, lost in ended]
            self.history.note_transferred(records, now)

    def _launch(self, plan: StepPlan, now: int, warm: int) -> int:
        self.history.note_planned(now)
        for carrier in (self.transfers, self.disk):
            if carrier is not None:  # a server has no makespan, and never ends
                carrier.load.forget_times()
                carrier.store.forget_times()
        return super()._launch(plan, now, warm)


class LiveSpeculation(Speculation):
    """Speculation that keeps the outcome of the latest step, and no times."""

    latest: Outcome = DONE

    def outcome(self, plan: StepPlan, now: int = 0) -> Outcome:
        """See `Speculation`."""
        self.latest = super().outcome(plan, now)
        del self._gaps[:]
        return self.latest
