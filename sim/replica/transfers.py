"""Transfers of one replica: what its worker does for KV offloading, in simulated time.

A step's loads are submitted when the step is launched, its stores when the next one is: after the tokens are
out. Stores wait for what the device is computing then. Each direction carries one job after another. What has
ended is reported with the step launched next, as in vLLM, whose worker looks once per step.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from pagecast.sim.core.plan import StepPlan, Transfer
from pagecast.sim.machine.host_link import HostLinks
from pagecast.sim.replica.links import Link, Makespan


class Ended(NamedTuple):
    """Transfers that have ended, in order; `lost` are those of them that failed."""

    jobs: tuple[int, ...]
    lost: tuple[int, ...]


class Transfers:
    """The transfers under way of one replica. `flush_wait_ns`: for how long steps waited for stores.

    `unsubmitted` are the stores of the newest step: they go out with the next one. `under_way` has the end of
    each transfer by the number of its job, and whether it fails.
    """

    def __init__(self, links: HostLinks) -> None:
        self.load = Link(links.load, "load", links.seed)
        self.store = Link(links.store, "store", links.seed)
        self.flush_wait_ns = 0
        self._block_bytes = links.block_bytes
        self._submit_ns = links.submit_ns
        self.unsubmitted: tuple[Transfer, ...] = ()
        self.under_way: dict[int, tuple[int, bool]] = {}
        self._loads: deque[int] = deque()
        self._stores: deque[int] = deque()

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way or waits to be submitted."""
        return bool(self.under_way or self.unsubmitted)

    @property
    def next_ns(self) -> int | None:
        """When the next transfer ends; None where none is under way."""
        under_way = self.under_way
        if not under_way:
            return None
        if not self._loads:
            return under_way[self._stores[0]][0]
        return min([under_way[jobs[0]][0] for jobs in (self._loads, self._stores) if jobs])

    def begin(self, plan: StepPlan | None, now: int, device_free: int) -> int:
        """Submits what a plan brings, at its launch. Returns when the step may begin.

        `device_free`: when the device has computed all steps before it. Without a plan only stores go out.
        """
        for job in self.unsubmitted:
            now += self._submit_ns * len(job.blocks)
            self._submit(self.store, self._stores, job, device_free if device_free > now else now)
        if plan is None:
            self.unsubmitted = ()
            return now
        self.unsubmitted = plan.stores
        for job in plan.loads:
            now += self._submit_ns * len(job.blocks)
            self._submit(self.load, self._loads, job, now)
        if not plan.flushed:
            return now
        start = now
        for number in plan.flushed:
            if number in self.under_way:
                start = max(start, self.under_way[number][0])
        self.flush_wait_ns += start - now
        return start

    def _submit(self, link: Link, jobs: deque[int], job: Transfer, now: int) -> None:
        self.under_way[job.job] = link.submit(now, len(job.blocks) * self._block_bytes, job.job)
        jobs.append(job.job)

    def ended(self, now: int) -> Ended | None:
        """Transfers that have ended and were not reported yet, stores first; None where there are none."""
        under_way = self.under_way
        if not under_way:
            return None
        done: list[int] = []
        lost: list[int] = []
        for jobs in (self._stores, self._loads):
            while jobs and under_way[jobs[0]][0] <= now:
                number = jobs.popleft()
                done.append(number)
                if under_way.pop(number)[1]:
                    lost.append(number)
        return Ended(tuple(done), tuple(lost)) if done else None

    def figures(self, makespan: Makespan) -> dict[str, Any]:
        """Bytes moved, the share of the makespan that each direction was busy, and waits for stores."""
        figures: dict[str, Any] = {}
        for name, link in (("load", self.load), ("store", self.store)):
            figures |= link.figures(name, makespan)
        figures["flush_wait_s"] = self.flush_wait_ns / 1e9
        return figures
