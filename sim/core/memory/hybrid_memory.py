"""KV memory of models whose layers keep different tokens: several groups, one pool of extents.

It stands behind the same door as `KvMemory`. A prefix hit is a fixed point: each kind of layers may shorten
it. Before a running request takes blocks, those that left its windows are given back (`leave`).

While requests only decode, blocks are taken for all of them at once and dealt out to the groups when somebody
looks; what they fill is published when somebody may look for it (see `OutputWriters`).

Source: vllm/v1/core/kv_cache_coordinator.py and kv_cache_manager.py (0.24).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

from pagecast.sim.core.events import EventKind, EventLog
from pagecast.sim.core.group_spec import GroupSpec, KvKind, aligned_tokens
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.extent import Extent
from pagecast.sim.core.memory.extent_pool import ExtentPool
from pagecast.sim.core.memory.group import Progress
from pagecast.sim.core.memory.head_start import NO_START, HeadStart
from pagecast.sim.core.memory.kv_memory import Growth, Hit, KvMemory
from pagecast.sim.core.memory.layer_group import LayerGroup
from pagecast.sim.core.memory.lookup import Lookup
from pagecast.sim.core.memory.output_writers import OutputWriters
from pagecast.sim.core.memory.ranked_extent_pool import RankedExtentPool, ReuseRanks
from pagecast.sim.core.memory.table import Table
from pagecast.sim.core.memory.table_hit import TableHit
from pagecast.sim.core.request import Request

_NO_HIT = Hit(0, 0, 0, ())
_LONG = 1 << 62


class Tables:
    """One request's block tables. `pending` are blocks taken for it in turn for each group that grows."""

    __slots__ = ("by_group", "pending")

    def __init__(self, by_group: list[Table]) -> None:
        self.by_group = by_group
        self.pending: list[int] = []


