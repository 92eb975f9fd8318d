"""KV memory of models whose layers keep different tokens: several groups, one pool of single blocks.

It stands behind the same door as `KvMemory`. A prefix hit is a fixed point: each kind of layers may shorten
it. Before a running request takes blocks, those that left its windows are given back (`leave`).

Source: vllm/v1/core/kv_cache_coordinator.py and kv_cache_manager.py (0.24).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

from pagecast.sim.core.events import EventKind, EventLog
from pagecast.sim.core.group_spec import GroupSpec, KvKind, aligned_tokens
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.head_start import NO_START, HeadStart
from pagecast.sim.core.memory.kv_memory import Growth, Hit, KvMemory
from pagecast.sim.core.memory.layer_group import LayerGroup, Lookup
from pagecast.sim.core.memory.numbered_pool import NumberedPool
from pagecast.sim.core.request import Request

_NO_HIT = Hit(0, 0, 0, ())
_LONG = 1 << 62


class HybridMemory(KvMemory):
    """The blocks of one replica, in groups of layers as `limits.groups` says.

    `block_size` is the number of tokens per block key. `places` are the positions within a key block at which
    a decoding request may take, publish or give back blocks.
    """

    def __init__(self, limits: Limits, log: EventLog) -> None:
        self.num_blocks = limits.num_blocks
        self.recomputes_block = False
        self.timed = None
        self.block_size = limits.block_size
        self.caching = limits.caching
        self.log = log
        specs = limits.groups
        self.aligned = aligned_tokens(specs)
        self.blocks_pool = NumberedPool(limits.num_blocks, log)
        self.layers = [
            LayerGroup(self.blocks_pool, spec, limits, index, limits.block_size, self.aligned)
            for index, spec in enumerate(specs)
        ]
        # Groups of equal specifications that follow one another: what a length means is the same for them.
        alike = groupby(self.layers, key=lambda group: group.spec)
        self._alike = [(spec, tuple(groups)) for spec, groups in alike]
        self.crossing_blocks = len(self.layers)
        self.places = _places(specs, limits.block_size)
        self.fresh: dict[Request, None] = {}  # requests that have not decoded since their last chunk
        self.refused_blocks = 0  # free blocks that the request last refused needs; 0: the batch was full
        self._generating: dict[Request, None] = {}
        self._windowed = [group for group in self.layers if group.spec.window]
        self._at_once = sum([spec.blocks_of(spec.window) for spec in specs if spec.kind is KvKind.CHUNK])
        self._lookups = self._make_lookups()
        # One kind beside full attention can't lengthen what full attention has: one pass is enough.
        self._simple = len(self._lookups) == 1 or (len(self._lookups) == 2 and self._lookups[0].keeps_all)

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
        """Nothing: blocks are evicted in vLLM's order."""
        return {}

    def _make_lookups(self) -> list[Lookup]:
        """Groups of equal layers are looked up together, those that keep every token first."""
        equal: dict[GroupSpec, list[LayerGroup]] = {}
        for group in self.layers:
            if group.spec.kind is not KvKind.STATE:
                equal.setdefault(group.spec, []).append(group)
        lookups = [
            Lookup(self.blocks_pool, spec, groups, self.block_size, self.aligned)
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
        hit = most = request.known_tokens - 1
        tables_by_lookup: dict[int, list[list[int]]] = {}
        dropped: set[int] = set()
        while True:
            length = hit
            for number, lookup in enumerate(self._lookups):
                size = lookup.spec.block_size
                if lookup.keeps_all and number in tables_by_lookup:
                    # What was found once can only be cut.
                    length = length // size * size
                    continue
                drop = self.recomputes_block and number not in dropped
                tables = lookup.find(keys, min(length + size, most) if drop else length, drop=drop)
                tables_by_lookup[number] = tables
                shorter = len(tables[0]) * size < length
                length = len(tables[0]) * size
                if drop:
                    dropped.add(number)
                elif shorter:
                    dropped.clear()
            if length >= hit:
                break
            hit = length
            if self._simple:
                break
        if not hit:
            return _NO_HIT
        tables_of: dict[int, list[int]] = {}
        for number, lookup in enumerate(self._lookups):
            most = hit // lookup.spec.block_size
            for group, table in zip(lookup.groups, tables_by_lookup[number], strict=True):
                del table[most:]
                tables_of[group.index] = table
        return Hit(hit, 0, 0, (), tuple([tables_of[group.index] for group in self.layers]))

    def fits(self, request: Request, hit: Hit, tokens: int, reserved: int = 0) -> bool:
        """Whether the first `tokens` tokens of a waiting request fit in free blocks, beside `hit`.

        A group counts no more blocks than a request ever holds in it. `reserved` free blocks are kept for
        others.
        """
        return self._needed(hit, tokens, capped=True) + reserved <= len(self.blocks_pool.free)

    def fits_now(self, request: Request, hit: Hit, tokens: int, reserved: int = 0) -> bool:
        """Whether the blocks of the first `tokens` tokens of a waiting request are free at once."""
        return self._needed(hit, tokens, capped=False) + reserved <= len(self.blocks_pool.free)

    def still_needed(self, request: Request, tokens: int) -> int:
        """Blocks that a request still takes until its first `tokens` tokens are computed, beside its own."""
        return sum([group.still_needed(request, tokens) for group in self.layers])

    def _needed(self, hit: Hit, tokens: int, *, capped: bool) -> int:
        blocks = 0
        for group in self.layers:
            table = hit.tables[group.index] if hit.tables else []
            blocks += group.needed(table, hit.tokens, tokens, capped=capped)
        return blocks

    def missing(self, request: Request, tokens: int) -> int:
        """Blocks that a request still needs so that its first `tokens` tokens have a place."""
        return sum([group.missing(request, tokens) for group in self.layers])

    def may_find_more(self, request: Request, hit: Hit, *, coming: bool) -> bool:
        """Whether a waiting request's hit may grow while others only generate: it quotes one of them.

        `coming`: requests begin to generate with this step. Where its first chunk was refused, and not its
        whole sequence, a hit that shrinks may help as well. Also notes for `refused_for` how many blocks the
        request needs (`refused_blocks`).
        """
        self.refused_blocks = self._needed(hit, request.known_tokens, capped=True)
        if coming or self.refused_blocks <= len(self.blocks_pool.free):
            return True
        keys = request.keys
        return keys.explicit or any(other.keys.digests[-1] in keys.digests for other in self._generating)

    def refused_for(self, count: int) -> int:
        """For how many steps of `count` decoding requests the one last refused would be refused again.

        Each of them may give a block back in every windowed group whenever it begins one, and a chunk at its
        end.
        """
        if not self.refused_blocks or not self._windowed:
            return _LONG
        if self.fresh:
            return 0
        spare = self.refused_blocks - len(self.blocks_pool.free) - 1 - count * self._at_once
        return max(spare // (count * len(self._windowed)) * self.block_size - 1, 0)

    def blocks_added(self, requests: Iterable[Request], tick: int, steps: int) -> int:
        """By how many the blocks in use grow when these decode for `steps` ticks from `tick` on."""
        holders = self.blocks_pool.holders
        added = 0
        shared: dict[int, int] = {}
        for request in requests:
            last = tick - request.lag + steps - 1
            for spec, groups in self._alike:
                wanted = spec.blocks_of(last + 1)
                skippable = spec.skipped_tokens(last) // spec.block_size
                for group in groups:
                    table = group.tables[request]
                    places = len(table.blocks)
                    if wanted > places:
                        added += wanted - places
                    if skippable <= table.nulls:
                        continue
                    added -= max(skippable - places, 0)
                    for block in table.blocks[table.nulls : skippable]:
                        if holders[block] == 1:
                            added -= 1
                        else:
                            shared[block] = shared.get(block, 0) + 1
        for block, count in shared.items():
            added -= holders[block] == count
        return added

    def fork_tokens(self, request: Request, hit: Hit) -> int:
        """None: a parent's blocks are not copied."""
        return 0

    def head_start(self, request: Request, hit: Hit) -> HeadStart:
        """None."""
        return NO_START

    # ---- claiming and growing

    def claim(self, request: Request, hit: Hit) -> None:
        """Gives a request, which holds nothing, the prefix found for it in the same step."""
        for group in self.layers:
            group.claim(request, hit.tables[group.index] if hit.tables else [], hit.tokens)

    def leave(self, request: Request, computed: int) -> None:
        """Gives back the blocks that no layer reads once `computed` tokens are computed."""
        for spec, groups in self._alike:
            skipped = spec.skipped_tokens(computed) // spec.block_size if spec.window else 0
            if skipped:
                for group in groups:
                    group.leave(request, skipped)

    def grow(self, request: Request, tokens: int) -> None:
        """Takes blocks for the first `tokens` tokens; the caller checked that they are free."""
        for group in self.layers:
            group.grow(request, tokens)

    def generate(self, request: Request) -> None:
        """Takes note that a request decodes from now on."""
        self.fresh[request] = None
        self._generating[request] = None

    # ---- publishing and giving back

    def publish(self, request: Request, tokens: int) -> None:
        """Makes the full blocks of a request's first `tokens` tokens findable, in whole aligned pieces."""
        if self.caching:
            whole = tokens // self.aligned * self.aligned
            for group in self.layers:
                group.publish(request, whole, tokens)

    def withdraw(self, request: Request, tokens: int) -> None:
        """Nothing: vLLM leaves what it published findable.

        A cancelled request's step is computed all the same. A request that is preempted after its turn in the
        same step leaves blocks that nobody computed; vLLM finds them, and so does this memory.
        """

    def release(self, request: Request) -> None:
        """Gives back every block of a request. Freed content stays findable until its block is taken."""
        self.fresh.pop(request, None)
        self._generating.pop(request, None)
        for group in self.layers:
            group.release(request)

    def detach(self, request: Request) -> Callable[[], None]:
        """Takes a request's blocks from it, to be given back later by what is returned.

        Until then they count as used, and their content can be found. They are given back group by group, the
        last group first, all at once (as vLLM's deferred frees).
        """
        self.fresh.pop(request, None)
        self._generating.pop(request, None)
        blocks = [block for group in self.layers for block in group.detach(request)]
        blocks.reverse()

        def give_back() -> None:
            freed = self.blocks_pool.drop(blocks)
            self.layers[0].shared_blocks -= len(blocks) - len(freed)
            if freed:
                self.log.add(EventKind.FREED, request.id, freed)

        return give_back

    def evict(self, blocks: int) -> int:
        """Forgets the content of the next `blocks` free blocks (all there are, at most) in eviction order.

        They stay free, ahead of all others. Returns how many that were.
        """
        pool = self.blocks_pool
        victims = pool.take(min(blocks, len(pool.free)))
        pool.drop(victims)
        return len(victims)

    # ---- for a lower tier

    def first_unknown(self, request: Request, group: int, cached: int, last: int) -> int:
        """The first of a table's first `last` places that a load has to fill: its block has no content."""
        blocks = self.layers[group].tables[request].blocks
        keys = self.blocks_pool.keys
        for place in range(last):
            block = blocks[place]
            if block != self.null and keys[block] is None:
                return place
        return last

    def watch_allocations(self, *, on: bool) -> None:
        """Takes note of every block taken from now on, or of none."""
        self.blocks_pool.allocations = [] if on else None

    def take_allocations(self) -> list[int]:
        """The blocks taken since the last call, as far as they were noted."""
        allocations = self.blocks_pool.allocations
        if not allocations:
            return []
        self.blocks_pool.allocations = []
        return allocations

    # ---- quiet time

    def quiet(self, decodes: Growth, tick: int, count: int, ticks: int) -> int:
        """For how many of `ticks` decode ticks of `count` requests the free blocks are surely enough.

        Blocks that leave windows in the meantime are not counted on.
        """
        free = len(self.blocks_pool.free) // self.crossing_blocks
        if (ticks // self.block_size + 1) * count <= free:
            return ticks
        return min(ticks, decodes.ticks_within(tick, free))

    # ---- figures

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, with cached content or without."""
        return len(self.blocks_pool.free)

    @property
    def used_blocks(self) -> int:
        """Blocks that some request holds."""
        return self.num_blocks - len(self.blocks_pool.free)

    def room(self, blocks: int) -> bool:
        """Whether so many blocks are free."""
        return blocks <= len(self.blocks_pool.free)

    @property
    def evicted_blocks(self) -> int:
        """Blocks with findable content that were taken for other content so far."""
        return self.blocks_pool.evicted_blocks

    def shared_tokens(self) -> int:
        """Tokens that sharing saves: those in all block tables, minus those in blocks in use."""
        return sum([group.shared_blocks * group.spec.block_size for group in self.layers])

    def holds(self, request: Request) -> bool:
        """Whether a request holds any block."""
        return request in self.layers[0].tables

    def blocks(self, request: Request, group: int = 0) -> list[int]:
        """A request's block table in one group; `num_blocks` stands for the null block."""
        table = self.layers[group].tables.get(request)
        return [] if table is None else list(table.blocks)

    def last_block(self, request: Request, group: int = 0) -> int:
        """The newest block of a generating request's table. O(1)."""
        return self.layers[group].tables[request].blocks[-1]

    def findable_blocks(self) -> set[int]:
        """Every block whose content can be found. Linear in the pool; for displays."""
        return self.blocks_pool.findable()


def _places(specs: tuple[GroupSpec, ...], unit: int) -> tuple[int, ...]:
    places = {0, unit - 1}
    for spec in specs:
        if spec.kind is KvKind.WINDOW:
            places.add((spec.window - 1) % unit)
        elif spec.kind is KvKind.CHUNK and spec.window % unit:
            places.update(range(unit))
    return tuple(sorted(places))
