"""Offloaded groups: the KV groups of a replica in blocks as large as the host tier keeps them."""

from __future__ import annotations

from typing import NamedTuple

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import GroupSpec, KvKind
from pagecast.sim.core.limits import Limits


class OffloadedGroup(NamedTuple):
    """One KV group. `size`: tokens of an offloaded block; `units`: key blocks of it.

    `window`: how many offloaded blocks a window needs; 0 where every token is kept. `segment`: where larger
    blocks of other groups leave only some places at which a hit can end, their distance in offloaded blocks;
    else 0. `drops_last`: hits leave out their last block (EAGLE).
    """

    number: int
    block_size: int
    size: int
    units: int
    window: int
    segment: int
    drops_last: bool

    def is_reachable(self, place: int) -> bool:
        """Whether a load can ever ask for the offloaded block at a place."""
        return not self.segment or place % self.segment >= self.segment - self.window


def offloaded_groups(limits: Limits, factor: int, *, drops_last: bool) -> tuple[OffloadedGroup, ...]:
    """The groups of a replica. Errors: BadInput where a host tier does not serve one of them (as vLLM's)."""
    specs = limits.groups or (GroupSpec(KvKind.FULL, limits.block_size),)
    for spec in specs:
        if spec.kind in (KvKind.CHUNK, KvKind.STATE):
            raise BadInput(f"KV offloading does not serve layers of {spec.kind.value}")
    if factor > 1 and len({spec.block_size for spec in specs}) > 1:
        raise BadInput("offloaded blocks of several device blocks need one block size in all KV groups")
    full = {spec.block_size * factor for spec in specs if spec.kind is not KvKind.WINDOW}
    aligned = full.pop() if len(full) == 1 else 0
    groups = []
    for number, spec in enumerate(specs):
        size = spec.block_size * factor
        window = -(-spec.window // size) if spec.kind is KvKind.WINDOW else 0
        segment = aligned // size if window and aligned > size else 0
        if window >= segment:
            segment = 0
        units = size // limits.block_size
        groups.append(OffloadedGroup(number, spec.block_size, size, units, window, segment, drops_last))
    return tuple(groups)
