"""Extents of segments: the blocks that each replica is believed to have."""

from __future__ import annotations

from pagecast.sim.fleet.query import Piece


class Extent:
    """Blocks `begin` to `end` of one segment on one replica, noted at `time` (nanoseconds)."""

    __slots__ = ("begin", "end", "key", "time")

    def __init__(self, key: bytes, begin: int, end: int, time: int) -> None:
        self.key = key
        self.begin = begin
        self.end = end
        self.time = time


class Extents:
    """Disjoint extents by segment and replica, each list in order of position."""

    def __init__(self) -> None:
        self.of: dict[bytes, dict[int, list[Extent]]] = {}

    def at(self, key: bytes, replica: int) -> list[Extent]:
        """The extents of a segment on a replica, made where there were none."""
        holders = self.of.get(key)
        if holders is None:
            holders = self.of[key] = {}
        extents = holders.get(replica)
        if extents is None:
            extents = holders[replica] = []
        return extents

    def discard(self, extent: Extent, replica: int) -> None:
        """Removes an extent that has become empty."""
        holders = self.of[extent.key]
        extents = holders[replica]
        extents.remove(extent)
        if not extents:
            del holders[replica]
            if not holders:
                del self.of[extent.key]

    def forget(self, replica: int) -> None:
        """Removes all that is believed of a replica. Linear in all segments."""
        for key in [key for key, holders in self.of.items() if replica in holders]:
            holders = self.of[key]
            del holders[replica]
            if not holders:
                del self.of[key]

    def first_holder(self, path: list[Piece], blocks: int, replicas: list[int]) -> int:
        """Which of these replicas, that have a prompt's first `blocks` blocks, got the last of their segments
        first."""
        for key, _, end in path:
            if end >= blocks:
                return next(replica for replica in self.of[key] if replica in replicas)
        raise ValueError(f"the prompt has fewer than {blocks} blocks")

    def overlaps(self, path: list[Piece], since: int) -> dict[int, int]:
        """How many blocks, from the prompt's start, each replica has: those with none are left out.

        Extents noted before `since` do not count.
        """
        matched: dict[int, int] = {}
        whole: list[int] | None = None  # replicas that have all so far
        for key, begin, end in path:
            holders = self.of.get(key)
            if not holders:
                break
            going = []
            for replica in holders if whole is None else whole:
                extents = holders.get(replica)
                if not extents:
                    continue
                first = extents[0]
                if first.end >= end and first.begin <= begin and first.time >= since:
                    going.append(replica)
                    continue
                reach = begin
                for extent in extents:
                    if extent.begin > reach or extent.time < since:
                        break
                    if extent.end > reach:
                        reach = extent.end
                if reach >= end:
                    going.append(replica)
                elif reach > begin:
                    matched[replica] = reach
            matched.update(dict.fromkeys(going, end))
            whole = going
            if not whole:
                break
        return matched
