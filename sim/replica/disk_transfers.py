"""Transfers between the host tier of a replica and the disk behind it, in simulated time.

Each direction carries one job after another. A job is submitted when the scheduler makes it, and its end is
told before the scheduler plans next.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

from pagecast.sim.core.tiers.disk import Disk
from pagecast.sim.machine.host_link import DiskLinks
from pagecast.sim.replica.links import Link, Makespan
from pagecast.sim.replica.transfers import Ended


class DiskTransfers:
    """The transfers under way between a host tier and its disk."""

    def __init__(self, links: DiskLinks, disk: Disk, seed: int) -> None:
        self.load = Link(links.load, "disk load", seed)
        self.store = Link(links.store, "disk store", seed)
        self.disk = disk
        self._block_bytes = links.block_bytes
        self._under_way: list[tuple[int, int, bool]] = []  # end, job, whether it fails; a heap

    @property
    def next_ns(self) -> int | None:
        """When the next transfer ends; None where none is under way."""
        return self._under_way[0][0] if self._under_way else None

    def take(self, now: int) -> None:
        """Submits what the scheduler has made."""
        for job in self.disk.take_submitted():
            link = self.load if job.is_promotion else self.store
            end, fails = now, False
            if job.moved or job.is_promotion:
                end, fails = link.submit(now, job.moved * self._block_bytes, job.number)
            heappush(self._under_way, (end, job.number, fails))

    def advance(self, now: int) -> Ended | None:
        """Tells the scheduler what has ended by now. Returns the jobs; None where there are none."""
        under_way = self._under_way
        done: list[int] = []
        lost: list[int] = []
        while under_way and under_way[0][0] <= now:
            _, number, fails = heappop(under_way)
            self.disk.end(number, lost=fails)
            done.append(number)
            if fails:
                lost.append(number)
        return Ended(tuple(done), tuple(lost)) if done else None

    def figures(self, makespan: Makespan) -> dict[str, Any]:
        """Bytes moved, and the share of the makespan that each direction was busy."""
        figures: dict[str, Any] = {}
        for name, link in (("disk_load", self.load), ("disk_store", self.store)):
            figures |= link.figures(name, makespan)
        return figures
