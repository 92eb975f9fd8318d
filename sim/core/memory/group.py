"""KV groups: layers whose KV is kept alike. `FullGroup` keeps the KV of every token.

A group turns positions in a sequence into runs of blocks. It decides nothing about requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from pagecast.sim.core.events import EventKind, EventLog
from pagecast.sim.core.group_spec import GroupSpec, KvKind
from pagecast.sim.core.kv_events import KvEventStream
from pagecast.sim.core.memory.holding import Holding, split_parts
from pagecast.sim.core.memory.pool import BlockPool
from pagecast.sim.core.memory.run import Run, Writer
from pagecast.sim.core.request import Request
from pagecast.sim.core.retention import BlockRange, Keep

Progress = Callable[[Request], int]
"""How many of a generating request's tokens may be published now."""


class GroupHit(NamedTuple):
    """A cached prefix in one group: pieces `(run, low, high)`, `blocks` in all, `idle` of them free."""

    pieces: list[tuple[Run, int, int]]
    blocks: int
    idle: int


NOTHING = GroupHit([], 0, 0)


class Group(Protocol):
    """Protocol of a group, as `KvMemory` uses it. All groups of a replica take their blocks from one pool.

    `KvMemory` counts on one block per `block_size` tokens in each group (`fits`, `quiet`, `crossing_blocks`).
    """

    holdings: dict[Request, Holding]
    shared_blocks: int

    def find(self, request: Request, most_blocks: int) -> GroupHit:
        """The longest cached prefix of at most so many blocks."""

    def missing(self, request: Request, tokens: int) -> int:
        """Blocks to be taken so that the first `tokens` tokens have a place."""

    def catch_up_after(self, hit: GroupHit) -> None:
        """Publishes what generating requests have computed by now of the runs that follow a hit."""

    def may_find_more(self, request: Request, hit: GroupHit) -> bool:
        """Whether the hit may grow while others only generate."""

    def claim(self, request: Request, hit: GroupHit) -> None:
        """Gives a request, which holds nothing, the prefix that was found for it in the same step."""

    def grow(self, request: Request, tokens: int) -> list[int]:
        """Takes the missing blocks for the first `tokens` tokens and returns them."""

    def take_over(self, request: Request, run: Run) -> None:
        """Gives a request the last block of a cached run, which nobody holds, as its next one."""

    def generate(self, request: Request) -> None:
        """Prepares a request whose prompt is planned for the blocks of its output."""

    def publish(self, request: Request, tokens: int) -> None:
        """Makes the full blocks of the first `tokens` tokens findable."""

    def withdraw(self, request: Request, tokens: int) -> None:
        """Makes its blocks after the first `tokens` tokens unfindable, but for those that readers hold."""

    def release(self, request: Request) -> None:
        """Gives back every block, the last first."""

    def detach(self, request: Request) -> Holding | None:
        """Takes a request's blocks from it without giving them back; `give_back` has to follow."""
        ...

    def give_back(self, request: Request, holding: Holding) -> None:
        """Gives back the blocks that a request has held, the last first."""


