"""KV memory as SGLang keeps it: pages of running requests, and a radix tree of all that was computed before.

A request locks the path of its cached prefix and owns the pages
that it computes. What it has computed is inserted in the tree at certain points (`publish`), and is locked
instead of owned from then on; of two equal pages the one in the tree stays. A page is free, owned or in the
tree, where it is locked or may be evicted. Pages have no numbers: which of them holds what decides nothing.

Source: SGLang 0.5.23, srt/mem_cache/unified_radix_cache.py, common.py, allocation.py and allocator/.
"""

from __future__ import annotations

from pagecast.sim.core.engines.sglang.tree import Match, Node, RadixTree, leaf_order
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import EventKind, EventLog
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.eviction import TimedEviction
from pagecast.sim.core.memory.head_start import NO_START, HeadStart
from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.memory.memory import Growth, Memory
from pagecast.sim.core.memory.output_writers import OutputWriters
from pagecast.sim.core.memory.partial_reuse import PartialReuse
from pagecast.sim.core.memory.watcher import Watcher
from pagecast.sim.core.request import Request

_NO_HIT = Hit(0)


class Held:
    """The pages of one request: the locked `node`, `shared` pages up to it, and `pages` in all.

    `inserted` is how many of its pages it has put in the tree so far, or found there.
    """

    __slots__ = ("inserted", "node", "pages", "shared")

    def __init__(self, node: Node, shared: int) -> None:
        self.node = node
        self.shared = shared
        self.pages = shared
        self.inserted = 0


