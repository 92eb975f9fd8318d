"""Pool of all blocks of a replica: what becomes of a block, from its allocation to its eviction.

`take` hands a free block to a table, whose `tail` has it while its tokens are computed. `publish` makes it
findable: it becomes a row of an extent, in `index` under the key of its segment; or of a spare, where a block
of equal content is found already. Requests that find it `hold` its extent, which is split first where they
need a part. `drop` takes holders away. Without any the extent is free, at the end of the ring (or in another
order, `RankedExtentPool`), and is still found: a hit takes it out again. Once there are no blanks, `take`
takes blocks from the head of the ring, the last of a sequence first. Then their content is lost: those who
listen are told (`_lose`), and a spare is found in its place.

The order in which free blocks are taken, and which of several equal blocks is found, are vLLM's.

Terms:

row       the blocks of one position in a table, one of each of `width` equal groups that go together
extent    neighbouring rows that the same tables hold; held or free as a whole, but for its first rows
free      blocks in the order of free ones (`Free`): extents that were freed together, which are taken
          column by column, or single rows in the order in which each left its window (`by_row`)
ring      all of these, first the one that is taken first
blank     a free block without content; blanks are taken before all others
begun     blocks that were at the head of the ring, unlinked from it because a take ended within it. All
          its blocks stand in `begun` in taking order, as that crosses the rows of several extents
unbroken  extents of `begun` none of whose rows lacks a block: their content can still be found and held again
broken    rows of `begun` of which a block was taken. No hit finds them; but vLLM, which looks group by group,
          may find their other blocks. A hit of the same content lets all groups go by themselves (`divide`)
owed      blocks that were taken from the ring in count only. Without numbers it does not matter which blocks
          a table gets, so what they held is evicted when somebody looks (`settle`), many at a time
spare     an extent whose content is found elsewhere; it takes the place of that one when it is evicted
rest      what was split off the end of an extent while a table held both: the table's entry still names the
          first part, with the length of both

Source: vllm/v1/core/block_pool.py (0.24).
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import cycle, groupby, islice

from pagecast.sim.core.events import EventKind, EventLog
from pagecast.sim.core.identity.keys import segment_of
from pagecast.sim.core.memory.blocks import last_first, numbered_blocks, unnumbered_blocks, without
from pagecast.sim.core.memory.extent import NO_ROWS, Extent, Free, Origin
from pagecast.sim.core.memory.table import Leaver, Table
from pagecast.sim.core.memory.tenant_ledger import TenantLedger
from pagecast.sim.core.memory.watcher import Watcher


class ExtentPool:
    """`num_blocks` blocks, numbered from 0, for all groups. Block number `num_blocks` is the null block.

    Not `numbered`: blocks have no numbers, which saves time where nobody asks for them. Then eviction is
    lazy: `take` only counts the blocks (`owed`), and `settle` evicts so many before anybody looks. Extents
    freed meanwhile queue behind them.

    The null block stands in tables for content that is not kept; it is never taken or freed. Free blocks are
    taken in this order:

    1. `blanks`, those without content, the last one first;
    2. `begun`, the rest of wide rows some of whose blocks were taken already;
    3. the blocks of free extents, in the order of `ring`.

    `index` has the findable extents of each segment's key (with its groups), in order and without overlaps;
    `spares` have content that is found elsewhere, oldest first. `brings_rows_together`: where an extent is
    evicted, the rows of a spare that replace it stay one extent.

    Not `blanks_first`: blocks without content take their turn among the others. `ledger`: the tenants'
    accounts. `rooted`: extents form trees (see `extent.py`).
    """

    brings_rows_together = True

    def __init__(
        self,
        num_blocks: int,
        log: EventLog,
        *,
        numbered: bool = True,
        blanks_first: bool = True,
        ledger: TenantLedger | None = None,
        rooted: bool = False,
    ) -> None:
        self.ledger = ledger
        self.rooted = rooted
        self.births = 0  # segments begun so far, where they are counted (`Origin.made`)
        self._watchers: list[Watcher] = []
        self._watched: frozenset[bytes] = frozenset()  # the marks of the groups that it hears of
        self._heard = ledger is not None or log.events is not None  # whether anybody hears of what is lost
        self._blanks_first = blanks_first
        self.num_blocks = num_blocks
        self.null = num_blocks
        self.log = log
        self.free_blocks = num_blocks
        self.evicted_blocks = 0
        self.allocations: list[int] | None = None  # blocks taken, where somebody wants to know
        self.blanks = numbered_blocks(num_blocks) if numbered else unnumbered_blocks(num_blocks)
        self._numbered = numbered
        self.unnumbered = self.blanks[:0] if numbered else self.blanks[:]  # never changed
        # Further names of blocks (see `LayerGroup.name_partial`).
        self.partial_names: dict[int, set[int]] = {}
        self.nothing = self.blanks[:0]  # an empty sequence of blocks, never changed
        self.owed = 0
        lazy = not (numbered or self._heard) and blanks_first
        self._most_owed = num_blocks // 8 if lazy else 0  # bounds what is kept though it was evicted
        self.begun = self.no_blocks()
        self.unbroken: list[Extent] = []  # extents in `begun` whose rows are all there, the next one last
        self.broken: list[Extent] = []  # rows in `begun` that lack a block: no hit finds them
        self.ring = Free([])
        self.index: dict[bytes, list[Extent]] = {}
        self.spares: dict[bytes, list[Extent]] = {}

    def no_blocks(self) -> array[int]:
        """An empty sequence of blocks, to be filled."""
        return self.nothing[:]

    def watch(self, watcher: Watcher, marks: frozenset[bytes]) -> None:
        """Tells a watcher, before the first take, of the content of the groups with these marks."""
        self._watched = marks
        self._watchers.append(watcher)
        self._heard = True
        self._most_owed = 0  # it hears of what is evicted at once

    # ---- taking

    def take(self, n: int) -> array[int]:
        """Takes the next `n` free blocks and evicts what they held; the caller checked that there are."""
        if not n:
            return self.no_blocks()
        self.free_blocks -= n
        blanks = self.blanks
        if blanks:
            blocks = blanks[-n:]
            del blanks[-n:]
            blocks.reverse()
            missing = n - len(blocks)
            if missing:
                blocks += self._take_evicted(missing)
        else:
            blocks = self._take_evicted(n)
        if self.allocations is not None:
            self.allocations += blocks
        return blocks

    def _take_evicted(self, n: int) -> array[int]:
        """Takes `n` blocks of free extents, now or, where blocks have no numbers, later."""
        self.evicted_blocks += n
        if not self._most_owed:
            evicted = self._evict(n)
            if self.partial_names:
                for block in evicted:
                    self.partial_names.pop(block, None)
            return evicted
        self.owed += n
        if self.owed > self._most_owed:
            self.settle()
        return self.unnumbered[:n]

    def settle(self) -> None:
        """Evicts what is owed: from now on only what is in the pool can be found.

        Extents at the head of the ring that are owed as a whole are dropped without a look at their blocks,
        which is what makes it worth to wait. Only the last may be owed in part, and is taken from as if its
        blocks had numbers.
        """
        owed = self.owed
        self.owed = 0
        while owed:
            free = self.ring.after
            blocks = 0 if free.by_row or self.begun else sum([len(extent.blocks) for extent in free.extents])
            if 0 < blocks <= owed:  # nobody needs their blocks
                self._evict_all(free)
                owed -= blocks
            else:
                owed -= len(self._take_next(owed))

    def _evict(self, n: int) -> array[int]:
        """Evicts `n` blocks of free extents."""
        evicted = self.nothing
        while n:
            taken = self._take_next(n)
            n -= len(taken)
            evicted = evicted + taken if evicted else taken
        return evicted

    def _lose(self, extent: Extent, number: int, blocks: array[int]) -> None:
        """Takes note that blocks of an extent of one group were taken, the last first; from `number` on.

        What had no content does not count as evicted.
        """
        if extent.key is None:
            self.evicted_blocks -= len(blocks)
        elif self._heard:
            self._tell_lost(extent, number, blocks)

    def _tell_lost(self, extent: Extent, number: int, blocks: array[int]) -> None:
        """Tells ledger, watcher and log of blocks whose content is lost."""
        tenant = extent.tenant
        if self.ledger is not None:
            self.ledger.evict(tenant, len(blocks))
        self._tell_watchers(extent.key, number, number + len(blocks))
        if self.log.events is not None:
            detail = "" if extent.keep is None else f"priority={extent.keep.priority}"
            if tenant:
                detail = f"{detail} tenant={tenant}".lstrip()
            self.log.add(EventKind.EVICTED, "", blocks.tolist(), detail)
        if self.log.kv is not None:
            self.log.kv.removed(blocks.tolist())

    def _tell_watchers(self, key: bytes | None, first: int, end: int) -> None:
        """Tells of blocks from number `first` up to another whose content can't be found any more."""
        if key is not None and key[-2:] in self._watched:
            for watcher in self._watchers:
                watcher.removed(key[:-2], first, end)

    def _take_next(self, n: int) -> array[int]:
        """Takes up to `n` blocks of those that were freed together first."""
        if self.begun:
            return self._take_begun(n)
        free = self.ring.after
        return self._take_rows(free, n) if free.by_row else self._take_batch(free, n)

    def _take_rows(self, free: Free, n: int) -> array[int]:
        """Takes up to `n` blocks of the first rows of extents.

        Rows left their windows one by one, often thousands one after another, each of another extent. So an
        extent loses its front in place, and `free.extents` is cut once at the end: `del` of each first one
        would be quadratic.
        """
        taken = self.no_blocks()
        count = 0
        missing = n
        spares = self.spares
        numbered = self._numbered
        for extent in free.extents:
            width = extent.width
            if width > missing:
                break
            blocks = extent.blocks
            if numbered:
                taken += blocks[:width]
            del blocks[:width]
            del extent.free_rows[0]
            missing -= width
            count += 1
            number = extent.number
            extent.number += extent.units
            if self._heard:
                self._lose(extent, number, taken[-1:])
            if not blocks:
                self._forget(extent)
            if spares:
                self._replace(extent, number, 1)
        if not count:
            self._begin_row(free)
            return taken
        del free.extents[:count]
        if not free.extents:
            _unlink(free)
        return taken if numbered else self.unnumbered[: n - missing]

    def _begin_row(self, free: Free) -> None:
        """Begins the next one of a number of rows, of which not all blocks are taken at once."""
        extent = free.extents.pop(0)
        row = self.cut_front(extent, 1) if extent.rows > 1 else extent
        row.holders = 0
        row.free = None
        row.free_rows = NO_ROWS
        self.begun = row.blocks[:]
        self.unbroken = [row]
        if not free.extents:
            _unlink(free)

    def _take_batch(self, free: Free, n: int) -> array[int]:
        """Takes `n` blocks of extents freed together, or begins to: `_take_begun` takes the rest."""
        extents = free.extents
        heard = self._heard or not self._blanks_first
        if extents[0].width == 1 and (heard or n < sum([len(extent.blocks) for extent in extents])):
            return self._take_of_one_group(free, n)
        blocks = _in_order(extents)
        if n < len(blocks):
            _unlink(free)
            for extent in extents:
                extent.free = None
            self.begun = blocks[:]
            self.unbroken = extents
            return self.no_blocks()
        self._evict_all(free)
        return blocks

    def _evict_all(self, free: Free) -> None:
        """Evicts extents that were freed together. Rows freed before by themselves are evicted already."""
        _unlink(free)
        for extent in free.extents:
            extent.free = None
        for extent in free.extents:
            self._forget(extent)
            if self.spares:
                self._replace(extent, extent.number, extent.rows)

    def _take_of_one_group(self, free: Free, n: int) -> array[int]:
        """Takes up to `n` blocks of extents of one group that were freed together."""
        taken = self.nothing
        while n and free.extents:
            part = self._take_end(free.extents[-1], n)
            n -= len(part)
            taken = taken + part if taken else part
        return taken

    def _take_end(self, extent: Extent, n: int) -> array[int]:
        """Takes the last `n` blocks of a free extent of one group, or all, with their content."""
        taken = last_first(extent.blocks[-n:], 1)
        del extent.blocks[-n:]
        number = extent.end
        if not extent.blocks:
            self._wake(extent)
            self._forget(extent)
        elif extent.children:
            extent.shed_children()
        if self.spares:
            self._replace(extent, number, len(taken))
        if self._heard or extent.key is None:
            self._lose(extent, number, taken)
        return taken

    def _take_begun(self, n: int) -> array[int]:
        """Takes up to `n` blocks of what was begun. What is no longer whole can't be found any more.

        Columns are taken one after another, each from the last row on. So a take within the first column
        breaks as many rows, from the end, as it takes blocks; once the first column is gone no row is whole.
        """
        taken = self.begun[:n]
        del self.begun[:n]
        rows = len(taken)
        while rows and self.unbroken:
            extent = self.unbroken[-1]
            count = min(rows, extent.rows)
            if self.begun:
                lost = extent.blocks[-count * extent.width :]
                self.broken.append(extent.part(lost, extent.end - count * extent.units))
            self._lose_last(extent, count)
            if not extent.blocks:
                self.unbroken.pop()
            rows -= count
        if not self.begun:
            self.broken = []
        return taken

    def _lose_last(self, extent: Extent, rows: int) -> None:
        """Makes the last rows of an extent unfindable."""
        del extent.blocks[-rows * extent.width :]
        if not extent.blocks:
            self._forget(extent)
        if self.spares:
            self._replace(extent, extent.end, rows)

    def take_in_turn(self, n: int, takers: list[str]) -> array[int]:
        """As `take`, one block at a time, for several tenants: the k-th for tenant k modulo their number."""
        ledger = self.ledger
        assert ledger is not None
        ledger.taker = takers[0]
        blank = len(self.blanks)
        if n <= blank or takers.count(ledger.taker) == len(takers):
            return self.take(n)
        blocks = self.take(blank)
        for taker in islice(cycle(takers), blank, n):
            ledger.taker = taker
            blocks += self.take(1)
        return blocks

    def take_last(self, extent: Extent) -> array[int]:
        """Takes the last block of a free extent, with its content: that can't be found any more."""
        self.free_blocks -= 1
        self.evicted_blocks += 1
        return self._take_end(extent, 1)

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
                self._wake(extent)
                self.free_blocks -= len(extent.blocks)
                if self.ledger is not None:
                    self.ledger.cached[extent.tenant] -= len(extent.blocks)
            extent.holders += 1
        return shared

    def _wake(self, extent: Extent) -> None:
        """Takes an extent out of the free ones."""
        free = extent.free
        if free is None:
            self.unbroken.remove(extent)
            self.begun = without(self.begun, extent.blocks)
            if not self.begun:
                self.broken = []
            return
        extent.free = None
        extent.free_rows = NO_ROWS
        free.extents.remove(extent)
        if not free.extents:
            _unlink(free)

    def drop(self, extents: list[Extent], tail: array[int], width: int = 1) -> int:
        """Takes a holder from extents, and gives the rows of `tail` back, which follow them.

        Returns how many blocks of the extents others hold. Group by group the last is freed first; blocks
        without content go ahead of all others, the table's last foremost.
        """
        freed = len(tail)
        shared = 0
        blanks = tail
        kept: list[Extent] = []
        for extent in reversed(extents):
            holders = extent.holders = extent.holders - 1
            blocks = extent.blocks
            if holders:
                shared += len(blocks)
                continue
            freed += len(blocks)
            if extent.free_rows:
                freed -= len(extent.free_rows) * width
            if extent.key is None:
                blanks = blocks + blanks
            else:
                extent.rest = None
                kept.append(extent)
                if self.ledger is not None:
                    self.ledger.cached[extent.tenant] += len(blocks)
        if blanks and not self._blanks_first:
            self._free([_free_extent(blanks)])
            blanks = self.nothing
        if kept:
            kept.reverse()
            self._free(kept)
        if blanks:
            for group in range(width):
                self.blanks += blanks[group::width]
        self.free_blocks += freed
        return shared

    def join(self, extents: list[Extent]) -> list[Extent]:
        """Makes one of those of these extents that continue each other, unless another table holds them."""
        last = extents[0]
        joined = [last]
        for extent in extents[1:]:
            if (
                extent.number == last.number + len(last.blocks) // last.width * last.units
                and extent.key == last.key
                and extent.is_spare == last.is_spare
                and extent.holders == last.holders < 2
                and (not extent.in_tree or (extent.is_rest and extent.parent is last))
                and extent.origin is last.origin
                and extent.keep == last.keep
            ):
                last.blocks += extent.blocks
                last.rest = extent.rest
                last.uses = max(last.uses, extent.uses)
                self._join_tree(last, extent)
                self._forget(extent)
            else:
                last = extent
                joined.append(last)
        return joined

    def _join_tree(self, last: Extent, extent: Extent) -> None:
        """Gives an extent the children of the one that was joined to it."""
        children = extent.children
        if children:
            extent.children = None
            for child in children:
                child.follow(last)

    def _free(self, extents: list[Extent]) -> None:
        """Puts extents at the end of the free ones."""
        joined = self.join(extents) if len(extents) > 1 else extents
        free = Free(joined)
        for extent in joined:
            extent.free = free
        self.link(free)

    def link(self, free: Free) -> None:
        """Puts blocks at the end of the free ones."""
        ring = self.ring
        last = ring.before
        free.before = last
        free.after = ring
        last.after = free
        ring.before = free

    @staticmethod
    def to_be_freed(extents: list[Extent], tail: array[int]) -> list[int]:
        """The blocks that `drop` would free of one group, in the order in which they would be taken."""
        last = [extent for extent in reversed(extents) if extent.holders == 1]
        blanks = [block for extent in last if extent.key is None for block in reversed(extent.blocks)]
        cached = [block for extent in last if extent.key is not None for block in reversed(extent.blocks)]
        return [*reversed(tail), *blanks, *cached]

    def drop_in_turn(self, leavers: Sequence[Leaver]) -> int:
        """Frees the first rows of these tables one after another, up to the first table that is not simple.

        A table is simple where the rows lie in its first extent, which nobody else holds and whose content is
        found there; several rows only if none of that extent was freed by itself. One row goes behind other
        single rows (`by_row`), several are freed together. It is simple too where no hit asks for any of its
        blocks: these have no content. Returns how many of the tables, from the first on,
        are done. Of a `Leaver` only the table and its null rows are read.
        """
        # This is the hot loop of models with windows: in every step a row leaves for each request that begins
        # a block. Nothing is cut or moved here. An extent keeps its rows and only notes the `Free` of those
        # that are free (`free_rows`); its table counts its entry one shorter. Rows of one call, and of calls
        # after it, share one `Free` at the end of the ring while nothing else is freed behind it.
        if self.ledger is not None:
            return 0  # who counts what is cached sees each extent that is freed
        dropped = 0
        blocks = 0
        free = self.ring.before
        for _, table, _, skipped in leavers:
            rows = skipped - table.nulls
            if rows < 1:
                dropped += 1
                continue
            held = table.held
            if not held:
                tail = table.tail
                size = rows * table.width
                if table.nulls < table.unasked or size > len(tail) or not self._blanks_first:
                    break
                table.tail = tail[size:]
                for group in range(table.width):
                    self.blanks += tail[group : size : table.width]
                table.nulls = skipped
                blocks += size
                dropped += 1
                continue
            extent, length = held[0]
            # Others hold the extent, or its rows go elsewhere when they are freed: that splits it first.
            if extent.holders > 1 or extent.is_spare or extent.key is None:
                break
            free_rows = extent.free_rows
            if extent.rest is not None and length > extent.length:
                break  # the entry goes on in what was split off
            if rows > 1:
                if rows > length or free_rows:
                    break
                free = self._drop_front(table, extent, length, rows)
            else:
                if length > 1:
                    held[0] = (extent, length - 1)
                else:
                    del held[0]
                    extent.holders = 0
                if not free.by_row:
                    free = Free([], by_row=True)
                    self.link(free)
                free.extents.append(extent)
                if free_rows:
                    free_rows.append(free)
                else:
                    extent.free_rows = [free]
            table.nulls = skipped
            blocks += rows * extent.width
            dropped += 1
        self.free_blocks += blocks
        return dropped

    def _drop_front(self, table: Table, extent: Extent, length: int, rows: int) -> Free:
        """Frees the first rows of a table's first extent, which nobody else holds, together."""
        if rows < length:
            table.held[0] = (extent, length - rows)
            extent = self.cut_front(extent, rows)
        else:
            del table.held[0]
        extent.holders = 0
        extent.free = free = Free([extent])
        self.link(free)
        return free

    def single_out(self, extent: Extent) -> None:
        """Makes extents of the rows that were given back one by one, so that they can be held again."""
        while extent.free_rows:
            free = extent.free_rows[0]
            if len(extent.blocks) == extent.width:
                extent.free = free
                return
            row = self.cut_front(extent, 1)
            row.holders = 0
            row.free = free
            row.free_rows = [free]
            free.extents[free.extents.index(extent)] = row

    # ---- splitting

    def split(self, extent: Extent, at: int) -> Extent:
        """Cuts an extent in two at row `at` and returns the second part. The first stays what it was."""
        size = at * extent.width
        rest = extent.part(extent.blocks[size:], extent.number + at * extent.units)
        del extent.blocks[size:]
        rest.holders = extent.holders
        if extent.in_tree:
            rest.in_tree = True
            extent.move_children(rest)
        if extent.holders:
            rest.rest = extent.rest
            extent.rest = rest
        else:
            self._split_free(extent, rest)
        if extent.key is not None:
            siblings = self._siblings(extent)
            siblings.insert(siblings.index(extent) + 1, rest)
        return rest

    def _split_free(self, extent: Extent, rest: Extent) -> None:
        """Puts what was cut off a free extent behind it in the order of free ones."""
        rest.free = extent.free
        free = self.unbroken if extent.free is None else extent.free.extents
        free.insert(free.index(extent) + 1, rest)

    def cut_front(self, extent: Extent, rows: int) -> Extent:
        """Cuts the first rows off an extent that one table holds, and returns them."""
        size = rows * extent.width
        front = extent.part(extent.blocks[:size], extent.number)
        del extent.blocks[:size]
        del extent.free_rows[:rows]
        extent.number += rows * extent.units
        if extent.key is not None:
            siblings = self._siblings(extent)
            siblings.insert(siblings.index(extent), front)
        return front

    # ---- content

    def publish(self, table: Table, rows: int, key: bytes, number: int, units: int) -> None:
        """Makes the first rows of a table's tail findable.

        The first ends with the key block `number` of the segment `key`, the others `units` further each.
        Of equal contents the one that was published first is found, or would be if it were not owed: then the
        next is found in its place once that is settled.
        """
        if self._watchers and key[-2:] in self._watched:
            for watcher in self._watchers:
                watcher.stored(key[:-2], number, number + rows)
        held = table.held
        origin = table.origin
        blocks = table.take_tail(rows)
        siblings = self.index.get(key)
        if siblings is None:
            self.index[key] = siblings = []
        else:
            last = siblings[-1]
            end = last.number + len(last.blocks) // last.width * units
            if number < end:
                new = Extent(blocks, key, number, units, table.width)
                for extent in self._publish_among(siblings, new):
                    if origin is not None:
                        self._adopt(table, origin, extent)
                    table.add([extent])
                return
            if number == end and held and held[-1][0] is last and last.holders == 1 and not last.uses:
                alike = origin is None or last.keep == origin.keep_at(number + 1 - units)
                if last.origin is origin and alike:
                    last.blocks += blocks
                    held[-1] = (last, held[-1][1] + rows)
                    return
        extent = Extent(blocks, key, number, units, table.width)
        if origin is not None:
            self._adopt(table, origin, extent)
        siblings.append(extent)
        held.append((extent, rows))

    def _adopt(self, table: Table, origin: Origin, extent: Extent) -> None:
        """Notes what is known of an extent that a table publishes behind those that it has."""
        extent.origin = origin
        first = extent.number + 1 - extent.units
        extent.keep = origin.keep_at(first)
        extent.made = origin.made.get(segment_of(origin.keys, extent.number), 0)
        extent.in_tree = table.rooted
        if table.rooted and table.held:
            extent.follow(table.last_extent())

    def withdraw(self, table: Table, place: int) -> None:
        """Makes the rows of a table from a place on unfindable, but for those that others hold too."""
        while table.held and table.first_of_tail > place:
            extent = table.last_extent()
            first = table.first_of_tail - extent.length
            if extent.holders > 1 or extent.free_rows:
                return
            if first < place:
                table.cut_to(table.extents())
                extent = self.split(extent, place - first)
            if extent.key is not None:
                self._forget(extent)
                if self.spares:
                    self._replace(extent, extent.number, extent.rows)
                if self._heard:  # it can't be found any more, although its blocks are held
                    self._tell_watchers(extent.key, extent.number, extent.end)
                    if self.log.kv is not None:
                        self.log.kv.removed(extent.blocks.tolist())
            table.cut_to(table.extents()[:-1])
            table.tail = extent.blocks + table.tail

    def _publish_among(self, siblings: list[Extent], new: Extent) -> list[Extent]:
        """Publishes rows some of whose contents may be findable already.

        Each row whose number is known already becomes a spare, the others are found. Neighbouring rows of
        one kind stay one extent: `groupby` cuts only where known and unknown numbers alternate. `siblings`
        are in order and without overlaps, which `insort` keeps.
        """
        key, units, width = new.key, new.units, new.width
        assert key is not None
        known = {each for extent in siblings for each in range(extent.number, extent.end, units)}
        extents = []
        first = 0
        for is_spare, group in groupby(range(new.number, new.end, units), key=known.__contains__):
            numbers = list(group)
            last = first + len(numbers) * width
            extent = Extent(new.blocks[first:last], key, numbers[0], units, width)
            first = last
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
        if extent.in_tree:
            extent.leave_tree()
        if extent.key is not None:
            self._leave_index(extent)

    def _leave_index(self, extent: Extent) -> None:
        key = extent.key
        assert key is not None
        by_key = self.spares if extent.is_spare else self.index
        siblings = by_key[key]
        if len(siblings) > 1:
            siblings.remove(extent)
        else:
            del by_key[key]

    def _replace(self, extent: Extent, number: int, rows: int) -> None:
        """Lets spares be found in the place of rows just taken from an extent, from `number` on.

        The oldest spare of each number takes over. Where it is the oldest of several numbers in a row, they
        are brought forward as one extent (`last`), unless a subclass ranks rows one by one: then extents of
        one row keep the order in which they would be evicted.
        """
        key = extent.key
        if key is None or extent.is_spare or key not in self.spares:
            return
        end = number + rows * extent.units
        while number < end:
            # The rows up to `last` have the same oldest spare.
            last = end if self.brings_rows_together else number + extent.units
            oldest = None
            for spare in self.spares.get(key, ()):
                if spare.number <= number < spare.end:
                    last = min(last, spare.end)
                    oldest = spare
                    break
                if number < spare.number < last:
                    last = spare.number
            if oldest is not None:
                self._bring_forward(oldest, number, last)
            number = last

    def _bring_forward(self, spare: Extent, number: int, end: int) -> None:
        """Lets the rows of a spare be found from a number up to another."""
        at = (number - spare.number) // spare.units
        if at:
            spare = self.split(spare, at)
        if spare.end > end:
            self.split(spare, (end - spare.number) // spare.units)
        self._leave_index(spare)
        spare.is_spare = False
        assert spare.key is not None
        insort(self.index.setdefault(spare.key, []), spare, key=_number)

    # ---- figures

    def free_extents(self) -> Iterator[Extent]:
        """The free extents with content, and those whose first rows are free, once for each time they are."""
        self.settle()
        yield from self.unbroken
        free = self.ring.after
        while free is not self.ring:
            yield from free.extents
            free = free.after

    def free_order(self) -> Iterator[int]:
        """The free blocks, first the one that is taken first. Linear in the pool."""
        self.settle()
        yield from reversed(self.blanks)
        yield from self.begun
        rows: dict[Extent, int] = {}
        free = self.ring.after
        while free is not self.ring:
            if not free.by_row:
                yield from _in_order(free.extents)
            for extent in free.extents if free.by_row else ():
                row = rows.get(extent, 0)
                rows[extent] = row + 1
                yield from extent.blocks[row * extent.width : (row + 1) * extent.width]
            free = free.after

    def findable_extents(self) -> Iterator[Extent]:
        """Every extent with content. Linear in what is cached."""
        self.settle()
        for by_key in (self.index, self.spares):
            for siblings in by_key.values():
                yield from siblings

    def findable(self) -> set[int]:
        """Every block whose content can be found. Linear in the pool."""
        return {block for extent in self.findable_extents() for block in extent.blocks} | set(self.begun)


def _free_extent(blocks: array[int]) -> Extent:
    """Free blocks without content."""
    extent = Extent(blocks, None, 0, 1)
    extent.holders = 0
    return extent


def _unlink(free: Free) -> None:
    before = free.before
    after = free.after
    before.after = after
    after.before = before


def _in_order(extents: list[Extent]) -> array[int]:
    """The blocks of extents that were freed together, in the order in which they are taken."""
    first = extents[0]
    width = first.width
    rows = first.blocks[len(first.free_rows) * width :] if first.free_rows else first.blocks
    for extent in extents[1:]:
        rows = rows + extent.blocks[len(extent.free_rows) * width :]
    return last_first(rows, width)


def _number(extent: Extent) -> int:
    return extent.number
