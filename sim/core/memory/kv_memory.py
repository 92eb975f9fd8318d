"""KV memory of models whose layers all keep every token.

It has KV groups (`group.py`), nearly always one, which take blocks from one pool (`pool.py`) in an eviction
order (`eviction.py`), and keep cached content in a tree of runs (`run.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice

from pagecast.sim.core.memory.expiry import Expiry
from pagecast.sim.core.memory.group import NOTHING, FullGroup, Group, Progress
from pagecast.sim.core.memory.head_start import NO_START, HeadStart, StartKind
from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.memory.holding import Holding
from pagecast.sim.core.memory.memory import Growth, OffloadableMemory
from pagecast.sim.core.memory.output_writers import OutputWriters
from pagecast.sim.core.memory.partial_reuse import PartialReuse
from pagecast.sim.core.memory.pool import BlockPool, Watcher
from pagecast.sim.core.memory.tenant_ledger import TenantLedger
from pagecast.sim.core.request import Request, State

__all__ = ["BlockPool", "KvMemory", "MakeGroups", "one_full_group"]

MakeGroups = Callable[[BlockPool, int, bool, Progress], Sequence[Group]]
"""Makes the groups of a memory: from its pool, block size, caching and the requests' progress."""


def one_full_group(pool: BlockPool, block_size: int, caching: bool, progress: Progress) -> list[Group]:
    """A plain model: every layer keeps the KV of every token."""
    return [FullGroup(pool, block_size, caching=caching, progress=progress)]


