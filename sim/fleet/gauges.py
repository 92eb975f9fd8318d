"""An engine's gauges as a router's scrapes find them: running, waiting, and the KV cache's use."""

from __future__ import annotations

from typing import NamedTuple

from pagecast.sim.replay.clients import NEVER_NS
from pagecast.sim.replay.replica import Replica


class Gauges(NamedTuple):
    """An engine's metrics: requests running and waiting, and the share of KV blocks in use."""

    running: int
    waiting: int
    kv_usage: float
    time: int = 0


NOTHING = Gauges(0, 0, 0.0)


class Scrape:
    """Reads a replica's gauges every `period_ns`, without stopping it.

    Gauges change only where the replica does something. So they are noted just before its first change after
    each scrape, or when they are asked for, whichever comes first.
    """

    def __init__(self, replica: Replica, period_ns: int, start_ns: int = 0) -> None:
        self.replica = replica
        self.period_ns = period_ns
        self._latest = NOTHING
        self._start_ns = start_ns
        replica.look = self._note
        replica.look_ns = start_ns + period_ns

    def read(self, now: int) -> Gauges:
        """The gauges of the latest scrape by `now`; of none yet, an idle engine's."""
        if now >= self.replica.look_ns:
            self._note(now)
        return self._latest

    def stop(self) -> None:
        """Leaves the replica alone."""
        self.replica.look_ns = NEVER_NS

    def _note(self, now: int) -> None:
        latest = now - (now - self._start_ns) % self.period_ns
        self.replica.look_ns = latest + self.period_ns
        self._latest = gauges(self.replica, latest)


def gauges(replica: Replica, now: int) -> Gauges:
    """A replica's gauges at `now`, which is not before its latest change."""
    scheduler = replica.scheduler
    used = replica.used_blocks(now)
    return Gauges(
        len(scheduler.running.requests), scheduler.queue.size, used / scheduler.memory.num_blocks, now
    )
