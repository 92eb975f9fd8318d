"""Layer groups: the block tables of layers that keep the same tokens.

A plain model has one group, a hybrid one several: layers with full attention, with a sliding window, with
chunked local attention, with a recurrent state. Blocks that no layer of a group reads any more are null in
its tables.

Source: vllm/v1/core/single_type_kv_cache_manager.py (0.24).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from pagecast.sim.core.events import EventKind
from pagecast.sim.core.group_spec import Found, GroupSpec, aligned_tokens
from pagecast.sim.core.identity.keys import BlockKeys, segment_of
from pagecast.sim.core.kv_events import KvEventStream
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.extent import Extent
from pagecast.sim.core.memory.extent_pool import ExtentPool
from pagecast.sim.core.memory.hit import TableHit
from pagecast.sim.core.memory.table import Table
from pagecast.sim.core.memory.window_rules import WindowRules
from pagecast.sim.core.request import Request


class HandedState(NamedTuple):
    """A recurrent state of a request that is published: its group, block, and the tokens it stands for."""

    request: Request
    group: int
    block: int
    tokens: int


Part = tuple[bytes, int, int]
"""Rows of one segment that a hit may ask for: its key, the place of the first in the table, and how many."""


PARTIAL = b"partial "  # the key of a block that was given back before it was full begins with this


def mark_of(index: int, width: int) -> bytes:
    """What tells the contents of `width` groups from number `index` on from those of others, behind a key."""
    return bytes([index, width])


class LayerGroup:
    """KV groups of equal `spec` that follow one another, with one table per request for all of them.

    `width` is how many they are, 1 where they do not go together; `index` is the number of the first.
    `scattered`: as in `KindRules`.
    """

    scattered = False

    def __init__(
        self,
        pool: ExtentPool,
        spec: GroupSpec,
        limits: Limits,
        rules: WindowRules,
        index: int,
        width: int = 1,
    ) -> None:
        unit = limits.block_size  # tokens per block key
        aligned = aligned_tokens(limits.groups) if limits.groups else unit  # every hit is a multiple of these
        self.width = width
        self.key_lookahead = 0  # tokens behind a block that its key covers
        self.just_stored: set[tuple[bytes | None, int]] = set()  # states that this step is to compute
        self.handed: list[HandedState] = []  # states published since somebody took them
        self.pool = pool
        self.log = pool.log
        self.spec = spec
        self.index = index
        self.shared_blocks = 0
        self.most_blocks = spec.most_blocks(limits.held_tokens, limits.max_model_len)
        self._caching = limits.caching
        self._hands_over = limits.host is not None
        # Whether only blocks at boundaries can be found (`WindowRules.keeps_boundaries`).
        self._boundaries_only = rules.keeps_boundaries and spec.rules.found is Found.FROM_END
        self.mark = mark_of(index, width)
        self._units = max(spec.block_size // unit, 1)
        self._unit = unit
        self._told = pool.log.events is not None or pool.log.kv is not None
        self.names_partial = (
            rules.names_partial and limits.caching and spec.rules.keeps_all and self._units > 1
        )
        self._size = spec.block_size
        self._aligned = aligned
        self._reachable = spec.rules.reachable(spec, aligned, dropping=False)
        self._aligned_blocks = max(aligned // spec.block_size, 1)  # in a piece of `aligned` tokens
        self._dropping = 0
        self._set_pieces()

    def new_table(self) -> Table:
        """An empty table."""
        table = Table(self.pool.nothing, self.width)
        if not self._caching:
            table.unasked = 0
        return table

    # ---- how many blocks

    def missing(self, request: Request, table: Table | None, tokens: int) -> int:
        """Blocks to be taken so that the first `tokens` tokens have a place."""
        held = 0 if table is None else table.places
        return max(self.spec.blocks_of(tokens) - held, 0) * self.width

    def still_needed(self, request: Request, table: Table | None, start: int, tokens: int) -> int:
        """Blocks that a request, computed up to `start`, still takes for its first `tokens` tokens."""
        held = 0 if table is None else table.places
        return max(min(self.spec.blocks_of(tokens), self.most_blocks) - held, 0) * self.width

    def needed(
        self, request: Request, hit: TableHit | None, hit_tokens: int, tokens: int, *, capped: bool
    ) -> int:
        """Free blocks that a waiting request takes for its first `tokens` tokens, beside those of a hit.

        Blocks of the hit that nobody holds count: claiming them takes them from the free ones. `capped`: no
        more than a request ever holds.
        """
        required = self.spec.blocks_of(tokens)
        if capped and self.most_blocks < required:
            required = self.most_blocks
        if not hit_tokens:
            return required * self.width
        skipped = self.spec.skipped_blocks(hit_tokens)
        if hit is None:
            return max(required - skipped, 0) * self.width
        idle = sum([high - low for extent, low, high in hit.after(skipped) if not extent.holders])
        return (max(required - max(skipped, hit.places), 0) + idle) * self.width

    # ---- claiming, growing, giving back

    def claim(self, request: Request, hit: TableHit | None, hit_tokens: int) -> Table:
        """A table for a request, which holds nothing, with the prefix that was found for it.

        `hit_tokens` may be more than was found: what a load is to add.
        """
        table = self.new_table()
        skipped = self.spec.skipped_blocks(hit_tokens)
        if hit is not None:
            skipped = max(skipped, hit.nulls)  # a chunk may end within a block
            parts = hit.after(skipped)
            table.places = hit.places
            extents = [self._isolate(extent, low, high) for extent, low, high in reversed(parts)]
            extents.reverse()
            self.shared_blocks += self.pool.hold(extents)
            if len(extents) > 1:
                extents = self.pool.join(extents)
            table.add(extents)
            if extents and self.log.events is not None:
                self.log.add(EventKind.REUSED, request.id, table.blocks(), group=self.index)
        table.nulls = skipped
        table.places = table.stored = max(table.places, skipped)
        return table

    def _isolate(self, extent: Extent, low: int, high: int) -> Extent:
        """The rows `low` to `high` of an extent as one of their own. What is before `low` stays in it."""
        if high * extent.width < len(extent.blocks):
            self.pool.split(extent, high)
        return self.pool.split(extent, low) if low else extent

    def grow(self, request: Request, table: Table, blocks: array[int]) -> None:
        """Adds blocks just taken, group by group, to the end of a table."""
        table.add_rows(blocks, len(blocks) // self.width)
        self._tell_taken(request, blocks)

    def _tell_taken(self, request: Request, blocks: array[int]) -> None:
        if blocks and self.log.events is not None:
            self.log.add(EventKind.ALLOCATED, request.id, blocks.tolist(), group=self.index)

    def arrange(self, request: Request, table: Table, blocks: array[int], tokens: int) -> None:
        """Gives a table the blocks of a step that ends at token `tokens`, where it is `scattered`."""
        raise NotImplementedError

    def leave(self, request: Request, table: Table, skipped: int) -> None:
        """Gives back the first `skipped` rows, which no layer reads any more, the last first."""
        last = min(skipped, table.places)
        count = last - table.nulls
        if count <= 0:
            return
        if self.log.events is None and self.pool.drop_in_turn([(request, table, self.index, last)]):
            return
        table.nulls = last
        extents = []
        while count and table.held:
            extent, length = table.held[0]
            if extent.rest is not None and length > extent.length:
                table.cut_to(table.extents())
                length = extent.length
            if length <= count:
                del table.held[0]
            else:
                extent = self._cut_front(table, extent, count)
                length = count
            extents.append(extent)
            count -= length
        tail = table.take_tail(count) if count else self.pool.nothing
        if self.log.events is not None:
            unread = [block for extent in extents for block in extent.blocks] + tail.tolist()
            self.log.add(EventKind.LEFT, request.id, unread[::-1], group=self.index)
        self._drop(request, extents, tail)

    def _cut_front(self, table: Table, extent: Extent, count: int) -> Extent:
        """Cuts the first rows off a table's first extent and returns them."""
        if extent.free_rows:
            self.pool.single_out(extent)
        if extent.holders == 1:
            front = self.pool.cut_front(extent, count)
            table.held[0] = (extent, extent.rows)
            return front
        rest = self.pool.split(extent, count)
        table.held[0] = (rest, rest.rows)
        return extent

    def release(self, request: Request, table: Table) -> None:
        """Gives back every block, the last first."""
        self._drop(request, table.extents(), table.tail)

    def _drop(self, request: Request, extents: list[Extent], tail: array[int]) -> None:
        if self.log.events is not None:
            freed_blocks = self.pool.to_be_freed(extents, tail)
            if freed_blocks:
                self.log.add(EventKind.FREED, request.id, freed_blocks, group=self.index)
        self.shared_blocks -= self.pool.drop(extents, tail, self.width)

    def keep_partial(self, table: Table) -> None:
        """Keeps the content of a block that is not full and has a name, before it is given back.

        No hit will ever ask for it by this name, but it counts as content until its block is taken.
        """
        if self.names_partial and table.tail and table.tail[0] in self.pool.partial_names:
            self.pool.publish(table, 1, PARTIAL + str(table.tail[0]).encode(), 0, 1)

    # ---- publishing

    def drop_last(self) -> None:
        """From now on every hit leaves out its last block (EAGLE), so a hit asks for one block more."""
        self._dropping = 1
        self._reachable = self.spec.rules.reachable(self.spec, self._aligned, dropping=True)
        self._set_pieces()

    def _set_pieces(self) -> None:
        """Notes what decides, beside the places, which `parts` there are: where it is equal they are."""
        reachable = (
            -1 - self._reachable if self._boundaries_only else min(self._reachable, self._aligned_blocks)
        )
        self.pieces = self._units, reachable, self._dropping

    def full(self, table: Table, tokens: int, computed: int) -> int:
        """The full blocks, from the start, that can be found once the first `tokens` tokens are published.

        `tokens` are whole aligned pieces of the `computed` ones. Where hits leave out their last block, the
        block behind the last piece counts too.
        """
        if self._dropping and tokens:
            tokens = min(computed, tokens + self._size)
        return min(tokens // self._size, table.places)

    def parts(self, keys: BlockKeys, table: Table, full: int, boundaries: Sequence[int]) -> list[Part]:
        """What is published next of a table, up to its place `full`, segment by segment.

        `boundaries`: tokens after which a hit may end, where only these count (`_boundaries_only`).
        """
        parts: list[Part] = []
        place = max(table.stored, table.nulls)
        for first, end in self._wanted(table, place, full, boundaries):
            self._add_parts(parts, keys, table, first, end)
        return parts

    def _wanted(
        self, table: Table, place: int, full: int, boundaries: Sequence[int]
    ) -> list[tuple[int, int]]:
        """The ranges of places, from one up to another, at which a hit may ask for blocks."""
        if not self._boundaries_only:
            if self._reachable >= self._aligned_blocks:
                return [(place, full)]
            return [(each, each + 1) for each in range(place, full) if self._is_reachable(each, boundaries)]
        wanted = []
        table.unasked = 0
        for end in sorted(self._ends(boundaries)):
            first = max(end - self._reachable, place)
            if table.unasked < end:
                table.unasked = end
            if end > full:
                end = full
            if first < end:
                wanted.append((first, end))
                place = end
        return wanted

    def _add_parts(self, parts: list[Part], keys: BlockKeys, table: Table, place: int, last: int) -> None:
        """Adds the parts from one place to another."""
        units = self._units
        ends = keys.ends
        segment = segment_of(keys, (place + 1) * units - 1)
        while place < last:
            number = (place + 1) * units - 1
            while ends[segment] <= number:
                segment += 1
            end = ends[segment] // units
            if end > last:
                end = last
            if table.origin is not None and table.origin.retention is not None:
                end = table.origin.kept_alike(number + 1 - units, end * units) // units
            parts.append((keys.digests[segment], place, end - place))
            place = end

    def publish(
        self, request: Request, table: Table, full: int, parts: list[Part], boundaries: Sequence[int]
    ) -> None:
        """Makes these parts of a table findable, up to its place `full`.

        Rows that no hit asks for stay in its tail, unless others follow that are findable.
        """
        log = self.log
        if self.names_partial and table.tail:
            self._rename(table.tail[0])
        if log.kv is not None:
            self._tell(log.kv, request, table, full, boundaries)
        table.stored = full
        if not parts:
            return
        pool = self.pool
        units = self._units
        first = table.first_of_tail
        for digest, place, count in parts:
            if place > first:
                unasked = Extent(table.take_tail(place - first), None, 0, 1, self.width)
                table.held.append((unasked, place - first))
            first = place + count
            if log.events is not None:
                stored = table.tail[: count * self.width]
                log.add(EventKind.STORED, request.id, stored.tolist(), group=self.index)
            pool.publish(table, count, digest + self.mark, (place + 1) * units - 1, units)

    def publish_rows(self, keys: BlockKeys, table: Table, full: int) -> None:
        """As `publish`, where every token is kept in blocks of one key each, and nobody hears of them."""
        place = table.stored
        table.stored = full
        ends = keys.ends
        segment = segment_of(keys, place)
        while place < full:
            end = ends[segment]
            if end > full:
                end = full
            if end > place:
                self.pool.publish(table, end - place, keys.digests[segment] + self.mark, place, 1)
                place = end
            segment += 1

    def withdraw(self, table: Table, full: int) -> None:
        """Makes the rows after the first `full` places unfindable, but for those that others hold too."""
        if table.stored > full:
            self.pool.withdraw(table, full)
            table.stored = table.first_of_tail

    def _rename(self, block: int) -> None:
        """Tells that a block loses the name that it had while its own key was not known."""
        if self.pool.partial_names.pop(block, None) is None:
            return
        if self.log.events is not None:
            self.log.add(EventKind.EVICTED, "", [block])
        if self.log.kv is not None:
            self.log.kv.renamed(block)

    def name_partial(self, request: Request, table: Table, tokens: int, computed: int, keys: int) -> None:
        """Tells that the last key of a prompt, its number `keys`, within a larger block names that block too.

        The first `tokens` tokens are published, as far as keys are known, of `computed` ones. A block whose
        own key is not known yet has this name until it is.
        """
        place, within = divmod(keys, self._units)
        if self._dropping and tokens:
            tokens = min(computed, tokens + self._size)
        if not within or keys * self._unit > tokens or not table.nulls <= place < table.places:
            return
        if place == table.first_of_tail:
            block = table.tail[0]
        elif self._told:
            block = table.blocks()[place - table.nulls]
        else:
            return
        names = self.pool.partial_names.setdefault(block, set())
        if keys in names:
            return
        names.add(keys)
        if self.log.events is not None:
            self.log.add(EventKind.STORED, request.id, [block], group=self.index)
        if self.log.kv is not None:
            self.log.kv.named(request, keys, block, self.index, self.spec)

    def _tell(
        self, kv: KvEventStream, request: Request, table: Table, full: int, boundaries: Sequence[int]
    ) -> None:
        """Tells of the blocks of a table that become findable, up to its place `full`."""
        first = table.stored
        base = table.first_of_tail
        low = max(first, table.nulls)
        places = [place for place in range(low, full) if self._is_reachable(place, boundaries)]
        blocks = [table.tail[place - base] for place in places]
        kv.stored(request, first, full, places, blocks, self.index, self.spec)

    def _is_reachable(self, place: int, boundaries: Sequence[int]) -> bool:
        """Whether a hit can ever ask for the block at a place; `boundaries` as for `parts`."""
        size = self._aligned_blocks
        if self._boundaries_only:
            return any(end - self._reachable <= place < end for end in self._ends(boundaries))
        if self._reachable >= size:
            return True
        place -= self._dropping
        return place >= 0 and size - place % size <= self._reachable

    def _ends(self, boundaries: Sequence[int]) -> list[int]:
        """Where hits end that end at boundaries: the place behind the last block of each."""
        size = self._aligned_blocks
        return [tokens // (size * self._size) * size + self._dropping for tokens in boundaries]