class KvMemory(OffloadableMemory):
    """The blocks of one replica, in `pool`.

    `block_size` is in tokens. `caching`: whether content may be found again. `progress(request)` says how
    many tokens of a generating request may be published by now.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        progress: Progress,
        caching: bool,
        groups: MakeGroups,
        partial_reuse: PartialReuse | None = None,
    ) -> None:
        self.num_blocks = pool.num_blocks
        self.block_size = block_size
        self.caching = caching
        self.log = pool.log
        self.pool = pool
        self.untold = ""
        self.writers = OutputWriters()
        self.groups: tuple[Group, ...] = tuple(groups(pool, block_size, caching, progress))
        self._first = self.groups[0]
        self._single = len(self.groups) == 1
        self._no_hit = Hit(0, 0, 0, (NOTHING,) * len(self.groups))
        self.partial_reuse = partial_reuse
        if partial_reuse is not None:
            partial_reuse.serve(self._first)
        timed = pool.eviction.timed
        self.expiry = None if timed is None else Expiry(pool, timed)
        self.detached: list[Holding] = []  # taken from their requests, and still to be given back
        self.key_lookahead = 0
        self.recomputes_block = False  # leave the last block of a hit out of it (see `Drafter`)
        self.crossing_blocks = len(self.groups)  # blocks per block of a sequence: one in each group

    def leave_out_last_blocks(self) -> None:
        """From now on every hit leaves out its last block."""
        self.recomputes_block = True

    def watch(self, watcher: Watcher) -> None:
        """Tells a watcher from now on which content can be found. To be called before the first request."""
        self.pool.watch(watcher)

    # ---- finding

    def find(self, request: Request) -> Hit:
        """The longest cached prefix that all groups have; the last known token is always left to compute."""
        return self._find(request, request.known_tokens - 1)

    def find_whole(self, request: Request) -> Hit:
        """The longest cached prefix, with a block that the last known token ends. Not to be claimed."""
        return self._find(request, request.known_tokens)

    def _find(self, request: Request, tokens: int) -> Hit:
        """The longest cached prefix among the first `tokens` tokens."""
        if not self.caching:
            return self._no_hit
        size = self.block_size
        most = tokens // size
        if self._single:
            group_hit = self._first.find(request, most)
            if not group_hit.blocks:
                return self._no_hit
            if self.recomputes_block:
                group_hit = self._first.find(request, group_hit.blocks - 1)
                if not group_hit.blocks:
                    return self._no_hit
            return Hit(group_hit.blocks * size, group_hit.blocks, group_hit.idle, (group_hit,))
        return self._find_in_all(request, most)

    def _find_in_all(self, request: Request, most: int) -> Hit:
        """A fixed point: each group may shorten the prefix, and a shorter one is looked up again."""
        while most:
            hits = []
            for group in self.groups:
                hit = group.find(request, most)
                hits.append(hit)
                if hit.blocks < most:
                    most = hit.blocks
                    break
            else:
                blocks = sum(hit.blocks for hit in hits)
                idle = sum(hit.idle for hit in hits)
                return Hit(most * self.block_size, blocks, idle, tuple(hits))
        return self._no_hit

    def fits(self, request: Request, hit: Hit, tokens: int, reserved: int = 0) -> bool:
        """Whether the first `tokens` tokens of a waiting request fit in free blocks, beside `hit`.

        `reserved` free blocks are kept for others. Cached blocks that nobody holds count as needed.
        """
        new_blocks = -(-tokens // self.block_size) * self.crossing_blocks - hit.blocks + hit.idle
        return new_blocks + reserved <= self.pool.free_blocks

    def fits_now(self, request: Request, hit: Hit, tokens: int, reserved: int = 0) -> bool:
        """Whether the blocks of the first `tokens` tokens of a waiting request are free at once."""
        return self.fits(request, hit, tokens, reserved)

    def still_needed(self, request: Request, tokens: int) -> int:
        """Blocks that a request still takes until its first `tokens` tokens are computed, beside its own."""
        return self.missing(request, tokens)

    def missing(self, request: Request, tokens: int) -> int:
        """Blocks that a request still needs so that its first `tokens` tokens have a place."""
        if self._single:
            return self._first.missing(request, tokens)
        return sum(group.missing(request, tokens) for group in self.groups)

    def may_find_more(self, request: Request, hit: Hit, *, coming: bool) -> bool:
        """Whether a waiting request's hit may grow while others only generate.

        `coming`: requests begin to generate with this step, whose content is not in the index yet.
        """
        if hit.tokens // self.block_size >= (request.known_tokens - 1) // self.block_size:
            return False
        if coming:
            return True
        return any(
            group.may_find_more(request, part) for group, part in zip(self.groups, hit.groups, strict=True)
        )

    def head_start(self, request: Request, hit: Hit) -> HeadStart:
        """Tokens beyond a waiting request's hit: of its parent, swapped out, or partly cached."""
        if request.parent is not None and (tokens := self._fork_tokens(request, request.parent, hit)):
            return HeadStart(tokens, StartKind.FORK)
        tokens = min(request.swapped_tokens, request.known_tokens - 1) - hit.tokens
        if tokens > 0 and request.swapped_tokens:
            return HeadStart(tokens, StartKind.SWAP)
        if self.partial_reuse is None or not self._single:
            return NO_START
        if self.caching:
            self._first.catch_up_after(hit.groups[0])
        return self.partial_reuse.find(request.keys, hit.groups[0], request.known_tokens)

    def _fork_tokens(self, request: Request, parent: Request, hit: Hit) -> int:
        """Tokens beyond a hit that the request's parent has in its next block: a copy of it saves them."""
        if parent.state not in (State.DECODE, State.DRAINING):
            return 0
        tokens = min(request.prompt_tokens, request.known_tokens - 1) - hit.tokens
        return tokens if 0 < tokens < self.block_size else 0

    # ---- claiming and growing

    def claim(self, request: Request, hit: Hit) -> None:
        """Gives a request, which holds nothing, the prefix found for it in the same step.

        `hit.tokens` may be more than was found: what a load is to add (see `tiers/offloading.py`).
        """
        for group, part in zip(self.groups, hit.groups, strict=True):
            group.claim(request, part)

    def grow(self, request: Request, tokens: int) -> None:
        """Takes blocks for the first `tokens` tokens; the caller checked that they are free."""
        for group in self.groups:
            group.grow(request, tokens)

    def grow_for_load(self, request: Request, tokens: int) -> None:
        """Takes blocks for the first `tokens` tokens of a request, as far as a load fills them."""
        self.grow(request, tokens)

    def grow_many(self, requests: list[Request], crossings: int) -> None:
        """Takes `crossings` blocks for generating requests that need them in this order, over and over.

        The k-th block taken goes to request k modulo their number. For requests whose keys cover their whole
        output (spans), and where no log is kept.
        """
        if not self._single:
            for request in islice(cycle(requests), crossings):
                self.grow(request, (self._first.holdings[request].end + 1) * self.block_size)
            return
        holdings = self._first.holdings
        if self.pool.ledger is None:
            blocks = self.pool.take(crossings)
        else:
            blocks = self.pool.take_in_turn(crossings, [request.tenant for request in requests])
        count = len(requests)
        if crossings == count:
            for request, block in zip(requests, blocks, strict=True):
                holdings[request].tail.blocks.append(block)  # type: ignore[union-attr]
        else:
            for i, request in enumerate(requests):
                holdings[request].tail.blocks += blocks[i::count]  # type: ignore[union-attr]

    def leave(self, request: Request, computed: int) -> None:
        """Every layer reads all blocks: none is given back before the end."""

    def generate(self, request: Request) -> None:
        """Prepares a request, whose whole prompt is planned, to take blocks for its output."""
        self.writers.add(request)
        for group in self.groups:
            group.generate(request)

    # ---- publishing and giving back

    def publish(self, request: Request, tokens: int) -> None:
        """Makes the full blocks of a request's first `tokens` tokens findable."""
        if self.caching:
            if self.key_lookahead:
                tokens = min(tokens, request.known_tokens - self.key_lookahead)
            for group in self.groups:
                group.publish(request, tokens)

    def withdraw(self, request: Request, tokens: int) -> None:
        """Makes its blocks after the first `tokens` tokens unfindable: no finished step computed them."""
        for group in self.groups:
            group.withdraw(request, tokens)

    def release(self, request: Request) -> None:
        """Gives back every block of a request. Freed content stays findable until its block is taken."""
        self.writers.remove(request)
        for group in self.groups:
            group.release(request)

    def detach(self, request: Request) -> Callable[[], None]:
        """Takes a request's blocks from it, to be given back later by what is returned.

        Until then they count as used, and their content can be found.
        """
        self.writers.remove(request)
        detached = [(group, group.detach(request)) for group in self.groups]
        holdings = [holding for _, holding in detached if holding is not None]
        self.detached += holdings

        def give_back() -> None:
            for group, holding in detached:
                if holding is not None:
                    self.detached.remove(holding)
                    group.give_back(request, holding)

        return give_back

    def evict(self, blocks: int) -> int:
        """Forgets the content of the next `blocks` free blocks (all there are, at most) in eviction order.

        They stay free, ahead of all others. Returns how many that were.
        """
        blocks = min(blocks, self.pool.free_blocks)
        if blocks:
            self.pool.empty(blocks)
        return blocks

    # ---- for a lower tier

    @property
    def null(self) -> int:
        """The number that stands in tables for blocks that are not kept."""
        return self.num_blocks

    def first_unknown(self, request: Request, group: int, cached: int, last: int) -> int:
        """The first of a table's first `last` places that a load has to fill, beyond a hit of `cached`."""
        return min(cached // self.block_size, last)

    def watch_allocations(self, *, on: bool) -> None:
        """Takes note of every block taken from now on, or of none."""
        self.pool.allocations = [] if on else None

    def take_allocations(self) -> list[int]:
        """The blocks taken since the last call, as far as they were noted."""
        allocations = self.pool.allocations
        if not allocations:
            return []
        self.pool.allocations = []
        return allocations

    # ---- stretches of decode steps

    def quiet(self, decodes: Growth, tick: int, count: int, ticks: int) -> int:
        """For how many of `ticks` decode ticks of `count` requests the free blocks are enough."""
        free = self.pool.free_blocks // self.crossing_blocks
        if (ticks // self.block_size + 1) * count <= free:
            return ticks
        return min(ticks, decodes.ticks_within(tick, free))

    def blocks_added(self, decodes: Growth, tick: int, ticks: int) -> int:
        """By how much the blocks in use grow in `ticks` decode ticks from `tick` on."""
        return decodes.crossings(tick, ticks)[1] * self.crossing_blocks

    # ---- figures

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, with cached content or without."""
        return self.pool.free_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks that some request holds."""
        return self.num_blocks - self.pool.free_blocks

    @property
    def evicted_blocks(self) -> int:
        """Blocks with findable content that were taken for other content so far."""
        return self.pool.evicted_blocks

    def eviction_figures(self) -> dict[str, object]:
        """The figures of the eviction order; empty for vLLM's."""
        return self.pool.eviction.figures()

    @property
    def ledger(self) -> TenantLedger | None:
        """The tenants' accounts; None where they are not told apart."""
        return self.pool.ledger

    def shared_tokens(self) -> int:
        """Tokens that sharing saves: those in all block tables, minus those in blocks in use."""
        if self._single:
            return self._first.shared_blocks * self.block_size
        return sum(group.shared_blocks for group in self.groups) * self.block_size

    def holds(self, request: Request) -> bool:
        """Whether a request holds any block."""
        return request in self._first.holdings

    def blocks(self, request: Request, group: int = 0) -> list[int]:
        """A request's block table in one group: block numbers in sequence order."""
        holding = self.groups[group].holdings.get(request)
        return [] if holding is None else holding.blocks()

    def last_block(self, request: Request, group: int = 0) -> int:
        """The newest block of a generating request's table. O(1)."""
        return self.groups[group].holdings[request].last_block

    def findable_blocks(self) -> set[int]:
        """Every block whose content can be found. Linear in what is cached; for displays."""
        return self.pool.index.blocks()