class FullGroup:
    """KV of layers that attend to the whole sequence: one block per `block_size` tokens.

    `index` is the group's number in its memory (`pool.index` is the prefix index). Equal content in different
    groups has different keys.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, *, caching: bool, progress: Progress, index: int = 0
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.caching = caching
        self.holdings: dict[Request, Holding] = {}
        self.shared_blocks = 0  # table entries minus blocks in use: what sharing saves
        self.log: EventLog = pool.log
        self._progress = progress
        self._requests: dict[Writer, Request] = {}  # those that generate, by what they hold
        self.index = index
        self._mark = bytes([index]) if index else b""
        self._spec = GroupSpec(KvKind.FULL, block_size)
        # Whether the tree is kept: eviction orders need it, and partial reuse.
        self._rooted = not pool.eviction.leaves_first or pool.partial_reuse
        self._timed = pool.eviction.timed is not None

    def _run(self, key: bytes | None, position: int, blocks: list[int], holding: Holding) -> Run:
        """A new run that a holding writes: in the tree behind its last one, where the tree is kept."""
        if not self._rooted:
            run = Run(key, position, blocks, holding)
            if self.pool.ledger is not None and position >= holding.keys.public_blocks:
                run.tenant = holding.tenant
            return run
        run = Run(key, position, blocks, holding, holding.last_run)
        run.keys = holding.keys if self.pool.partial_reuse else None
        if position >= holding.keys.public_blocks:
            run.tenant = holding.tenant
        self.pool.births += 1
        run.born = self.pool.births
        return run

    # ---- finding

    def find(self, request: Request, most_blocks: int) -> GroupHit:
        """The longest cached prefix of at most `most_blocks` blocks. O(segments), not O(blocks)."""
        first_of = self.pool.index.first
        mark = self._mark
        keys = request.keys
        digests = keys.digests
        if not digests or digests[0] + mark not in first_of:
            return NOTHING
        pieces: list[tuple[Run, int, int]] = []
        position = 0
        idle = 0
        for segment, digest in enumerate(digests):
            end = min(keys.ends[segment], most_blocks)
            if position >= most_blocks:
                break
            first = first_of.get(digest + mark)
            while position < end:
                run = first
                cover = 0
                while run is not None:
                    if run.writer is not None and run.writer.generating:
                        self._catch_up(run.writer)
                    cover = run.start + run.published
                    if run.start <= position < cover:
                        break
                    run = run.next
                if run is None:
                    return GroupHit(pieces, position, idle) if position else NOTHING
                low = position - run.start
                high = min(cover, end) - run.start
                pieces.append((run, low, high))
                idle += max(0, high - max(run.owned(), low))
                position = run.start + high
        return GroupHit(pieces, position, idle)

    def _catch_up(self, writer: Writer) -> None:
        """Publishes what a generating request has computed by now."""
        request = self._requests[writer]
        self.publish(request, self._progress(request))

    def catch_up_after(self, hit: GroupHit) -> None:
        """Publishes what generating requests have computed by now of the runs that follow a hit."""
        if not hit.pieces:
            return
        last, _, _ = hit.pieces[-1]
        children = last.children
        if not children:
            return
        # A prompt that all begin with has a child per request, and few of these still generate.
        if len(children) < len(self._requests):
            writers = [run.writer for run in children if run.writer is not None and run.writer.generating]
        else:
            writers = [each for each in self._requests if any(run.parent is last for run in each.own)]
        for writer in writers:
            self._catch_up(writer)

    def may_find_more(self, request: Request, hit: GroupHit) -> bool:
        """Whether the hit may grow while others only generate: one of them writes the next segment."""
        keys = request.keys
        if keys.explicit:
            return bool(self._requests)
        segment = next(i for i, end in enumerate(keys.ends) if hit.blocks < end)
        key = keys.digests[segment] + self._mark
        return any(run.writer is not None for run in self.pool.index.chain(key))

    # ---- claiming and growing

    def claim(self, request: Request, hit: GroupHit) -> None:
        """Gives a request, which holds nothing, the prefix that was found for it in the same step."""
        pool = self.pool
        keys = request.keys
        holding = self._open(request)
        for first, low, high in hit.pieces:
            run = first
            if low:
                run = pool.split(first, low)
                high -= low
            self.shared_blocks += high - pool.hold(run, high)
            holding.prefix.append((run, high))
        holding.prefix_blocks = hit.blocks
        segment = 0
        while segment < len(keys.ends) and keys.ends[segment] <= hit.blocks:
            segment += 1
        holding.segment = segment
        if self._timed:
            self._end_durations(holding)
        if holding.retention is not None:
            self._retain(holding, holding.retention)
        if self.log.events is not None and hit.blocks:
            self.log.add(EventKind.REUSED, request.id, holding.blocks())

    def missing(self, request: Request, tokens: int) -> int:
        """Blocks to be taken so that the first `tokens` tokens have a place."""
        holding = self.holdings.get(request)
        held = 0 if holding is None else holding.end
        return max(-(-tokens // self.block_size) - held, 0)

    def grow(self, request: Request, tokens: int) -> list[int]:
        """Takes the missing blocks for the first `tokens` tokens; the caller checked that they are free."""
        holding = self.holdings.get(request)
        if holding is None:
            holding = self._open(request)
        tail = holding.tail
        held = holding.prefix_blocks if tail is None else tail.start + len(tail.blocks)
        missing = -(-tokens // self.block_size) - held
        if missing <= 0:
            return []
        if self.pool.ledger is not None:
            self.pool.ledger.taker = request.tenant
        blocks = self.pool.take(missing)
        if self.log.events is not None:
            self.log.add(EventKind.ALLOCATED, request.id, blocks)
        self._place(holding, held, blocks)
        return blocks

    def take_over(self, request: Request, run: Run) -> None:
        """Gives a request the last block of a cached run, which nobody holds, as its next one."""
        holding = self.holdings[request]
        while run.rest is not None and holding.end >= run.end:
            run = run.rest  # split while the prefix was claimed
        blocks = self.pool.take_last(run)
        if self.log.events is not None:
            self.log.add(EventKind.ALLOCATED, request.id, blocks)
        self._place(holding, holding.end, blocks)

    def _open(self, request: Request) -> Holding:
        """A holding for a request that has none."""
        keeps = None
        if request.retention is not None and self._rooted:
            keeps = request.retention.of_blocks(self.block_size, request.prompt_tokens)
        holding = self.holdings[request] = Holding(request.keys, keeps, request.tenant)
        return holding

    def _end_durations(self, holding: Holding) -> None:
        """Lets the priorities of a claimed prefix last, unless its new holder asks for an end again.

        As `claimBlock` of TensorRT-LLM, which keeps a priority that is not asked for anew, but no duration.
        """
        for part, count in list(holding.prefix_parts()):
            keep = part.keep
            if keep is not None and keep.duration_ns is not None:
                if count < len(part.blocks):
                    self.pool.split(part, count)
                part.keep = Keep(keep.priority)

    def _retain(self, holding: Holding, retention: tuple[BlockRange, ...]) -> None:
        """Gives the blocks of a claimed prefix the priorities that their new holder asks for."""
        for first, end, keep in retention:
            if keep is None or first >= holding.prefix_blocks:
                continue
            for part, count in list(holding.prefix_parts()):
                low = max(first, part.start)
                high = min(end, part.start + count)
                if low >= high:
                    continue
                run = self.pool.split(part, low - part.start) if low > part.start else part
                if high < run.end:
                    self.pool.split(run, high - run.start)
                run.keep = keep

    def _place(self, holding: Holding, position: int, blocks: list[int]) -> None:
        """Puts blocks at the end of a holding, in a run for each segment and retention they reach into."""
        if holding.retention is None:
            self._place_alike(holding, position, blocks, None)
            return
        used = 0
        for first, end, keep in holding.retention:
            count = min(end, position + len(blocks)) - max(first, position)
            if count > 0:
                part = blocks[used : used + count]
                self._place_alike(holding, max(first, position), part, keep)
                used += count

    def _place_alike(self, holding: Holding, position: int, blocks: list[int], keep: Keep | None) -> None:
        keys = holding.keys
        if keys.explicit:
            self._place_singly(holding, position, blocks, keep)
            return
        last = position + len(blocks)
        segment = holding.segment
        used = 0
        while position < last:
            end = keys.ends[segment]
            key = keys.digests[segment] + self._mark
            if end > last:
                end = last
            else:
                holding.segment = segment = segment + 1
            part = blocks[used : used + end - position]
            used += end - position
            tail = holding.tail
            if tail is not None and tail.key == key and tail.end == position and tail.keep == keep:
                tail.blocks += part
            else:
                tail = self._run(key, position, part, holding)
                tail.keep = keep
                holding.append_run(tail)
            position = end

    def _place_singly(self, holding: Holding, position: int, blocks: list[int], keep: Keep | None) -> None:
        """As `_place_alike`, for token ids: a block is a segment, and its key may not be known yet."""
        digests = holding.keys.digests
        for block in blocks:
            key = digests[position] + self._mark if position < len(digests) else None
            run = self._run(key, position, [block], holding)
            run.keep = keep
            holding.append_run(run)
            position += 1
            if key is not None:
                holding.segment = position

    def generate(self, request: Request) -> None:
        """Prepares a request whose prompt is planned for the blocks of its output.

        The run its output goes to is in the index from now on, as far as it is published.
        """
        holding = self.holdings[request]
        holding.generating = True
        self._requests[holding] = request
        keys = holding.keys
        if keys.explicit:
            return
        tail = holding.tail
        key = keys.digests[-1] + self._mark
        keep = None if holding.retention is None else holding.retention[-1].keep
        if tail is None or tail.key != key or tail.keep != keep:
            tail = self._run(key, holding.end, [], holding)
            tail.keep = keep
            holding.append_run(tail)
        if self.caching and not tail.indexed:
            self.pool.index.add(tail)

    # ---- publishing

    def publish(self, request: Request, tokens: int) -> None:
        """Makes the full blocks of the first `tokens` tokens findable.

        Only its own runs change: its cached prefix is published already. With token ids a block's key may
        become known only now.
        """
        holding = self.holdings.get(request)
        if not self.caching or holding is None:
            return
        full = tokens // self.block_size
        own = holding.own
        # The first own run with blocks to publish. Runs are published in order, so look from the last back.
        first = at = len(own)
        while at:
            at -= 1
            run = own[at]
            if full > run.start + run.published < run.start + len(run.blocks):
                first = at
            elif run.published:
                break
        index = self.pool.index
        heard = self.pool.tells_stored
        stored: list[tuple[int, list[int]]] = []  # blocks that somebody hears of, with the first one's number
        for run in own[first:]:
            start = run.start
            if full <= start:
                break
            key = run.key
            if key is None:
                key = run.key = holding.keys.digests[start] + self._mark
            before = run.published
            run.published = min(full - start, len(run.blocks))
            if not run.indexed:
                index.add(run)
            if run.next is not None or index.first[key] is not run:
                self._overtake(run)
            if heard:
                stored.append((start + before, self._tell_stored(request, run, before)))
        if stored and self.log.kv is not None:
            self._tell_all_stored(self.log.kv, request, stored)

    def _tell_stored(self, request: Request, run: Run, before: int) -> list[int]:
        """Tells watcher and log of blocks just published: those of a run after the first `before`."""
        watcher = self.pool.watcher
        if watcher is not None and run.key is not None and run.published > before:
            watcher.stored(run.key, run.start + before, run.start + run.published)
        blocks = run.blocks[before : run.published]
        if self.log.events is not None:
            self.log.add(EventKind.STORED, request.id, blocks, group=self.index)
        return blocks

    def _tell_all_stored(
        self, kv: KvEventStream, request: Request, stored: list[tuple[int, list[int]]]
    ) -> None:
        """Tells the stream of KV events of all blocks of a request that were published together."""
        numbers = [number for number, blocks in stored if blocks]
        if numbers:
            blocks = [block for _, part in stored for block in part]
            first = numbers[0]
            last = first + len(blocks)
            kv.stored(request, first, last, list(range(first, last)), blocks, self.index, self._spec)

    def _overtake(self, run: Run) -> None:
        """Moves what others still have to fill under this key behind what `run` has just published.

        Several requests may write blocks of equal content, and of these the one published first must be
        found. But a generating request's last run is in the index before its blocks are full, so it may
        stand ahead of `run` with blocks that it will publish only later: that part goes to the end.
        """
        assert run.key is not None
        index = self.pool.index
        for other in list(index.chain(run.key)):
            writer = other.writer
            if writer is None or writer is run.writer or writer.tail is not other:
                continue
            if writer.generating:
                self._catch_up(writer)
            late = self.pool.split(other, other.published) if other.published else other
            index.remove(late)
            index.add(late)

    def withdraw(self, request: Request, tokens: int) -> None:
        """Makes its blocks after the first `tokens` tokens unfindable: no finished step computed them.

        What another request claimed in the meantime stays: the plan that fills it comes before its own.
        """
        holding = self.holdings.get(request)
        if holding is None:
            return
        full = tokens // self.block_size
        for run in holding.own:
            reach = max(full - run.start, max(run.held) if run.held else 0, 0)
            if run.published > reach:
                self.pool.unpublish(run, reach)

    # ---- giving back

    def release(self, request: Request) -> None:
        """Gives back every block, the last first."""
        holding = self.holdings.pop(request, None)
        if holding is not None:
            self.give_back(request, holding)

    def detach(self, request: Request) -> Holding | None:
        """Takes a request's blocks from it without giving them back; `give_back` has to follow."""
        holding = self.holdings.pop(request, None)
        if holding is not None and holding.generating:
            del self._requests[holding]
            holding.generating = False
        return holding

    def give_back(self, request: Request, holding: Holding) -> None:
        """Gives back the blocks that a request has held, the last first."""
        if holding.generating:
            del self._requests[holding]
        pool = self.pool
        free = pool.free_blocks
        held = 0
        blanks: list[list[int]] = []
        for run in reversed(holding.own):
            held += len(run.blocks)
            blank = pool.give_back(run)
            if blank is not None:
                blanks.append(blank)
        if holding.prefix:
            held += holding.prefix_blocks
            for run, length in reversed(holding.prefix):
                if length <= len(run.blocks):
                    pool.drop(run, length)
                    continue
                for part, count in reversed(list(split_parts(run, length))):
                    pool.drop(part, count)
        if blanks:
            pool.free_first(blanks)
        if pool.freed:
            self.log.add(EventKind.FREED, request.id, pool.freed)
            pool.freed = []
        self.shared_blocks -= held - (pool.free_blocks - free)
