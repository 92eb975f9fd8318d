"""Copies of one replica: its transfers with host memory and disk, and the steps that report their ends.

A worker looks for ended transfers once per step, at its launch. In a stretch nobody looks; which of its steps
reports an end follows from their launch times, when the stretch can't be cut any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.plan import StepPlan
from pagecast.sim.core.tiers.offloading import Offloading
from pagecast.sim.core.tiers.tiered_offloading import TieredOffloading
from pagecast.sim.machine.host_link import HostLinks
from pagecast.sim.replica.disk_transfers import DiskTransfers
from pagecast.sim.replica.stretch_launches import StretchLaunches
from pagecast.sim.replica.transfers import Ended, Transfers

_MOST_IDLE_TURNS = 2_000  # in which a request waits for the disk and nothing is computed


class Copies:
    """What carries a replica's blocks to host memory and back, and to a disk behind it.

    Errors: BadInput where `links` does not say how fast they are.
    """

    def __init__(self, links: HostLinks | None, offloading: Offloading) -> None:
        if links is None:
            raise BadInput("a replica with a host tier needs `links`: how fast its blocks are copied")
        self.transfers = Transfers(links)
        self.disk: DiskTransfers | None = None
        if isinstance(offloading, TieredOffloading):
            if links.disk is None:
                raise BadInput(
                    "a replica with a disk behind its host tier needs `links.disk`: how fast it is"
                )
            self.disk = DiskTransfers(links.disk, offloading.disk, links.seed)
        self._ends: deque[tuple[int, Ended]] = deque()  # by the step that reports them
        self._launches: StretchLaunches | None = None  # of the newest stretch, where it may report more
        self._idle_turns = 0

    @property
    def busy(self) -> bool:
        """Whether transfers are under way, or the disk has answered, so that planning again may help."""
        return self.transfers.busy or (self.disk is not None and self.disk.disk.busy)

    # ---- launches

    def launch(self, plan: StepPlan, host: int, device_free: int) -> int:
        """Submits a step's transfers, and notes what it will report. Returns when it may be launched."""
        self._idle_turns = 0
        transfers = self.transfers
        if not (transfers.busy or plan.loads or plan.stores):
            return host
        begin = transfers.begin(plan, host, device_free)
        done = transfers.ended(begin)
        if done is not None:
            self._ends.append((plan.step, done))
        return begin

    def launch_stretch(self, host: int, device_free: int) -> int:
        """Submits what the step before a stretch stored. Returns when the stretch may be launched."""
        if self.transfers.unsubmitted:
            return self.transfers.begin(None, host, device_free)
        return host

    def follow(self, launches: StretchLaunches) -> None:
        """Has the steps of a new stretch report what ends within it."""
        self._launches = launches

    # ---- reports

    @property
    def reports(self) -> bool:
        """Whether a plan in flight may report an end."""
        return bool(self._ends) or self._launches is not None

    def before(self, plan: StepPlan) -> Iterator[Ended]:
        """Takes the ends that are reported before the last step of `plan`.

        `plan` is the one made last, or one before it. If it is a stretch it is not cut any more.
        """
        launches = self._launches
        ends = self._ends
        if launches is not None and launches.step == plan.step:
            self._launches = None
            ends += launches.ends(self.transfers, plan.steps)
        while ends and ends[0][0] < plan.last:
            yield ends.popleft()[1]

    def after(self, plan: StepPlan) -> Iterator[Ended]:
        """Takes the ends that the last step of `plan` reports."""
        ends = self._ends
        while ends and ends[0][0] <= plan.last:
            yield ends.popleft()[1]

    # ---- waiting

    def next_ns(self, retry_ns: int) -> list[int]:
        """When something may happen next. `retry_ns`: when the disk's news are looked at again."""
        times = [self.transfers.next_ns]
        if self.disk is not None:
            times += [self.disk.next_ns, retry_ns if self.disk.disk.has_news else None]
        return [time for time in times if time is not None]

    def wait_for_ever(self, requests: bool) -> bool:
        """Counts one more turn in which nothing is computed. Whether `requests` wait for blocks that can't be
        read, if there are any. Errors: BadInput where they wait for one another."""
        if self.disk is None:
            return False
        self._idle_turns += 1
        if self._idle_turns <= _MOST_IDLE_TURNS or not requests:
            return False
        if not self.disk.disk.lost_promotions:
            raise BadInput(
                "requests wait for blocks from the disk for ever: those of one prompt do not fit in the host "
                "tier together, and give way to one another (as in vLLM 0.24); raise kv_offloading_size"
            )
        self._idle_turns = 0
        return True

    def forget_times(self) -> None:
        """Forgets when links carried something, where nobody will ask for it: memory stays bounded."""
        for carrier in (self.transfers, self.disk):
            if carrier is not None:
                carrier.load.forget_times()
                carrier.store.forget_times()
