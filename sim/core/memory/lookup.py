"""Lookups: the prefix that all groups of layers have. A plain model has one group."""

from __future__ import annotations

from collections.abc import Iterator

from pagecast.sim.core.group_spec import Found, GroupSpec
from pagecast.sim.core.identity.keys import BlockKeys, segment_of
from pagecast.sim.core.memory.extent import Extent
from pagecast.sim.core.memory.extent_pool import ExtentPool
from pagecast.sim.core.memory.hit import Part, TableHit

_Range = tuple[int, int]


class Lookup:
    """Prefix hits of the groups that keep the same tokens in blocks of one size: all must have a block.

    `marks` are those that distinguish their contents, by the number of their `LayerGroup` in the memory.
    `unit` is the number of tokens per block key, `aligned` that of which every hit is a multiple.
    """

    def __init__(
        self, pool: ExtentPool, spec: GroupSpec, marks: dict[int, bytes], unit: int, aligned: int
    ) -> None:
        self.spec = spec
        self.groups = list(marks)
        self._rules = spec.rules
        self.keeps_all = spec.rules.keeps_all
        self._marks = list(marks.values())
        self._pool = pool
        self._units = spec.block_size // unit
        self._aligned_blocks = aligned // spec.block_size
        self._window_blocks = spec.rules.window_blocks(spec)

    def may_find(self, keys: BlockKeys) -> bool:
        """Whether a hit is possible: where every token is kept, not without the first block."""
        if not self.keeps_all:
            return True
        return bool(keys.digests) and keys.digests[0] + self._marks[0] in self._pool.index

    def find(self, keys: BlockKeys, tokens: int, *, drop: bool = False) -> list[TableHit]:
        """The longest prefix of at most `tokens` tokens: a hit for each group, null where none is kept.

        `drop`: without the last block found.
        """
        most = tokens // self.spec.block_size
        if self.keeps_all:
            return self._aligned(self._from_start(keys, 0, most), drop=drop)
        if self._rules.found is Found.FROM_END:
            hits = self._from_end(keys, most, int(drop))
            return self._aligned(hits, drop=True) if drop else hits
        return self._from_start(keys, self._rules.first_read(self.spec, tokens), most)

    def _aligned(self, hits: list[TableHit], *, drop: bool) -> list[TableHit]:
        """The hits in whole aligned pieces, perhaps without the last block."""
        length = max(hits[0].places - drop, 0)
        length -= length % self._aligned_blocks
        for hit in hits:
            hit.cut(length)
        return hits

    def _segments(self, keys: BlockKeys, segment: int) -> list[list[Extent]] | None:
        """The cached extents of a segment in each group; None where some group has none."""
        digest = keys.digests[segment]
        index = self._pool.index
        if len(self._marks) == 1:
            extents = index.get(digest + self._marks[0])
            return None if extents is None else [extents]
        cached: list[list[Extent]] = []
        for mark in self._marks:
            extents = index.get(digest + mark)
            if extents is None:
                return None
            cached.append(extents)
        return cached

    def _from_start(self, keys: BlockKeys, first: int, most: int) -> list[TableHit]:
        """Cached blocks from place `first` on, without a gap; null before it."""
        hits = [TableHit(min(first, most)) for _ in self._marks]
        # Nothing leaves these layers, and no other group can lack a block.
        alone = self.keeps_all and len(hits) == 1
        place = first
        segment = segment_of(keys, (place + 1) * self._units - 1)
        while place < most:
            while keys.ends[segment] // self._units <= place:
                segment += 1
            cached = self._segments(keys, segment)
            if cached is None:
                break
            end = min(most, keys.ends[segment] // self._units)
            if alone:
                hits[0].add(self._parts(cached[0], place, end))
                place = hits[0].places
            else:
                place = self._add_row(hits, cached, place, end)
            if place < end:
                break
        return hits

    def _add_row(self, hits: list[TableHit], cached: list[list[Extent]], place: int, end: int) -> int:
        """Adds the blocks that all groups have from a place on, up to `end`. Returns where they end."""
        row = [self._parts(extents, place, end) for extents in cached]
        given_back = [
            extent
            for parts in row
            for extent, _, _ in parts
            if extent.free_rows and (extent.free is None or extent.rows > 1)
        ]
        if given_back:
            for extent in given_back:
                self._pool.single_out(extent)
            row = [self._parts(extents, place, end) for extents in cached]
        for hit, parts in zip(hits, row, strict=True):
            hit.add(parts)
        reach = min([hit.places for hit in hits])
        for hit in hits:
            hit.cut(reach)
        return reach

    def _parts(self, extents: list[Extent], place: int, end: int) -> list[Part]:
        """Cached blocks of a segment from a place on, without a gap, up to `end`."""
        units = self._units
        parts: list[Part] = []
        for extent in extents:
            begin = (extent.number + 1) // units - 1
            last = begin + len(extent.blocks) // extent.width
            if last <= place:
                continue
            if begin > place or place >= end:
                break
            if last > end:
                last = end
            parts.append((extent, place - begin, last - begin))
            place = last
        return parts

    def _from_end(self, keys: BlockKeys, most: int, dropped: int) -> list[TableHit]:
        """The last run of cached blocks that fills a window, or else the run at the very start.

        `dropped`: how many of its last blocks will be left out.
        """
        wanted = self._window_blocks + dropped
        if len(self._marks) == 1 and not dropped and 0 < wanted <= most:
            hit = self._window(keys, most - wanted, most)
            if hit is not None:
                return [hit]
        count = 0
        first = most  # the run that ends at `last`; what is before it is still to be looked at
        last = most
        reach = most
        while reach > 0:
            segment = segment_of(keys, reach * self._units - 1)
            begin = keys.ends[segment - 1] // self._units if segment else 0
            cached = self._segments(keys, segment)
            for low, high in self._common(cached, begin, reach) if cached is not None else []:
                if not count or high < first:
                    count = 0
                    last = high - (high - dropped) % self._aligned_blocks
                    high = last
                if high <= low:
                    continue
                first = max(low, high - (wanted - count))
                count = last - first
                if count >= wanted:
                    return self._hits(keys, first, last)
            if not count or first > begin:
                count = 0
            reach = begin
        # A run that fills no window is cut to whole aligned pieces before its last block is left out.
        return self._hits(keys, 0, count - count % self._aligned_blocks)

    def _window(self, keys: BlockKeys, first: int, last: int) -> TableHit | None:
        """A hit from place `first` to `last` in the only group, if whole extents have them all."""
        units = self._units
        if last % self._aligned_blocks:
            return None
        parts: list[Part] = []
        place = last
        segment = segment_of(keys, last * units - 1)
        while place > first:
            for extent in reversed(self._pool.index.get(keys.digests[segment] + self._marks[0], ())):
                begin = (extent.number + 1) // units - 1
                if begin >= place:
                    continue
                if extent.free_rows or begin + extent.rows < place:
                    return None
                low = max(begin, first)
                parts.append((extent, low - begin, place - begin))
                place = low
                if place == first:
                    break
            segment -= 1
            if place > first and (segment < 0 or place > keys.ends[segment] // units):
                return None
        hit = TableHit(first)
        hit.places = last
        hit.parts = parts[::-1]
        return hit

    def _common(self, cached: list[list[Extent]], begin: int, end: int) -> Iterator[_Range]:
        """The ranges of places between two that all groups have cached, the last first."""
        ranges = self._ranges(cached[0], begin, end)
        for extents in cached[1:]:
            ranges = _overlaps(ranges, self._ranges(extents, begin, end))
        return ranges

    def _ranges(self, extents: list[Extent], begin: int, end: int) -> Iterator[_Range]:
        """The ranges of places between two that a group has cached, the last first.

        Neighbours are not joined: of the very many that windows leave, the last few are mostly enough.
        """
        units = self._units
        for extent in reversed(extents):
            low = (extent.number + 1) // units - 1
            if low >= end:
                continue
            high = low + len(extent.blocks) // extent.width
            if high <= begin:
                return
            yield max(low, begin), min(high, end)

    def _hits(self, keys: BlockKeys, first: int, last: int) -> list[TableHit]:
        """Hits with the blocks from place `first` to `last`, which are all cached."""
        hits = [TableHit(first) for _ in self._marks]
        while first < last:
            segment = segment_of(keys, (first + 1) * self._units - 1)
            cached = self._segments(keys, segment)
            assert cached is not None
            first = self._add_row(hits, cached, first, min(last, keys.ends[segment] // self._units))
        return hits


def _overlaps(ones: Iterator[_Range], others: Iterator[_Range]) -> Iterator[_Range]:
    """What two series of ranges have in common, the last first as they are."""
    one, other = next(ones, None), next(others, None)
    while one is not None and other is not None:
        low = max(one[0], other[0])
        high = min(one[1], other[1])
        if low < high:
            yield low, high
        if one[0] >= other[0]:
            one = next(ones, None)
        else:
            other = next(others, None)