class RadixMemory(Memory):
    """The pages of one replica, `block_size` tokens each.

    `free` pages hold nothing that can be found; `evictable` ones are in the tree, and nobody uses them.
    """

    def __init__(self, limits: Limits, log: EventLog, order: str) -> None:
        self.num_blocks = limits.num_blocks
        self.block_size = limits.block_size
        self.caching = limits.caching
        self.log = log
        self.writers = OutputWriters()  # stays empty: commits publish
        self.recomputes_block = False
        self.crossing_blocks = 1
        self.partial_reuse: PartialReuse | None = None
        self.expiry: TimedEviction | None = None
        self.step_end = 0
        self.untold = "content is in a radix tree, not in blocks"
        self.free = limits.num_blocks
        self.tree = RadixTree(leaf_order(order))
        self.least_recent = order == "lru"
        self.held: dict[Request, Held] = {}
        self._evicted = 0
        self._shared = 0  # locked pages, counted once for each request that has locked them

    def watch(self, watcher: Watcher) -> None:
        """Errors: BadInput, always."""
        raise BadInput(self.untold)

    def leave_out_last_blocks(self) -> None:
        """From now on every hit leaves out its last block: no drafter of SGLang's asks for that."""
        self.recomputes_block = True

    # ---- finding

    def match(self, request: Request, tokens: int) -> Match:
        """The cached prefix of a waiting request's first `tokens` tokens; it counts as just used."""
        if not self.caching:
            return Match(self.tree.root, 0)
        return self.tree.match(request.keys, tokens // self.block_size)

    def find(self, request: Request) -> Hit:
        """The longest cached prefix; the last known token is always left to compute."""
        pages = self.match(request, request.known_tokens - 1).pages
        return Hit(pages * self.block_size) if pages else _NO_HIT

    def room_beside(self, node: Node) -> int:
        """Tokens that could be allocated, by evicting if need be, once a node is locked."""
        pages = self.free + self.tree.evictable - self.tree.unlocked_pages(node)
        return pages * self.block_size

    @property
    def room_tokens(self) -> int:
        """Tokens that could be allocated now, by evicting if need be."""
        return (self.free + self.tree.evictable) * self.block_size

    def fits(self, request: Request, hit: Hit, tokens: int, reserved: int = 0) -> bool:
        """Whether the first `tokens` tokens of a waiting request fit in free and evictable pages."""
        return -(-tokens // self.block_size) - hit.tokens // self.block_size + reserved <= self.free_blocks

    def fits_now(self, request: Request, hit: Hit, tokens: int, reserved: int = 0) -> bool:
        """Whether the pages of the first `tokens` tokens of a waiting request are free or can be evicted."""
        return self.fits(request, hit, tokens, reserved)

    def missing(self, request: Request, tokens: int) -> int:
        """Pages that a request still needs so that its first `tokens` tokens have a place."""
        held = self.held.get(request)
        return max(-(-tokens // self.block_size) - (held.pages if held is not None else 0), 0)

    def refusal_may_change(self, request: Request, hit: Hit, *, coming: bool) -> bool:
        """True, for what others compute is in the tree before they are done."""
        return True

    def head_start(self, request: Request, hit: Hit) -> HeadStart:
        """No tokens: pages are neither copied, swapped nor reused in part."""
        return NO_START

    # ---- claiming and growing

    def hold(self, request: Request, match: Match) -> None:
        """Locks the prefix found for a request, which holds nothing."""
        self.tree.lock(match.node)
        self.held[request] = Held(match.node, match.pages)
        self._shared += match.pages

    def claim(self, request: Request, hit: Hit) -> None:
        """Holds the prefix, looked up again, unless the request holds it already (`hold`)."""
        if request not in self.held:
            self.hold(request, self.match(request, hit.tokens))

    def make_room(self, tokens: int) -> bool:
        """Evicts leaves until `tokens` tokens are free; False where too many are in use."""
        size = self.block_size
        if self.free * size >= tokens or not self.caching:
            return self.free * size >= tokens
        while self.free * size < tokens:
            leaf = self.tree.evict()
            if leaf is None:
                return False
            self.free += leaf.pages
            self._evicted += leaf.pages
            self.log.add(EventKind.EVICTED, "", detail=f"blocks={leaf.pages}")
        return True

    def grow(self, request: Request, tokens: int) -> None:
        """Takes free pages for a request's first `tokens` tokens; the caller made room for them."""
        held = self.held.get(request)
        if held is None:
            held = self.held[request] = Held(self.tree.root, 0)
        pages = -(-tokens // self.block_size)
        if pages > held.pages:
            self.free -= pages - held.pages
            held.pages = pages

    def take(self, pages: int) -> None:
        """Takes free pages for decoding requests; `Held.pages` learns of it with the next `settle`."""
        self.free -= pages

    def settle(self, request: Request, tokens: int) -> None:
        """Takes note that a request holds pages for `tokens` tokens, all of which were taken before."""
        held = self.held[request]
        held.pages = max(held.pages, -(-tokens // self.block_size))

    def grow_many(self, requests: list[Request], crossings: int) -> None:
        """Takes free pages for decoding requests, which learn of them with the next `settle`."""
        self.take(crossings)

    def leave(self, request: Request, computed: int) -> None:
        """Every layer reads all pages: none is given back before the end."""

    def generate(self, request: Request) -> None:
        """Leaves a generating request alone until it ends."""

    # ---- publishing and giving back

    def publish(self, request: Request, tokens: int) -> None:
        """Inserts the full pages of a request's first `tokens` tokens in the tree, and locks them there.

        A prompt is kept apart from what follows it, so that the output can be evicted without it.
        """
        if not self.caching or tokens <= 0:
            return
        held = self.held[request]
        pages = tokens // self.block_size
        if pages < held.shared:
            return  # it is cancelled with a chunk in flight: what is in the tree stays there
        inserted = self.tree.insert(request.keys, pages, held.shared, held.inserted, request.priority)
        self.free += inserted.freed
        added = pages - held.shared - inserted.freed
        held.inserted = max(held.inserted, pages)
        prompt = request.prompt_tokens // self.block_size
        if 0 < prompt < pages:
            self.tree.insert(request.keys, prompt, prompt, prompt, request.priority + 1)
        self.tree.unlock(held.node)
        # The end of what was inserted: a node that ends there exists, and the split may have moved it.
        held.node = inserted.node
        self.tree.lock(held.node)
        self._shared += pages - held.shared
        held.shared = pages
        if added and self.log.events is not None:
            self.log.add(EventKind.STORED, request.id, detail=f"blocks={added}")

    def withdraw(self, request: Request, tokens: int) -> None:
        """Leaves the tree as it is: what is in it was computed, or will be before it is read."""

    def release(self, request: Request) -> None:
        """Gives back every page of a request. What is in the tree stays there until it is evicted."""
        held = self.held.pop(request, None)
        if held is None:
            return
        pages = max(held.pages, -(-request.computed_tokens // self.block_size))
        self.free += pages - held.shared
        self._shared -= held.shared
        self.tree.unlock(held.node)

    def evict(self, blocks: int) -> int:
        """Evicts leaves until `blocks` pages are evicted, or all there are. Returns how many that were."""
        evicted = 0
        while evicted < blocks:
            leaf = self.tree.evict()
            if leaf is None:
                break
            evicted += leaf.pages
        self.free += evicted
        return evicted

    # ---- stretches of decode steps

    def quiet(self, decodes: Growth, tick: int, count: int, ticks: int) -> int:
        """For how many of `ticks` decode ticks of `count` requests nothing has to be evicted.

        SGLang wants a free page for each of them in every step, whether or not it begins one.
        """
        spare = self.free - count
        if spare < 0:
            return 0
        if (ticks // self.block_size + 1) * count <= spare:
            return ticks
        return min(ticks, decodes.ticks_within(tick, spare) + 1)

    def blocks_added(self, decodes: Growth, tick: int, ticks: int) -> int:
        """By how much the pages in use grow in `ticks` decode ticks from `tick` on."""
        return decodes.crossings(tick, ticks)[1]

    # ---- figures

    @property
    def free_blocks(self) -> int:
        """Pages that nobody uses, with cached content or without."""
        return self.free + self.tree.evictable

    @property
    def used_blocks(self) -> int:
        """Pages that some request owns or has locked."""
        return self.num_blocks - self.free - self.tree.evictable

    @property
    def evicted_blocks(self) -> int:
        """Pages with findable content that were evicted so far."""
        return self._evicted

    def shared_tokens(self) -> int:
        """Tokens that sharing saves: those that requests have locked, minus those that are locked."""
        return (self._shared - self.tree.locked) * self.block_size

    def holds(self, request: Request) -> bool:
        """Whether a request holds any page."""
        return request in self.held

    def blocks(self, request: Request, group: int = 0) -> list[int]:
        """An empty table: pages have no numbers."""
        return []

    def last_block(self, request: Request, group: int = 0) -> int:
        """Errors: NotImplementedError, for pages have no numbers."""
        raise NotImplementedError("pages of a radix tree have no numbers")

    def findable_blocks(self) -> set[int]:
        """An empty set: pages have no numbers."""
        return set()
