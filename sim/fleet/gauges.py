"""An engine's gauges as a router's scrapes find them: running, waiting, and the KV cache's use."""

from __future__ import annotations

from typing import NamedTuple

from pagecast.sim.replica.observer import Observer
from pagecast.sim.replica.replica import Replica


class Gauges(NamedTuple):
    """An engine's metrics: requests running and waiting, and the share of KV blocks in use."""

    running: int
    waiting: int
    kv_usage: float
    time: int = 0


NOTHING = Gauges(0, 0, 0.0)


class Scrape(Observer):
    """Reads a replica's gauges every `period_ns`, without stopping it.

    Gauges change only where the replica does something. So they are noted just before its first change after
    each scrape, or when they are asked for, whichever comes first.
    """

    def __init__(self, replica: Replica, period_ns: int, start_ns: int = 0) -> None:
        self.replica = replica
        self.period_ns = period_ns
        self._latest = NOTHING
        self._start_ns = start_ns
        self._due_ns = start_ns + period_ns
        replica.observe(self)

    def read(self, now: int) -> Gauges:
        """The gauges of the latest scrape by `now`; of none yet, an idle engine's."""
        self.changing(now)
        return self._latest

    def changing(self, now: int) -> None:
        """Notes the gauges where a scrape is due."""
        if now >= self._due_ns:
            self._note(now)

    def _note(self, now: int) -> None:
        latest = now - (now - self._start_ns) % self.period_ns
        self._due_ns = latest + self.period_ns
        self._latest = gauges(self.replica, latest)


def gauges(replica: Replica, now: int) -> Gauges:
    """A replica's gauges at `now`, which is not before its latest change."""
    scheduler = replica.scheduler
    used = replica.used_blocks(now)
    return Gauges(
        len(scheduler.running.requests), scheduler.queue.size, used / scheduler.memory.num_blocks, now
    )
