"""Invariant checks of the tiers below the device: every host slot, pin and question accounted for."""

from __future__ import annotations

from collections import Counter

from pagecast.sim.core.invariant import hold
from pagecast.sim.core.tiers.host_blocks import HostBlocks
from pagecast.sim.core.tiers.offloading import Offloading
from pagecast.sim.core.tiers.tiered_blocks import TieredBlocks


def check_tiers(offloading: Offloading) -> None:
    """Each host slot has one content or is free; what is pinned is what jobs under way read or write.

    With a disk, only live requests have questions or promotions. Errors: `InvariantError`.
    """
    host = offloading.host
    _check_slots(host)
    read: Counter[int] = Counter()
    written: list[int] = []
    for job in offloading.jobs.values():
        if job.is_store:
            written += job.names
        else:
            read.update(job.names)
    if isinstance(host, TieredBlocks):
        for disk_job in host.disk.jobs.values():
            if disk_job.is_promotion:
                written += disk_job.names
            else:
                read.update(disk_job.names)
            slots = tuple(host.slots.get(name) for name in disk_job.names)
            hold(slots == disk_job.slots, f"disk job {disk_job.number} moves slots of other blocks")
        for names in host.promoting.values():
            written += names
        waiting = host.disk.lookups.askers() | host.promoting.keys()
        for request in waiting:
            asks = request.alive or offloading.has_transfers(request)
            hold(asks, f"{request!r} has ended and asks the disk")
    hold(len(written) == len(set(written)), "a host block is written twice at once")
    hold(read.keys().isdisjoint(written), "a host block is read while it is written")
    used = dict(read) == host.pins and set(written) == host.writing
    hold(used, "host blocks are pinned that no job moves, or the other way round")
    for request in offloading.loading:
        hold(request.alive or offloading.is_abandoned(request), f"{request!r} has ended and loads")


def _check_slots(host: HostBlocks) -> None:
    free = host.free_slots()
    slots = [*host.slots.values(), *free]
    hold(len(slots) == len(set(slots)), "a host slot is listed twice")
    hold(set(slots) == set(range(host.room)), "a host slot is lost")
    hold(host.pins.keys() | host.writing <= host.slots.keys(), "a host block is pinned that is not there")
