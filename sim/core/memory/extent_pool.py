"""Pool of blocks for models whose layers keep different tokens.

`BlockPool` counts on it that whoever holds a block holds all before it. Where blocks leave a window that is
not so: here blocks are kept in extents, which are held or free as a whole. The order in which free blocks are
taken, and which of several equal blocks is found, are vLLM's.

Source: vllm/v1/core/block_pool.py (0.24).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import groupby

from pagecast.sim.core.events import EventKind, EventLog
from pagecast.sim.core.memory.extent import Extent


class ExtentPool:
    """`num_blocks` blocks, numbered from 0, for all groups. Block number `num_blocks` is the null block.

    The null block stands in tables for content that is not kept; it is never taken or freed. Free blocks
    without content are taken first (`blanks`, the next one last), then those of free extents in the order of
    `ring`, each from its end. `index` has the findable extents of each segment's key (with its group), in
    order and without overlaps; `spares` have content that is found elsewhere, oldest first.
    """

    def __init__(self, num_blocks: int, log: EventLog) -> None:
        self.num_blocks = num_blocks
        self.null = num_blocks
        self.log = log
        self.free_blocks = num_blocks
        self.evicted_blocks = 0
        self.allocations: list[int] | None = None  # blocks taken, where somebody wants to know
        self.blanks: list[int] = list(range(num_blocks - 1, -1, -1))
        self.ring = Extent([], None, 0, 1)
        self.index: dict[bytes, list[Extent]] = {}
        self.spares: dict[bytes, list[Extent]] = {}

    # ---- taking

    def take(self, n: int) -> list[int]:
        """Takes the next `n` free blocks and evicts what they held; the caller checked that there are."""
        self.free_blocks -= n
        blanks = self.blanks
        blocks: list[int] = []
        if blanks and n:
            blocks = blanks[-n:]
            del blanks[-n:]
            blocks.reverse()
        missing = n - len(blocks)
        if missing:
            blocks += self._evict(missing)
        if self.allocations is not None:
            self.allocations += blocks
        return blocks

    def _evict(self, n: int) -> list[int]:
        """Takes `n` blocks of free extents."""
        evicted: list[int] = []
        self.evicted_blocks += n
        ring = self.ring
        while n:
            extent = ring.after
            blocks = extent.blocks
            count = len(blocks)
            if count > n:
                count = n
                part = blocks[-n:]
                del blocks[-n:]
                kept = len(blocks)
            else:
                part = blocks
                kept = 0
                after = ring.after = extent.after
                after.before = ring
                self._forget(extent)
            n -= count
            if self.spares and not extent.is_spare:
                self._replace(extent, extent.number + kept * extent.units, count)
            part.reverse()
            evicted += part
        if self.log.events is not None:
            self.log.add(EventKind.EVICTED, "", evicted)
            if self.log.kv is not None:
                self.log.kv.removed(evicted)
        return evicted

    def evict(self, n: int) -> None:
        """Evicts what the next `n` free blocks hold; they stay free, ahead of all others."""
        blocks = self.take(n)
        blocks.reverse()
        self.blanks += blocks
        self.free_blocks += n

    # ---- holding

    def hold(self, extents: list[Extent]) -> int:
        """Adds a holder to each of these extents. Returns how many blocks were held already."""
        shared = 0
        for extent in extents:
            if extent.holders:
                shared += len(extent.blocks)
            else:
                self._unlink(extent)
                self.free_blocks -= len(extent.blocks)
            extent.holders += 1
        return shared

    def drop(self, extents: list[Extent], tail: list[int]) -> int:
        """Takes a holder from extents, and gives the blocks of `tail` back, which follow them.

        Returns how many blocks are now free. The last is freed first; blocks without content go ahead of all
        others, the first of them foremost.
        """
        freed = len(tail)
        blanks = tail
        ring = self.ring
        for extent in reversed(extents):
            extent.holders -= 1
            if extent.holders:
                continue
            freed += len(extent.blocks)
            if extent.key is None:
                blanks = extent.blocks + blanks
                continue
            extent.rest = None
            last = ring.before
            extent.before = last
            extent.after = ring
            last.after = extent
            ring.before = extent
        self.blanks += blanks
        self.free_blocks += freed
        return freed

    @staticmethod
    def to_be_freed(extents: list[Extent], tail: list[int]) -> list[int]:
        """The blocks that `drop` would free, in the order in which they would be taken."""
        last = [extent for extent in reversed(extents) if extent.holders == 1]
        blanks = [block for extent in last if extent.key is None for block in reversed(extent.blocks)]
        cached = [block for extent in last if extent.key is not None for block in reversed(extent.blocks)]
        return [*reversed(tail), *blanks, *cached]

    def drop_first(self, extent: Extent, length: int) -> bool:
        """Frees the first block of an extent, of which a table holds `length` blocks, where that is simple.

        It is where it has content, other blocks follow, and nobody else holds it. False: nothing was done.
        """
        key = extent.key
        blocks = extent.blocks
        if extent.holders > 1 or extent.is_spare or key is None or length < 2 or length != len(blocks):
            return False
        front = Extent([blocks.pop(0)], key, extent.number, extent.units)
        front.holders = 0
        extent.number += extent.units
        siblings = self.index[key]
        siblings.insert(siblings.index(extent), front)
        ring = self.ring
        last = ring.before
        front.before = last
        front.after = ring
        last.after = front
        ring.before = front
        self.free_blocks += 1
        return True

    def _unlink(self, extent: Extent) -> None:
        before = extent.before
        after = extent.after
        before.after = after
        after.before = before

    # ---- splitting

    def split(self, extent: Extent, at: int) -> Extent:
        """Cuts an extent in two at block `at` and returns the second part. The first stays what it was."""
        number = extent.number + at * extent.units
        rest = Extent(extent.blocks[at:], extent.key, number, extent.units)
        del extent.blocks[at:]
        rest.holders = extent.holders
        rest.is_spare = extent.is_spare
        rest.rest = extent.rest
        extent.rest = rest
        if not extent.holders:
            before = extent.before
            rest.before = before
            rest.after = extent
            before.after = rest
            extent.before = rest
        if extent.key is not None:
            siblings = self._siblings(extent)
            siblings.insert(siblings.index(extent) + 1, rest)
        return rest

    def cut_front(self, extent: Extent, blocks: int) -> Extent:
        """Cuts the first blocks off an extent that one table holds, and returns them."""
        front = Extent(extent.blocks[:blocks], extent.key, extent.number, extent.units)
        front.is_spare = extent.is_spare
        del extent.blocks[:blocks]
        extent.number += blocks * extent.units
        if extent.key is not None:
            siblings = self._siblings(extent)
            siblings.insert(siblings.index(extent), front)
        return front

    # ---- content

    def publish(
        self, blocks: list[int], key: bytes, number: int, units: int, behind: Extent | None
    ) -> list[Extent]:
        """Makes blocks that one table holds findable, and returns their extents.

        The first ends with the key block `number` of the segment `key`, the others `units` further each.
        Of equal contents the one that was published first is found. `behind`: the extent before them in the
        table, which takes them up where it can; then nothing is returned.
        """
        siblings = self.index.get(key)
        if siblings is None:
            extent = Extent(blocks, key, number, units)
            self.index[key] = [extent]
            return [extent]
        last = siblings[-1]
        if number < last.end:
            return self._publish_among(siblings, blocks, key, number, units)
        if last is behind and last.holders == 1 and number == last.end:
            last.blocks += blocks
            return []
        extent = Extent(blocks, key, number, units)
        siblings.append(extent)
        return [extent]

    def _publish_among(
        self, siblings: list[Extent], blocks: list[int], key: bytes, number: int, units: int
    ) -> list[Extent]:
        """Publishes blocks some of whose contents may be findable already."""
        known = {each for extent in siblings for each in range(extent.number, extent.end, units)}
        extents = []
        numbered = [(number + i * units, block) for i, block in enumerate(blocks)]
        for is_spare, group in groupby(numbered, key=lambda pair: pair[0] in known):
            part = list(group)
            extent = Extent([block for _, block in part], key, part[0][0], units)
            extent.is_spare = is_spare
            extents.append(extent)
            if is_spare:
                self.spares.setdefault(key, []).append(extent)
            else:
                insort(siblings, extent, key=_number)
        return extents

    def _siblings(self, extent: Extent) -> list[Extent]:
        assert extent.key is not None
        return self.spares[extent.key] if extent.is_spare else self.index[extent.key]

    def _forget(self, extent: Extent) -> None:
        """Makes an extent unfindable."""
        key = extent.key
        assert key is not None
        by_key = self.spares if extent.is_spare else self.index
        siblings = by_key[key]
        if len(siblings) > 1:
            siblings.remove(extent)
        else:
            del by_key[key]

    def _replace(self, extent: Extent, number: int, blocks: int) -> None:
        """Lets spares be found in the place of blocks just taken from an extent, from `number` on."""
        key = extent.key
        assert key is not None
        for each in range(number, number + blocks * extent.units, extent.units):
            for spare in self.spares.get(key, ()):
                if spare.number <= each < spare.end:
                    self._bring_forward(spare, each)
                    break

    def _bring_forward(self, spare: Extent, number: int) -> None:
        """Lets the block of a spare be found that has this number."""
        at = (number - spare.number) // spare.units
        if at:
            spare = self.split(spare, at)
        if len(spare.blocks) > 1:
            self.split(spare, 1)
        self._forget(spare)
        spare.is_spare = False
        assert spare.key is not None
        insort(self.index.setdefault(spare.key, []), spare, key=_number)

    # ---- figures

    def free_extents(self) -> Iterator[Extent]:
        """The free extents with content, first the one that is taken first."""
        extent = self.ring.after
        while extent is not self.ring:
            yield extent
            extent = extent.after

    def findable_extents(self) -> Iterator[Extent]:
        """Every extent with content. Linear in what is cached."""
        for by_key in (self.index, self.spares):
            for siblings in by_key.values():
                yield from siblings

    def findable(self) -> set[int]:
        """Every block whose content can be found. Linear in the pool."""
        return {block for extent in self.findable_extents() for block in extent.blocks}


def _number(extent: Extent) -> int:
    return extent.number
