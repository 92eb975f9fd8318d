"""Offloading to host memory with a disk behind it, as vLLM's TieringOffloadingSpec does it.

Source: vllm/v1/kv_offload/tiering/manager.py (0.24), called by the OffloadingConnector's scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagecast.sim.core.events import EventKind
from pagecast.sim.core.plan import Chunk, Transfer
from pagecast.sim.core.request import Request
from pagecast.sim.core.tier_spec import HostTierSpec
from pagecast.sim.core.tiers.disk import Disk
from pagecast.sim.core.tiers.host_blocks import HostBlocks
from pagecast.sim.core.tiers.offloading import Offloading
from pagecast.sim.core.tiers.progress import OffloadProgress, TransferJob
from pagecast.sim.core.tiers.tiered_blocks import TieredBlocks


class TieredOffloading(Offloading):
    """`Offloading` with a disk. Whoever runs its jobs takes them by `disk.take_submitted` after each plan and
    each end of transfers, and tells `disk.end` of their ends before the next plan. `tiers` is its `host`."""

    def _make_host(self, spec: HostTierSpec) -> HostBlocks:
        self.tiers = TieredBlocks(spec.blocks, spec.policy.eviction_policy, self.rules)
        return self.tiers

    @property
    def disk(self) -> Disk:
        """The disk behind the host tier."""
        return self.tiers.disk

    @property
    def quiet_steps(self) -> int:
        """How many decode steps may be planned ahead: none while anything moves between the tiers."""
        return super().quiet_steps if self.tiers.idle and not self.jobs else 0

    @property
    def settled(self) -> bool:
        """Never: what a refused request finds on the device may shrink, and the disk have what is missing."""
        return False

    def ask(self, request: Request, local: int) -> int | None:
        """Tokens that a waiting request can load beyond its prefix hit; None: ask again later."""
        self.tiers.asking = request
        progress = self._progress.get(request) or self._make_progress(request)
        self.tiers.access = progress.access
        return super().ask(request, local)

    def load(self, request: Request, tokens: int) -> Transfer:
        """Begins to load; counts the tokens whose blocks came from the disk."""
        transfer = super().load(request, tokens)
        brought = self.tiers.take_promoted(self.jobs[transfer.job].names)
        request.last_disk = 0
        if brought:
            names = self._progress[request].names
            promotions = [
                len(brought.intersection(of_group)) * group.size
                for of_group, group in zip(names, self.groups, strict=True)
            ]
            request.last_disk = min(tokens, max(promotions))
        return transfer

    def stores(
        self,
        chunks: Sequence[Chunk],
        decodes: Sequence[Request],
        newcomers: Iterable[Request],
        *,
        preempted: bool,
    ) -> list[Transfer]:
        """The transfers that store blocks after a step; the step's promotions begin before, or after."""
        if not self.rules.polls_stores:
            self._begin_promotions()
        transfers = super().stores(chunks, decodes, newcomers, preempted=preempted)
        if self.rules.polls_stores:
            self._begin_promotions()
            self._tell_changes()
        self._log_ended()
        return transfers

    def _begin_promotions(self) -> None:
        for job in self.tiers.end_schedule():
            self._log_job(EventKind.PROMOTING, job.request, job.number)

    def ended(self, request: Request, computed: int | None = None) -> bool:
        """A request has ended (see `Offloading.ended`)."""
        gives_back = super().ended(request, computed)
        if not self.rules.forgets_after_stores:
            if request not in self._progress:
                self.disk.lookups.forget(request)
        elif not self.rules.forgets_with_plan:
            self._forget(request)
        return gives_back

    def _end(self, request: Request, progress: OffloadProgress) -> None:
        super()._end(request, progress)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Forgets what a request asked that has ended, unless it has stores under way."""
        progress = self._progress.get(request)
        if progress is None or not any(self.jobs[number].is_store for number in progress.jobs):
            self.disk.lookups.forget(request)

    def _finish(self, job: TransferJob, *, failed: bool) -> None:
        super()._finish(job, failed=failed)
        if job.is_store and not failed:
            cascade = self.tiers.cascade(job.request, job.names)
            self._log_job(EventKind.CASCADING, job.request, cascade.number)
        if job.request not in self._progress:
            self.disk.lookups.forget(job.request)
        elif self.rules.forgets_after_stores and self._progress[job.request].ended:
            self._forget(job.request)

    def _log_job(self, kind: EventKind, request: Request, number: int) -> None:
        if self._log.events is not None:
            self._log.add(kind, request.id, detail=f"disk job={number}")

    def _log_ended(self) -> None:
        """Notes the ends of jobs that were taken note of in a step."""
        for job in self.tiers.ended_jobs:
            kind = EventKind.PROMOTED if job.is_promotion else EventKind.CASCADED
            self._log_job(kind, job.request, job.number)
        self.tiers.ended_jobs.clear()
