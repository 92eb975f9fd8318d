"""Layer groups: block tables and prefix hits of layers that keep the same tokens.

A hybrid model has several groups: layers with full attention, with a sliding window, with chunked local
attention, with a recurrent state. Blocks that no layer of a group reads any more are null in its tables.

Source: vllm/v1/core/single_type_kv_cache_manager.py (0.24).
"""

from __future__ import annotations

from bisect import bisect_right

from pagecast.sim.core.events import EventKind
from pagecast.sim.core.group_spec import GroupSpec, KvKind
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.kv_events import KvEventStream
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.numbered_pool import NumberedPool
from pagecast.sim.core.request import Request


class Table:
    """One request's block table in one group.

    `blocks` has the null block in its first `nulls` places. The first `stored` places need no publishing any
    more: they are published, null, or of no use to any hit.
    """

    __slots__ = ("blocks", "nulls", "stored")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.nulls = 0
        self.stored = 0


class LayerGroup:
    """One group's tables. `index` is its number in its memory.

    `unit` is the number of tokens per block key, `aligned` that of which every hit is a multiple.
    """

    def __init__(
        self, pool: NumberedPool, spec: GroupSpec, limits: Limits, index: int, unit: int, aligned: int
    ) -> None:
        self.pool = pool
        self.log = pool.log
        self.spec = spec
        self.index = index
        self.tables: dict[Request, Table] = {}
        self.shared_blocks = 0
        self.most_blocks = spec.most_blocks(limits.max_num_batched_tokens, limits.max_model_len)
        self.keeps_all = spec.kind in (KvKind.FULL, KvKind.LATENT)
        self.mark = bytes([index])
        self._units = max(spec.block_size // unit, 1)
        self._size = spec.block_size
        self._reachable = _reachable(spec, aligned)
        self._segment_blocks = max(aligned // spec.block_size, 1)
        self._dropping = 0

    # ---- how many blocks

    def missing(self, request: Request, tokens: int) -> int:
        """Blocks to be taken so that the first `tokens` tokens have a place."""
        table = self.tables.get(request)
        held = 0 if table is None else len(table.blocks)
        return max(self.spec.blocks_of(tokens) - held, 0)

    def still_needed(self, request: Request, tokens: int) -> int:
        """Blocks that a request still takes until its first `tokens` tokens are computed, beside its own."""
        table = self.tables.get(request)
        held = 0 if table is None else len(table.blocks)
        return max(min(self.spec.blocks_of(tokens), self.most_blocks) - held, 0)

    def needed(self, hit: list[int], hit_tokens: int, tokens: int, *, capped: bool) -> int:
        """Free blocks that a waiting request takes for its first `tokens` tokens, beside those of a hit.

        Blocks of the hit that nobody holds count: claiming them takes them from the free ones. `capped`: no
        more than a request ever holds.
        """
        required = self.spec.blocks_of(tokens)
        if capped and self.most_blocks < required:
            required = self.most_blocks
        skipped = self.spec.skipped_tokens(hit_tokens) // self.spec.block_size
        free = self.pool.free
        idle = sum([block in free for block in hit[skipped:]])
        return max(required - max(skipped, len(hit)), 0) + idle

    # ---- claiming, growing, giving back

    def claim(self, request: Request, hit: list[int], hit_tokens: int) -> None:
        """Gives a request, which holds nothing, the prefix that was found for it.

        `hit_tokens` may be more than was found: what a load is to add.
        """
        table = self.tables[request] = Table()
        skipped = self.spec.skipped_tokens(hit_tokens) // self.spec.block_size
        while skipped < len(hit) and hit[skipped] == self.pool.null:
            skipped += 1  # a chunk that ends within a block
        cached_blocks = hit[skipped:]
        self.shared_blocks += self.pool.hold(cached_blocks)
        table.blocks = [self.pool.null] * skipped + cached_blocks
        table.nulls = skipped
        table.stored = len(table.blocks)
        if cached_blocks:
            self.log.add(EventKind.REUSED, request.id, cached_blocks, group=self.index)

    def grow(self, request: Request, tokens: int) -> None:
        """Takes the missing blocks for the first `tokens` tokens; the caller checked that they are free."""
        table = self.tables.get(request)
        if table is None:
            table = self.tables[request] = Table()
        missing = self.spec.blocks_of(tokens) - len(table.blocks)
        if missing > 0:
            blocks = self.pool.take(missing)
            table.blocks += blocks
            if self.log.events is not None:
                self.log.add(EventKind.ALLOCATED, request.id, blocks, group=self.index)

    def leave(self, request: Request, skipped: int) -> None:
        """Gives back the first `skipped` blocks, which no layer reads any more, the last first."""
        table = self.tables[request]
        if skipped <= table.nulls:
            return
        blocks = table.blocks
        last = min(skipped, len(blocks))
        unread = blocks[table.nulls : last][::-1]
        blocks[table.nulls : last] = [self.pool.null] * len(unread)
        table.nulls = last
        if self.log.events is not None:
            self.log.add(EventKind.LEFT, request.id, unread, group=self.index)
        self._drop(request, unread)

    def release(self, request: Request) -> None:
        """Gives back every block, the last first."""
        table = self.tables.pop(request, None)
        if table is not None:
            self._drop(request, table.blocks[table.nulls :][::-1])

    def detach(self, request: Request) -> list[int]:
        """Takes a request's blocks from it without giving them back; returns them in order."""
        table = self.tables.pop(request, None)
        return [] if table is None else table.blocks[table.nulls :]

    def _drop(self, request: Request, blocks: list[int]) -> None:
        freed = self.pool.drop(blocks)
        self.shared_blocks -= len(blocks) - len(freed)
        if freed and self.log.events is not None:
            self.log.add(EventKind.FREED, request.id, freed, group=self.index)

    # ---- publishing

    def drop_last(self) -> None:
        """From now on every hit leaves out its last block (EAGLE), so a hit asks for one block more."""
        self._dropping = 1
        self._reachable += self.spec.kind is KvKind.WINDOW

    def publish(self, request: Request, tokens: int, computed: int) -> None:
        """Makes the full blocks of the first `tokens` tokens findable, those that a hit can ever ask for.

        `tokens` are whole aligned pieces of the `computed` ones. Where hits leave out their last block, the
        block behind the last piece counts too.
        """
        if self._dropping and tokens:
            tokens = min(computed, tokens + self._size)
        table = self.tables.get(request)
        if table is None:
            return
        full = min(tokens // self._size, len(table.blocks))
        first = table.stored
        if full <= first:
            return
        table.stored = full
        keys = request.keys
        if self.log.kv is not None:
            self._tell(self.log.kv, request, table, first, full)
        place = max(first, table.nulls)
        while place < full:
            number = (place + 1) * self._units - 1
            segment = segment_of(keys, number)
            key = keys.digests[segment] + self.mark
            end = min(keys.ends[segment] // self._units, full)
            if self._reachable >= self._segment_blocks:
                self._publish(request, table.blocks[place:end], key, number)
            else:
                self._publish_reachable(request, table, place, end, key)
            place = end

    def _tell(self, kv: KvEventStream, request: Request, table: Table, first: int, full: int) -> None:
        """Tells of the blocks from place `first` to `full` that become findable."""
        places = [place for place in range(max(first, table.nulls), full) if self._is_reachable(place)]
        blocks = [table.blocks[place] for place in places]
        kv.stored(request, first, full, places, blocks, self.index, self.spec)

    def _publish(self, request: Request, blocks: list[int], key: bytes, number: int) -> None:
        self.pool.publish(blocks, key, number, self._units)
        if self.log.events is not None:
            self.log.add(EventKind.STORED, request.id, blocks, group=self.index)

    def _publish_reachable(self, request: Request, table: Table, place: int, end: int, key: bytes) -> None:
        for each in range(place, end):
            if self._is_reachable(each):
                self._publish(request, [table.blocks[each]], key, (each + 1) * self._units - 1)

    def _is_reachable(self, place: int) -> bool:
        """Whether a hit can ever ask for the block at a place."""
        size = self._segment_blocks
        if self._reachable >= size:
            return True
        place -= self._dropping
        return place >= 0 and size - place % size <= self._reachable


def _reachable(spec: GroupSpec, aligned: int) -> int:
    """How many of the last blocks of each aligned piece a hit can ever ask for."""
    if spec.kind is KvKind.WINDOW:
        return -(-(spec.window - 1) // spec.block_size)
    return max(aligned // spec.block_size, 1)


def segment_of(keys: BlockKeys, number: int) -> int:
    """The segment in which a key block lies."""
    return number if keys.explicit else bisect_right(keys.ends, number)


class Lookup:
    """Prefix hits of the groups that keep the same tokens in blocks of one size: all must have a block."""

    def __init__(
        self, pool: NumberedPool, spec: GroupSpec, groups: list[LayerGroup], unit: int, aligned: int
    ):
        self.spec = spec
        self.groups = groups
        self.keeps_all = groups[0].keeps_all
        self._pool = pool
        self._units = spec.block_size // unit
        self._aligned_blocks = aligned // spec.block_size
        self._window_blocks = -(-(spec.window - 1) // spec.block_size) if spec.kind is KvKind.WINDOW else 0

    def find(self, keys: BlockKeys, tokens: int, *, drop: bool = False) -> list[list[int]]:
        """The longest prefix of at most `tokens` tokens: a table for each group, null where none is kept.

        `drop`: without the last block found.
        """
        most = tokens // self.spec.block_size
        if self.keeps_all:
            return self._aligned(self._from_start(keys, 0, most), drop=drop)
        if self.spec.kind is KvKind.WINDOW:
            hits = self._from_end(keys, most, int(drop))
            return self._aligned(hits, drop=True) if drop else hits
        first = tokens // self.spec.window * self.spec.window // self.spec.block_size
        return self._from_start(keys, first, most)

    def _aligned(self, hits: list[list[int]], *, drop: bool) -> list[list[int]]:
        """The hits in whole aligned pieces, perhaps without the last block."""
        length = max(len(hits[0]) - drop, 0)
        length -= length % self._aligned_blocks
        for hit in hits:
            del hit[length:]
        return hits

    def _segments(self, keys: BlockKeys, segment: int) -> list[dict[int, int]] | None:
        """The cached blocks of a segment in each group; None where some group has none."""
        digest = keys.digests[segment]
        index = self._pool.index
        cached: list[dict[int, int]] = []
        for group in self.groups:
            blocks = index.get(digest + group.mark)
            if blocks is None:
                return None
            cached.append(blocks)
        return cached

    def _from_start(self, keys: BlockKeys, first: int, most: int) -> list[list[int]]:
        """Cached blocks from place `first` on, without a gap; null before it."""
        hits = [[self._pool.null] * min(first, most) for _ in self.groups]
        units = self._units
        place = first
        while place < most:
            segment = segment_of(keys, (place + 1) * units - 1)
            cached = self._segments(keys, segment)
            if cached is None:
                break
            end = min(most, keys.ends[segment] // units)
            if len(cached) == 1:
                blocks = cached[0]
                hit = hits[0]
                for number in range((place + 1) * units - 1, end * units, units):
                    block = blocks.get(number)
                    if block is None:
                        break
                    hit.append(block)
                place = len(hit)
                if place < end:
                    break
                continue
            while place < end:
                number = (place + 1) * units - 1
                row = [blocks.get(number, -1) for blocks in cached]
                if min(row) < 0:
                    break
                for hit, block in zip(hits, row, strict=True):
                    hit.append(block)
                place += 1
            if place < end:
                break
        return hits

    def _from_end(self, keys: BlockKeys, most: int, dropped: int) -> list[list[int]]:
        """The last run of cached blocks that fills a window, or else the run at the very start.

        `dropped`: how many of its last blocks will be left out.
        """
        run_blocks = self._window_blocks + dropped
        null = self._pool.null
        hits = [[null] * most for _ in self.groups]
        units = self._units
        aligned = self._aligned_blocks
        count = 0
        place = most - 1
        segment = -1
        cached: list[dict[int, int]] | None = None
        while place >= 0:
            number = (place + 1) * units - 1
            if segment < 0 or (segment and number < keys.ends[segment - 1]):
                segment = segment_of(keys, number)
                cached = self._segments(keys, segment)
            if cached is None:
                count = 0
                place = keys.ends[segment - 1] // units - 1 if segment else -1
                continue
            row = [blocks.get(number, -1) for blocks in cached]
            if min(row) < 0:
                count = 0
            elif count or not (place + 1 - dropped) % aligned:
                for hit, block in zip(hits, row, strict=True):
                    hit[place] = block
                count += 1
                if count >= run_blocks:
                    for hit in hits:
                        del hit[place + count :]
                    return hits
            place -= 1
        for hit in hits:
            del hit[count:]
        return hits
