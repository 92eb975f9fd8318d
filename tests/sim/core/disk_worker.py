"""Worker of a test's disk: runs the jobs that the core makes, for some steps each, and lets some fail."""

from __future__ import annotations

from collections.abc import Callable

from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.core.tiers.disk import Disk, DiskJob
from pagecast.sim.core.tiers.tiered_offloading import TieredOffloading


class DiskWorker:
    """Runs jobs: `steps` draws how many steps one takes, `fails` whether it fails.

    Jobs of one direction end in the order they were made.
    """

    def __init__(self, disk: Disk, steps: Callable[[], int], fails: Callable[[], bool]) -> None:
        self.disk = disk
        self.jobs: list[tuple[int, DiskJob]] = []  # the step in which each ends
        self.promotions = self.cascades = self.failed_reads = self.failed_stores = 0
        self._steps = steps
        self._fails = fails

    @staticmethod
    def of(scheduler: Scheduler, steps: Callable[[], int], fails: Callable[[], bool]) -> DiskWorker | None:
        """The worker of a scheduler's disk; None where it has none."""
        offloading = scheduler.offloading
        return DiskWorker(offloading.disk, steps, fails) if isinstance(offloading, TieredOffloading) else None

    def take(self, step: int) -> list[DiskJob]:
        """Takes the jobs made since this was called last, after a plan or an end of transfers."""
        submitted = self.disk.take_submitted()
        for job in submitted:
            before = [end for end, other in self.jobs if other.is_promotion == job.is_promotion]
            self.jobs.append((max([step + self._steps(), *before]), job))
            self.promotions += job.is_promotion
            self.cascades += not job.is_promotion
        return submitted

    def advance(self, step: int) -> None:
        """Tells the core what has ended by a step, before its plan is made."""
        done = [job for end, job in self.jobs if end <= step]
        self.jobs = [(end, job) for end, job in self.jobs if end > step]
        for job in done:
            fails = self._fails()
            if job.is_promotion:
                self.failed_reads += fails
            else:
                self.failed_stores += fails
            self.disk.end(job.number, lost=fails)
