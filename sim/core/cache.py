"""The KV cache manager: what a request finds, gets and gives back.

It turns positions in a sequence into runs of blocks. How many tokens a request computes, and who has to
go when blocks run out, is the scheduler's business.
"""

from __future__ import annotations

from typing import NamedTuple

from pagecast.sim.core.events import Event, EventKind
from pagecast.sim.core.pool import BlockPool
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.runs import Run


class Hit(NamedTuple):
    """A cached prefix: pieces `(run, low, high)` in order, `blocks` in all, `idle` of them free now."""

    pieces: list[tuple[Run, int, int]]
    blocks: int
    idle: int


NO_HIT = Hit([], 0, 0)
_GENERATING = (State.DECODE, State.DRAINING)


class KVCacheManager:
    """Blocks and prefix reuse for one KV group of one replica.

    `block_size` in tokens. `caching`: whether finished content may be found again.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool = True, unfindable_first: bool = True
    ) -> None:
        self.block_size = block_size
        self.caching = caching
        self.pool = BlockPool(num_blocks, unfindable_first=unfindable_first and caching)
        self.shared_blocks = 0  # how many more blocks the tables would hold if none were in two of them
        self.settle = _no_writer  # brings a decoding writer's `published` up to date

    # ---- lookup

    def lookup(self, request: Request) -> Hit:
        """The longest cached prefix, in whole blocks; the last known token is always left to compute."""
        if not self.caching:
            return NO_HIT
        limit = (request.known - 1) // self.block_size
        index = self.pool.index
        keys = request.keys
        pieces: list[tuple[Run, int, int]] = []
        position = idle = 0
        for segment, key in enumerate(keys.digests):
            end = min(keys.ends[segment], limit)
            if position >= limit:
                break
            first = index.get(key)
            while position < end:
                run = first
                cover = 0
                while run is not None:
                    if run.writer is not None and run.writer.state in _GENERATING:
                        self.settle(run.writer)
                    cover = run.start + run.published
                    if run.start <= position < cover:
                        break
                    run = run.next
                if run is None:
                    return Hit(pieces, position, idle)
                low, high = position - run.start, min(cover, end) - run.start
                pieces.append((run, low, high))
                idle += max(0, high - max(run.owned(), low))
                position = run.start + high
        return Hit(pieces, position, idle)

    def shared(self, request: Request, hit: Hit) -> int:
        """Tokens beyond a hit that the request's parent has in its next block: a copy of it saves them."""
        parent = request.parent
        if parent is None or parent.state not in (State.DECODE, State.DRAINING):
            return 0
        tokens = min(request.prompt_tokens, request.known - 1) - hit.blocks * self.block_size
        return tokens if 0 < tokens < self.block_size else 0

    def reuse(self, request: Request, hit: Hit) -> None:
        """Gives a request the cached prefix that `lookup` found, in the same step."""
        pool = self.pool
        table = request.table
        for found, low, high in hit.pieces:
            run = found
            if low:
                writer = run.writer
                run = pool.split(run, low)
                high -= low
                if writer is not None and writer.tail is found:
                    writer.tail = run
            self.shared_blocks += high - pool.hold(run, high)
            table.append((run, high))
        request.table_blocks = hit.blocks
        request.segment = 0
        ends = request.keys.ends
        while request.segment < len(ends) and ends[request.segment] <= hit.blocks:
            request.segment += 1
        if pool.events is not None and hit.blocks:
            self._log(EventKind.REUSED, request, request.blocks())

    # ---- growing

    def allocate(self, request: Request, blocks: int) -> list[int]:
        """Gives a prefilling request `blocks` more blocks; the caller has checked that they are free."""
        taken = self.pool.take(blocks)
        if self.pool.events is not None:
            self._log(EventKind.ALLOCATED, request, taken)
        self.place(request, taken)
        return taken

    def place(self, request: Request, taken: list[int]) -> None:
        """Lays blocks at the end of a request's table, a run for each segment they reach into."""
        keys = request.keys
        position = request.table_blocks
        request.table_blocks = last = position + len(taken)
        used = 0
        tail = request.tail
        while position < last:
            segment = request.segment
            known = segment < len(keys.ends)
            if keys.explicit:
                end = position + 1
            else:
                end = min(keys.ends[segment], last)
            key = keys.digests[segment] if known else None
            part = taken[used : used + end - position]
            used += end - position
            if key is not None and tail is not None and tail.key == key and tail.end == position:
                tail.blocks += part
            else:
                tail = Run(key, position, part, request)
                request.table.append((tail, -1))
            position = end
            if known and end == keys.ends[segment]:
                request.segment = segment + 1
        request.tail = tail

    def open_tail(self, request: Request) -> None:
        """Readies a request whose prefill is planned for decoding: the run its output goes on in.

        The run is findable from now on, as far as it is published.
        """
        keys = request.keys
        if keys.explicit:
            return
        tail = request.tail
        key = keys.digests[-1]
        if tail is None or tail.key != key or tail.end != request.table_blocks:
            tail = Run(key, request.table_blocks, [], request)
            request.table.append((tail, -1))
            request.tail = tail
        if self.caching and not tail.indexed:
            self.pool.publish(tail)

    # ---- publishing

    def publish(self, request: Request, tokens: int) -> None:
        """Makes the full blocks of a request's first `tokens` tokens findable.

        Only its own runs change: what it reused is published already. With `explicit` keys (token ids) a
        block's key may become known only now.
        """
        if not self.caching:
            return
        full = tokens // self.block_size
        keys = request.keys
        fresh: list[Run] = []
        table = request.table
        for at in range(len(table) - 1, -1, -1):
            run, length = table[at]
            if length >= 0 or run.writer is not request:
                break
            while run.rest is not None and run.rest.writer is request:
                run = run.rest
            reach = min(full - run.start, len(run.blocks))
            if reach > run.published:
                fresh.append(run)
            elif run.published:
                break
        for run in reversed(fresh):
            if run.key is None:
                run.key = keys.digests[run.start]
            reach = min(full - run.start, len(run.blocks))
            before, run.published = run.published, reach
            if not run.indexed:
                self.pool.publish(run)
            if run.next is not None or self.pool.index[run.key] is not run:
                self._overtake(run)
            if self.pool.events is not None:
                self._log(EventKind.STORED, request, run.blocks[before:reach])

    def _overtake(self, run: Run) -> None:
        """Puts what others still have to fill under this key behind what `run` has just published.

        Of equal blocks the one published first is found, and a request's last run stands in the index
        before its blocks are full.
        """
        assert run.key is not None
        pool = self.pool
        others: list[Run] = []
        other: Run | None = pool.index[run.key]
        while other is not None:
            others.append(other)
            other = other.next
        for other in others:
            writer = other.writer
            if writer is None or writer is run.writer or writer.tail is not other:
                continue
            if writer.state in _GENERATING:
                self.settle(writer)
            late = other
            if other.published:
                late = writer.tail = pool.split(other, other.published)
            pool.forget(late)
            pool.publish(late)

    def withdraw(self, request: Request, tokens: int) -> None:
        """Takes back what was published beyond the first `tokens` tokens, which no finished step computed.

        What another request found in the meantime stays: the plan that fills it comes before its own.
        """
        full = tokens // self.block_size
        for run, length in request.table:
            part: Run | None = run if length < 0 else None
            while part is not None and part.writer is request:
                reach = max(full - part.start, max(part.held) if part.held else 0, 0)
                if part.published > reach:
                    part.published = reach
                    if not reach:
                        self.pool.forget(part)
                part = part.rest

    # ---- giving back

    def release(self, request: Request) -> int:
        """Gives back every block of a request, its last first. Returns how many became free."""
        pool = self.pool
        before = pool.queue.count
        blanks: list[Run] = []
        held = 0
        for run, length in reversed(request.table):
            if length < 0 and run.rest is None:
                held += len(run.blocks)
                blank = pool.give_back(run)
                if blank is not None:
                    blanks.append(blank)
            else:
                held += self._length(request, run, length)
                blanks += self._let_go(request, run, length)
        if blanks:
            pool.put_first(blanks)
        if pool.freed:
            self._log(EventKind.FREED, request, pool.freed)
            pool.freed = []
        request.table = []
        request.table_blocks = 0
        request.tail = None
        request.segment = 0
        freed = pool.queue.count - before
        self.shared_blocks -= held - freed
        return freed

    def _length(self, request: Request, run: Run, length: int) -> int:
        """Blocks of an entry of a request's table; a run it writes may have been split."""
        if length >= 0:
            return length
        held = 0
        part: Run | None = run
        while part is not None and part.writer is request:
            held += len(part.blocks)
            part = part.rest
        return held

    def _let_go(self, request: Request, run: Run, length: int) -> list[Run]:
        """Lets go of a run and of what was split off it. Returns what has to go ahead of all others."""
        parts = []
        part: Run | None = run
        if length < 0:
            while part is not None and part.writer is request:
                parts.append(part)
                part = part.rest
            blanks = [self.pool.give_back(part) for part in reversed(parts)]
            return [blank for blank in blanks if blank is not None]
        end = run.start + length
        while part is not None and part.start < end:
            parts.append(part)
            part = part.rest
        for part in reversed(parts):
            self.pool.drop(part, end - part.start)
            end = part.start
        return []

    def evict(self, blocks: int) -> int:
        """Forgets the content of the next `blocks` free blocks (all there are, at most) in eviction order.

        They stay free, ahead of all others. Returns how many that were.
        """
        blocks = min(blocks, self.pool.queue.count)
        if blocks:
            taken = self.pool.take(blocks)
            taken.reverse()
            self.pool.queue.prepend(Run(None, 0, taken, None), 0, blocks)
        return blocks

    def _log(self, kind: EventKind, request: Request, blocks: list[int]) -> None:
        events = self.pool.events
        assert events is not None
        events.append(Event(self.pool.step, kind, request.id, tuple(blocks)))

    # ---- figures

    @property
    def used_blocks(self) -> int:
        """Blocks that some request holds."""
        return self.pool.num_blocks - self.pool.queue.count

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-tokens // self.block_size)


def _no_writer(request: Request) -> None:
    """No scheduler attached: nothing to bring up to date."""
