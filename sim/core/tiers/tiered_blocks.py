"""Host blocks with a disk behind them: what is not in the host may be promoted from there.

Whatever comes to the host from the device goes on to the disk, and is pinned until it is written. A block
that a request looks for and that only the disk has is promoted: it gets a slot at once, is read after the
step, and the request asks again. Where no slot can be had it counts as not there.

Source: vllm/v1/kv_offload/tiering/manager.py (0.24).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pagecast.sim.core.request import Request
from pagecast.sim.core.tiers.disk import Disk, DiskJob
from pagecast.sim.core.tiers.host_blocks import HostBlocks
from pagecast.sim.core.tiers.offload_rules import FIRST_RULES, OffloadRules
from pagecast.sim.core.tiers.request_access import RequestAccess


class TieredBlocks(HostBlocks):
    """`HostBlocks` with a disk. `asking` is the request whose blocks are looked up, `access` what it did.

    `promoting` are the blocks that a request asks to be promoted after the step in the making; `promoted` are
    those that a promotion brought and no request has loaded yet. Ends of jobs are taken
    note of at most once from one `end_schedule` to the next, when somebody looks or stores.
    """

    def __init__(self, room: int, eviction_policy: str = "lru", rules: OffloadRules = FIRST_RULES) -> None:
        super().__init__(room, eviction_policy, rules=rules)
        self._forgets_misses = False  # the disk is asked
        self.disk = Disk()
        self.asking: Request | None = None
        self.access: RequestAccess | None = None
        self.promoted: set[int] = set()
        self.refused_promotions = 0
        self.ended_jobs: list[DiskJob] = []  # whose ends were taken note of, for the log
        self._polled = False
        self.promoting: dict[Request, list[int]] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing moves between host and disk, nor waits to be taken note of."""
        return not (self.disk.busy or self.promoting or self._polled)

    # ---- looking

    def has(self, name: int) -> bool | None:
        """Whether a block can be loaded; None: not yet."""
        if not self._polled:
            self._poll()
        if name in self.slots:
            return None if name in self.writing else True
        assert self.asking is not None
        there = self.disk.lookups.ask(name, self.asking)
        if there and not self._promote(name, self.asking):
            return False
        return None if there else there

    def leading(self, names: Sequence[int]) -> int | None:
        """How many of the first names can be loaded; None: one of them only later."""
        return self._leading(names)

    def _promote(self, name: int, request: Request) -> bool:
        refused = self.refused_stores
        if super().reserve((name,), (), self.access) is None:
            self.refused_stores = refused
            self.refused_promotions += 1
            return False
        self.promoting.setdefault(request, []).append(name)
        return True

    # ---- storing

    def reserve(
        self, names: Sequence[int], sequence: Sequence[int] = (), access: RequestAccess | None = None
    ) -> list[int] | None:
        """Makes room for blocks that come from the device (see `HostBlocks.reserve`)."""
        if not self._polled or self._rules.polls_stores:
            self._poll()
        names_to_store = super().reserve(names, sequence, access)
        if names_to_store and self.promoted:
            self.promoted.difference_update(names_to_store)
        return names_to_store

    def cascade(self, request: Request, names: Sequence[int]) -> DiskJob:
        """Begins to copy blocks to disk that have just come from the device."""
        return self.disk.begin(request, names, self.pin(names), promotion=False)

    def names(self) -> Iterator[Iterable[int]]:
        """Every name that the host or the disk keeps."""
        yield from super().names()
        yield self.disk.names()

    # ---- steps

    def _poll(self) -> None:
        """Takes note of the jobs that have ended."""
        self._polled = True
        for job, lost in self.disk.take_ended():
            self.ended_jobs.append(job)
            if not job.is_promotion:
                self.unpin(job.names)
                continue
            self.written(job.names, failed=lost)
            if lost and self._rules.misses_failed:
                self.disk.lookups.miss(job.names)
            if not lost:
                self.promoted.update(job.names)

    def end_schedule(self) -> list[DiskJob]:
        """Ends a step's looking: promotions begin, questions are answered. Returns the promotions."""
        if not self._polled:
            self._poll()
        self._polled = False
        jobs = []
        for request, names in self.promoting.items():
            slots = [self.slots[name] for name in names]
            jobs.append(self.disk.begin(request, names, slots, promotion=True))
        self.promoting.clear()
        self.disk.end_step()
        return jobs

    def take_promoted(self, names: Sequence[int]) -> set[int]:
        """Those of blocks about to be loaded that came from the disk, and that nobody has loaded since."""
        if not self.promoted:
            return set()
        brought = self.promoted.intersection(names)
        self.promoted -= brought
        return brought