class HybridMemory(KvMemory):
    """The blocks of one replica, in groups of layers as `limits.groups` says.

    `block_size` is the number of tokens per block key. `places` are the positions within a key block at which
    a decoding request may take, publish or give back blocks. `leave_place`: the only one of them at which
    blocks leave windows; None: there are several. `progress(request)` says how many tokens of a generating
    request may be published by now. `ranks`: blocks are evicted by how often they were reused; None: in
    vLLM's order.
    """

    def __init__(
        self, limits: Limits, log: EventLog, progress: Progress, ranks: ReuseRanks | None = None
    ) -> None:
        self.num_blocks = limits.num_blocks
        self.recomputes_block = False
        self.timed = None
        self.block_size = limits.block_size
        self.caching = limits.caching
        self.log = log
        specs = limits.groups
        self.aligned = aligned_tokens(specs)
        self.extents = (
            ExtentPool(limits.num_blocks, log)
            if ranks is None
            else RankedExtentPool(limits.num_blocks, log, ranks)
        )
        self.layers = [
            LayerGroup(self.extents, spec, limits, index, limits.block_size, self.aligned)
            for index, spec in enumerate(specs)
        ]
        # Groups of equal specifications that follow one another: their tables differ in the blocks alone.
        alike = groupby(self.layers, key=lambda group: group.spec)
        self._alike = [(spec, tuple(groups)) for spec, groups in alike]
        self._windowed = [(spec, groups) for spec, groups in self._alike if spec.window]
        self.tables: dict[Request, Tables] = {}
        self.writers = OutputWriters()
        self._progress = progress
        self.crossing_blocks = len(self.layers)
        self.places = _places(specs, limits.block_size)
        self.leave_place = _leave_place(specs, limits.block_size)
        self.least_window = min([spec.window for spec in specs if spec.window], default=0)
        self.fresh: dict[Request, None] = {}  # requests that have not decoded since their last chunk
        # Tokens of those that filled a block with their turn in the step being made, to be published later.
        self.filled: dict[Request, int] = {}
        self.refused_blocks = 0  # free blocks that the request last refused needs; 0: the batch was full
        self._growing = [group.index for group in self.layers if group.spec.kind is not KvKind.STATE]
        self.blocks_per_crossing = len(self._growing)
        self._windows = sum([len(groups) for _, groups in self._windowed])
        self._at_once = sum([spec.blocks_of(spec.window) for spec in specs if spec.kind is KvKind.CHUNK])
        self._lookups = self._make_lookups()
        # One kind beside full attention can't lengthen what full attention has: one pass is enough.
        self._simple = len(self._lookups) == 1 or (len(self._lookups) == 2 and self._lookups[0].keeps_all)
        # Whether each group takes one block per key block, and what leaves a window was published before.
        equal = all(spec.block_size == limits.block_size for spec in specs if spec.kind is not KvKind.STATE)
        ordered = ranks is None or not self._windowed  # what leaves a window may go ahead of what is free
        self.regular = (
            equal and ordered and (not self._windowed or (self.caching and self.leave_place is not None))
        )

    def leave_out_last_blocks(self) -> None:
        """From now on every hit leaves out its last block, in every group (EAGLE)."""
        self.recomputes_block = True
        for group in self.layers:
            group.drop_last()

    @property
    def ledger(self) -> None:
        """Nothing: tenants are not told apart."""
        return

    def eviction_figures(self) -> dict[str, object]:
        """Nothing: vLLM's order has no figures, nor have those by reuse."""
        return {}

    def _make_lookups(self) -> list[Lookup]:
        """Groups of equal layers are looked up together, those that keep every token first."""
        equal: dict[GroupSpec, list[int]] = {}
        for group in self.layers:
            if group.spec.kind is not KvKind.STATE:
                equal.setdefault(group.spec, []).append(group.index)
        lookups = [
            Lookup(self.extents, spec, groups, self.block_size, self.aligned)
            for spec, groups in equal.items()
        ]
        return sorted(lookups, key=lambda lookup: not lookup.keeps_all)

    # ---- finding

    def find(self, request: Request) -> Hit:
        """The longest cached prefix that all groups have; the last known token is always left to compute.

        Each kind of layers may shorten the prefix; then the others are asked again, until none does. A hit of
        layers that keep all is only cut. Where hits leave out their last block (EAGLE), every kind does so
        once: `dropped` holds those that have, and is cleared when a kind shortens the prefix for lack of
        content.
        """
        if not self.caching:
            return _NO_HIT
        keys = request.keys
        if self.writers.may_write(keys):
            self._catch_up_all(request)
        hit = most = request.known_tokens - 1
        hits_by_lookup: dict[int, list[TableHit]] = {}
        dropped: set[int] = set()
        while True:
            length = hit
            for number, lookup in enumerate(self._lookups):
                size = lookup.spec.block_size
                if lookup.keeps_all and number in hits_by_lookup:
                    # What was found once can only be cut.
                    length = length // size * size
                    continue
                drop = self.recomputes_block and number not in dropped
                hits = lookup.find(keys, min(length + size, most) if drop else length, drop=drop)
                hits_by_lookup[number] = hits
                shorter = hits[0].places * size < length
                length = hits[0].places * size
                if not length:
                    return _NO_HIT
                if drop:
                    dropped.add(number)
                elif shorter:
                    dropped.clear()
            if length >= hit:
                break
            hit = length
            if self._simple:
                break
        return self._hit(hit, hits_by_lookup)

    def _hit(self, tokens: int, hits_by_lookup: dict[int, list[TableHit]]) -> Hit:
        """What was found, cut to the length that all groups have."""
        if not tokens:
            return _NO_HIT
        tables: dict[int, TableHit] = {}
        for number, lookup in enumerate(self._lookups):
            places = tokens // lookup.spec.block_size
            for group, table in zip(lookup.groups, hits_by_lookup[number], strict=True):
                table.cut(places)
                tables[group] = table
        return Hit(tokens, 0, 0, (), tuple([tables[group.index] for group in self.layers]))

    def fits(self, request: Request, hit: Hit, tokens: int, reserved: int = 0) -> bool:
        """Whether the first `tokens` tokens of a waiting request fit in free blocks, beside `hit`.

        A group counts no more blocks than a request ever holds in it. `reserved` free blocks are kept for
        others.
        """
        return self._needed(hit, tokens, capped=True) + reserved <= self.extents.free_blocks

    def fits_now(self, request: Request, hit: Hit, tokens: int, reserved: int = 0) -> bool:
        """Whether the blocks of the first `tokens` tokens of a waiting request are free at once."""
        return self._needed(hit, tokens, capped=False) + reserved <= self.extents.free_blocks

    def still_needed(self, request: Request, tokens: int) -> int:
        """Blocks that a request still takes until its first `tokens` tokens are computed, beside its own."""
        tables = self.tables_of(request)
        return sum(
            [group.still_needed(table, tokens) for group, table in zip(self.layers, tables, strict=True)]
        )

    def _needed(self, hit: Hit, tokens: int, *, capped: bool) -> int:
        blocks = 0
        for _, groups in self._alike:
            if not hit.tokens:
                blocks += len(groups) * groups[0].needed(None, 0, tokens, capped=capped)
                continue
            for group in groups:
                table = hit.tables[group.index] if hit.tables else None
                blocks += group.needed(table, hit.tokens, tokens, capped=capped)
        return blocks

    def missing(self, request: Request, tokens: int) -> int:
        """Blocks that a request still needs so that its first `tokens` tokens have a place."""
        tables = self.tables_of(request)
        missing = 0
        for _, groups in self._alike:
            missing += len(groups) * groups[0].missing(tables[groups[0].index], tokens)
        return missing

    def may_find_more(self, request: Request, hit: Hit, *, coming: bool) -> bool:
        """Whether a waiting request's hit may grow while others only generate: it quotes one of them.

        `coming`: requests begin to generate with this step. Where its first chunk was refused, and not its
        whole sequence, a hit that shrinks may help as well. Also notes for `refused_for` how many blocks the
        request needs (`refused_blocks`).
        """
        self.refused_blocks = self._needed(hit, request.known_tokens, capped=True)
        if coming or self.refused_blocks <= self.extents.free_blocks:
            return True
        return request.keys.explicit or self.writers.may_write(request.keys)

    def refused_for(self, count: int) -> int:
        """For how many steps of `count` decoding requests the one last refused would be refused again.

        Each of them may give a block back in every windowed group whenever it begins one, and a chunk at its
        end.
        """
        if not self.refused_blocks or not self._windows:
            return _LONG
        if self.fresh:
            return 0
        spare = self.refused_blocks - self.extents.free_blocks - 1 - count * self._at_once
        return max(spare // (count * self._windows) * self.block_size - 1, 0)

    def blocks_added(self, requests: Iterable[Request], tick: int, steps: int) -> int:
        """By how many the blocks in use grow when these decode for `steps` ticks from `tick` on."""
        added = 0
        requests = list(requests)
        for request in requests:
            last = tick - request.lag + steps - 1
            added += self.missing(request, last + 1)
        return added - self.blocks_left(requests, tick + steps - 1)

    def blocks_left(self, requests: Iterable[Request], tick: int) -> int:
        """How many blocks these requests give back, decoding up to this tick, because they leave windows."""
        left = 0
        shared: dict[int, tuple[Extent, int]] = {}
        for request in requests:
            for spec, groups in self._windowed:
                skippable = spec.skipped_tokens(tick - request.lag) // spec.block_size
                if not skippable:
                    continue
                tables = self.tables_of(request)
                for group in groups:
                    left += _left(tables[group.index], skippable, shared)
        for extent, count in shared.values():
            left += extent.holders == count
        return left

    def fork_tokens(self, request: Request, hit: Hit) -> int:
        """None: a parent's blocks are not copied."""
        return 0

    def head_start(self, request: Request, hit: Hit) -> HeadStart:
        """None."""
        return NO_START

    # ---- claiming and growing

    def tables_of(self, request: Request) -> list[Table]:
        """A request's table in each group; empty ones where it holds nothing."""
        tables = self.tables.get(request)
        if tables is None:
            return [Table() for _ in self.layers]
        return self._dealt(tables)

    def _dealt(self, tables: Tables) -> list[Table]:
        """Deals the pending blocks out to their groups. Returns the tables."""
        by_group = tables.by_group
        pending = tables.pending
        if pending:
            tables.pending = []
            step = len(self._growing)
            each = len(pending) // step
            for first, group in enumerate(self._growing):
                table = by_group[group]
                table.tail += pending[first::step]
                table.places += each
        return by_group

    def claim(self, request: Request, hit: Hit) -> None:
        """Gives a request, which holds nothing, the prefix found for it in the same step."""
        tables = []
        for group in self.layers:
            tables.append(group.claim(request, hit.tables[group.index] if hit.tables else None, hit.tokens))
        self.tables[request] = Tables(tables)

    def leave(self, request: Request, computed: int) -> None:
        """Gives back the blocks that no layer reads once `computed` tokens are computed."""
        for spec, groups in self._windowed:
            skipped = spec.skipped_tokens(computed) // spec.block_size
            if skipped:
                self._leave(request, groups, skipped)

    def _leave(self, request: Request, groups: tuple[LayerGroup, ...], skipped: int) -> None:
        tables = self.tables[request].by_group
        if skipped > tables[groups[0].index].stored:
            self._dealt(self.tables[request])
            self._catch_up(request)
        for group in groups:
            group.leave(request, tables[group.index], skipped)

    def leave_in_turn(self, requests: list[Request], turns: int, tick: int) -> None:
        """Lets requests that decode give back what leaves their windows, in this order, over and over.

        The k-th turn is that of request k modulo their number, when it first computes the `leave_place` of a
        block after `tick`, or then again one block further each time.
        """
        place = self.leave_place
        assert place is not None
        count = len(requests)
        size = self.block_size
        for turn in range(turns):
            request = requests[turn % count]
            computed = tick - request.lag
            computed += (place - computed) % size + turn // count * size
            for spec, groups in self._windowed:
                skipped = (computed + 1 - spec.window) // size
                if skipped > 0:
                    self._leave(request, groups, skipped)

    def grow(self, request: Request, tokens: int) -> None:
        """Takes blocks for the first `tokens` tokens; the caller checked that they are free."""
        tables = self.tables.get(request)
        if tables is None:
            tables = self.tables[request] = Tables([Table() for _ in self.layers])
        by_group = self._dealt(tables)
        missing: list[int] = []
        for _, groups in self._alike:
            missing += [groups[0].missing(by_group[groups[0].index], tokens)] * len(groups)
        if self.log.events is not None:
            for group, blocks in zip(self.layers, missing, strict=True):
                if blocks:
                    group.grow(request, by_group[group.index], self.extents.take(blocks))
            return
        taken = self.extents.take(sum(missing))
        first = 0
        for table, blocks in zip(by_group, missing, strict=True):
            table.tail += taken[first : first + blocks]
            table.places += blocks
            first += blocks

    def grow_many(self, requests: list[Request], crossings: int) -> None:
        """Takes blocks for decoding requests that begin one in this order, over and over.

        The k-th is that of request k modulo their number. For `regular` memory, where no log is kept.
        """
        step = len(self._growing)
        taken = self.extents.take(crossings * step)
        tables = self.tables
        count = len(requests)
        for crossing in range(crossings):
            pending = tables[requests[crossing % count]].pending
            pending += taken[crossing * step : (crossing + 1) * step]

    def generate(self, request: Request) -> None:
        """Takes note that a request decodes from now on."""
        self.fresh[request] = None
        if self.writers.may_write(request.keys):
            self._catch_up_all(request)
        self.writers.add(request)

    # ---- publishing and giving back

    def publish(self, request: Request, tokens: int) -> None:
        """Makes the full blocks of a request's first `tokens` tokens findable, in whole aligned pieces."""
        if not self.caching:
            return
        if self.writers.may_write(request.keys):
            self._catch_up_all(request)
        self._publish(request, tokens)

    def _publish(self, request: Request, tokens: int) -> None:
        tables = self.tables.get(request)
        if tables is None:
            return
        by_group = self._dealt(tables)
        whole = tokens // self.aligned * self.aligned
        for _, groups in self._alike:
            group = groups[0]
            table = by_group[group.index]
            full = group.full(table, whole, tokens)
            if full <= table.stored:
                continue
            parts = group.parts(request.keys, table, full)
            for group in groups:
                group.publish(request, by_group[group.index], full, parts)

    def publishes_later(self, request: Request) -> bool:
        """Whether what a decoding request fills is published when somebody may look for it.

        Nobody else may publish the same in this step.
        """
        return (
            self.regular and not self.writers.rivals and not request.keys.explicit and self.log.events is None
        )

    def _catch_up_all(self, request: Request) -> None:
        """Publishes what those have computed by now that write content of a request."""
        if self.caching:
            for writer in self.writers.of(request.keys):
                if writer is not request:
                    self._publish(writer, self._progress(writer))

    def _catch_up(self, request: Request) -> None:
        """Publishes what a request has computed by now, if it generates."""
        if self.caching and self.writers.write(request):
            self._publish(request, max(self._progress(request), self.filled.get(request, 0)))

    def withdraw(self, request: Request, tokens: int) -> None:
        """Nothing: vLLM leaves what it published findable.

        A cancelled request's step is computed all the same. A request that is preempted after its turn in the
        same step leaves blocks that nobody computed; vLLM finds them, and so does this memory.
        """

    def release(self, request: Request) -> None:
        """Gives back every block of a request. Freed content stays findable until its block is taken."""
        tables = self._take_tables(request)
        for group, table in zip(self.layers, tables, strict=False):
            group.release(request, table)

    def _take_tables(self, request: Request) -> list[Table]:
        """Takes a request's tables from it; none where it holds nothing."""
        self._catch_up(request)
        self.fresh.pop(request, None)
        self.filled.pop(request, None)
        self.writers.remove(request)
        tables = self.tables.pop(request, None)
        return [] if tables is None else self._dealt(tables)

    def detach(self, request: Request) -> Callable[[], None]:
        """Takes a request's blocks from it, to be given back later by what is returned.

        Until then they count as used, and their content can be found. They are given back group by group, the
        last group first, all at once (as vLLM's deferred frees).
        """
        tables = self._take_tables(request)
        detached = Table()
        for table in tables:
            detached.held += table.held
            if table.tail:
                detached.add([Extent(table.tail, None, 0, 1)])

        def give_back() -> None:
            extents = detached.extents()
            freed_blocks = self.extents.to_be_freed(extents, [])
            blocks = sum([len(extent.blocks) for extent in extents])
            self.layers[0].shared_blocks -= blocks - self.extents.drop(extents, [])
            if freed_blocks:
                self.log.add(EventKind.FREED, request.id, freed_blocks)

        return give_back

    def evict(self, blocks: int) -> int:
        """Forgets the content of the next `blocks` free blocks (all there are, at most) in eviction order.

        They stay free, ahead of all others. Returns how many that were.
        """
        blocks = min(blocks, self.extents.free_blocks)
        self.extents.evict(blocks)
        return blocks

    # ---- for a lower tier

    def first_unknown(self, request: Request, group: int, cached: int, last: int) -> int:
        """The first of a table's first `last` places that a load has to fill: its block has no content."""
        return self.tables_of(request)[group].first_unknown(last)

    def watch_allocations(self, *, on: bool) -> None:
        """Takes note of every block taken from now on, or of none."""
        self.extents.allocations = [] if on else None

    def take_allocations(self) -> list[int]:
        """The blocks taken since the last call, as far as they were noted."""
        allocations = self.extents.allocations
        if not allocations:
            return []
        self.extents.allocations = []
        return allocations

    # ---- quiet time

    def quiet(self, decodes: Growth, tick: int, count: int, ticks: int) -> int:
        """For how many of `ticks` decode ticks of `count` requests the free blocks are surely enough.

        Blocks that leave windows in the meantime are not counted on.
        """
        free = self.extents.free_blocks // self.crossing_blocks
        if (ticks // self.block_size + 1) * count <= free:
            return ticks
        return min(ticks, decodes.ticks_within(tick, free))

    # ---- figures

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, with cached content or without."""
        return self.extents.free_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks that some request holds."""
        return self.num_blocks - self.extents.free_blocks

    def room(self, blocks: int) -> bool:
        """Whether so many blocks are free."""
        return blocks <= self.extents.free_blocks

    @property
    def evicted_blocks(self) -> int:
        """Blocks with findable content that were taken for other content so far."""
        return self.extents.evicted_blocks

    def shared_tokens(self) -> int:
        """Tokens that sharing saves: those in all block tables, minus those in blocks in use."""
        return sum([group.shared_blocks * group.spec.block_size for group in self.layers])

    def holds(self, request: Request) -> bool:
        """Whether a request holds any block."""
        return request in self.tables

    def blocks(self, request: Request, group: int = 0) -> list[int]:
        """A request's block table in one group; `num_blocks` stands for the null block."""
        table = self.tables_of(request)[group]
        return [self.null] * table.nulls + table.blocks()

    def last_block(self, request: Request, group: int = 0) -> int:
        """The newest block of a generating request's table. O(1)."""
        return self.tables_of(request)[group].last_block()

    def findable_blocks(self) -> set[int]:
        """Every block whose content can be found. Linear in the pool; for displays."""
        return self.extents.findable()


def _places(specs: tuple[GroupSpec, ...], unit: int) -> tuple[int, ...]:
    places = {0, unit - 1}
    for spec in specs:
        if spec.kind is KvKind.WINDOW:
            places.add((spec.window - 1) % unit)
        elif spec.kind is KvKind.CHUNK and spec.window % unit:
            places.update(range(unit))
    return tuple(sorted(places))


def _leave_place(specs: tuple[GroupSpec, ...], unit: int) -> int | None:
    """The place of a block at which blocks leave windows, if there is one, and they were full long before."""
    places = set()
    for spec in specs:
        if spec.kind is KvKind.WINDOW and spec.window > spec.block_size == unit:
            places.add((spec.window - 1) % unit)
        elif spec.window:
            return None
    return places.pop() if len(places) == 1 else None


def _left(table: Table, skippable: int, shared: dict[int, tuple[Extent, int]]) -> int:
    """How many of a table's blocks before place `skippable` are its own. Counts the others in `shared`."""
    count = skippable - table.nulls
    if count <= 0:
        return 0
    if table.held and table.held[0][0].holders == 1 and count <= len(table.held[0][0].blocks):
        return count
    left = 0
    for extent in table.extents():
        if count <= 0:
            return left
        blocks = min(count, len(extent.blocks))
        count -= len(extent.blocks)
        if extent.holders == 1:
            left += blocks
            continue
        for block in extent.blocks[:blocks]:
            shared[block] = extent, shared.get(block, (extent, 0))[1] + 1
    return left + max(count, 0)
