"""Memory: the one door to a replica's blocks.

Rules and the request life cycle ask here, and nowhere else, which prefixes are cached, which requests fit and
which blocks they hold. Behind the door is one of these:

    KvMemory   groups of layers, each of which keeps its tokens: extents of blocks from one pool
    RadixMemory    SGLang: pages without numbers, and a radix tree

A memory declares the protocol as its base and implements all of it. Of a request it is asked, in this order,
`find`, `fits`, `claim`, then `grow` and `publish` for each chunk; `generate` once the prompt is planned, then
`grow` or `grow_many` and `publish` for the output; `release` at the end, or when the request is preempted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pagecast.sim.core.memory.eviction import TimedEviction
from pagecast.sim.core.memory.head_start import HeadStart
from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.memory.output_writers import OutputWriters
from pagecast.sim.core.memory.partial_reuse import PartialReuse
from pagecast.sim.core.memory.tenant_ledger import TenantLedger
from pagecast.sim.core.memory.watcher import Watcher
from pagecast.sim.core.request import Request


class Growth(Protocol):
    """Decoding requests, as far as their need of blocks goes (`Decoders`)."""

    @property
    def requests(self) -> Iterable[Request]:
        """The requests."""
        ...

    def ticks_within(self, tick: int, crossings: int) -> int:
        """How many ticks from `tick` on have at most so many block boundaries together."""

    def crossings(self, tick: int, steps: int) -> tuple[list[Request], int]:
        """The requests in the order in which they begin blocks, and how many they begin in so many ticks."""


class Memory(Protocol):
    """The blocks of one replica. `block_size`: tokens for each block key; of a plain model, of each block.

    `caching`: whether content may be found again. `crossing_blocks`: blocks that a request takes at most when
    it begins one, in all groups together. `recomputes_block`: every hit leaves out its last block. `writers`:
    the requests that generate, by content; empty where commits publish.
    `partial_reuse`, `expiry`: what serves partly matching blocks, and retention that ends with time; None:
    there is none. `step_end`: the tokens that a step computes up to, where it asks for blocks of more for
    what drafts read. `untold`: why a watcher does not hear of all content; empty where it does.
    """

    num_blocks: int
    block_size: int
    caching: bool
    crossing_blocks: int
    recomputes_block: bool
    writers: OutputWriters
    partial_reuse: PartialReuse | None
    expiry: TimedEviction | None
    step_end: int
    untold: str

    # ---- set-up

    def leave_out_last_blocks(self) -> None:
        """From now on every hit leaves out its last block, in every group (see `Drafter`)."""

    def watch(self, watcher: Watcher) -> None:
        """Tells a watcher from now on which content can be found. To be called before the first request.

        Errors: BadInput for a memory that can't, or not of all content that a prefix is found by.
        """

    # ---- finding

    def find(self, request: Request) -> Hit:
        """The longest cached prefix that all groups have; the last known token is always left to compute."""
        ...

    def find_whole(self, request: Request) -> Hit:
        """As `find`, with a block that the last known token ends, where the memory tells them apart."""
        return self.find(request)

    def fits(self, request: Request, hit: Hit, tokens: int, reserved: int = 0) -> bool:
        """Whether the first `tokens` tokens of a waiting request fit in free blocks, beside `hit`.

        The tokens may take several steps. Of a group whose blocks leave meanwhile, no more count than a
        request ever holds (`GroupSpec.most_blocks`). `reserved` free blocks are kept for others. Cached
        blocks that nobody holds count as needed.
        """

    def fits_now(self, request: Request, hit: Hit, tokens: int, reserved: int = 0) -> bool:
        """As `fits`, where one step takes all blocks of the first `tokens` tokens: without that cap."""

    def missing(self, request: Request, tokens: int) -> int:
        """Blocks that a request still needs so that its first `tokens` tokens have a place."""

    def refusal_may_change(self, request: Request, hit: Hit, *, coming: bool) -> bool:
        """Whether a waiting request that was refused may find or need something else while others only
        generate. `coming`: requests begin to generate with this step, whose content can't be found yet.
        """

    def head_start(self, request: Request, hit: Hit) -> HeadStart:
        """Tokens beyond a waiting request's hit that need not be computed: of its parent, swapped out, or
        partly cached."""

    # ---- holding

    def claim(self, request: Request, hit: Hit) -> None:
        """Gives a request, which holds nothing, the prefix found for it in the same step.

        `hit.tokens` may be more than was found: a load is to add the rest (`tiers/offloading.py`).
        """

    def grow(self, request: Request, tokens: int) -> None:
        """Takes blocks for the first `tokens` tokens; the caller checked that they are free."""

    def grow_many(self, requests: list[Request], crossings: int) -> None:
        """Takes `crossings` blocks for generating requests that need them in this order, over and over.

        The k-th block taken goes to request k modulo their number. For requests whose keys cover their whole
        output (spans), and where no log is kept.
        """

    def leave(self, request: Request, computed: int) -> None:
        """Gives back the blocks that no layer reads once `computed` tokens are computed."""

    def generate(self, request: Request) -> None:
        """Prepares a request, whose whole prompt is planned, to take blocks for its output."""

    def publish(self, request: Request, tokens: int) -> None:
        """Makes the full blocks of a request's first `tokens` tokens findable."""

    def withdraw(self, request: Request, tokens: int) -> None:
        """Makes its blocks after the first `tokens` tokens unfindable: no finished step computed them."""

    def release(self, request: Request) -> None:
        """Gives back every block of a request. Freed content stays findable until its block is taken."""

    def evict(self, blocks: int) -> int:
        """Forgets the content of the next `blocks` free blocks (all there are, at most) in eviction order.

        They stay free, ahead of all others. Returns how many that were.
        """

    # ---- stretches of decode steps

    def quiet(self, decodes: Growth, tick: int, count: int, ticks: int) -> int:
        """For how many of `ticks` decode ticks of `count` requests the free blocks are surely enough."""

    def blocks_added(self, decodes: Growth, tick: int, ticks: int) -> int:
        """By how much the blocks in use grow in `ticks` decode ticks from `tick` on."""

    # ---- figures

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, with cached content or without."""

    @property
    def used_blocks(self) -> int:
        """Blocks that some request holds."""

    @property
    def evicted_blocks(self) -> int:
        """Blocks with findable content that were taken for other content so far."""

    @property
    def ledger(self) -> TenantLedger | None:
        """The tenants' accounts; None where they are not told apart."""
        return None

    def eviction_figures(self) -> dict[str, object]:
        """The figures of the eviction order; empty for one that has none."""
        return {}

    def shared_tokens(self) -> int:
        """Tokens that sharing saves: those in all block tables, minus those in blocks in use."""

    def holds(self, request: Request) -> bool:
        """Whether a request holds any block."""

    # ---- numbers of blocks; where blocks have none, these are empty

    def blocks(self, request: Request, group: int = 0) -> list[int]:
        """A request's block table in one group: block numbers in sequence order."""

    def last_block(self, request: Request, group: int = 0) -> int:
        """The newest block of a generating request's table. O(1)."""

    def findable_blocks(self) -> set[int]:
        """Every block whose content can be found. Linear in what is cached; for displays."""
