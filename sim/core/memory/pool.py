"""Block pool: which blocks are free, and which content is evicted when a block is taken.

Freed blocks keep their content until their space is needed: eviction happens when a block is taken, in the
order that `Eviction` says. KV groups and `KvMemory` call the pool; rules never do.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import cycle, islice
from typing import Protocol

from pagecast.sim.core.events import EventKind, EventLog
from pagecast.sim.core.memory.eviction import Eviction
from pagecast.sim.core.memory.index import PrefixIndex
from pagecast.sim.core.memory.run import FreePiece, Run
from pagecast.sim.core.memory.tenant_ledger import TenantLedger


class Watcher(Protocol):
    """Hears which content can be found: blocks `begin` to `end` of the segment that has the key `key`."""

    def stored(self, key: bytes, begin: int, end: int) -> None:
        """These blocks can be found from now on."""

    def removed(self, key: bytes, begin: int, end: int) -> None:
        """These blocks can no longer be found, or one copy of them less."""


class _Both(Watcher):
    """Tells two watchers the same."""

    def __init__(self, first: Watcher, second: Watcher) -> None:
        self._first = first
        self._second = second

    def stored(self, key: bytes, begin: int, end: int) -> None:
        self._first.stored(key, begin, end)
        self._second.stored(key, begin, end)

    def removed(self, key: bytes, begin: int, end: int) -> None:
        self._first.removed(key, begin, end)
        self._second.removed(key, begin, end)


@lru_cache(maxsize=4)
def _numbers(num_blocks: int) -> tuple[int, ...]:
    """Block numbers of a fresh pool: pieces are taken from their high end, so block 0 stands last.

    Pools of one size share the number objects: those of many replicas would not fit a processor's cache.
    """
    return tuple(range(num_blocks - 1, -1, -1))


class BlockPool:
    """`num_blocks` blocks, numbered from 0, and the index of the content that free and held blocks have."""

    def __init__(
        self,
        num_blocks: int,
        eviction: Eviction,
        log: EventLog,
        ledger: TenantLedger | None = None,
        *,
        partial_reuse: bool = False,
    ) -> None:
        self.partial_reuse = partial_reuse
        self.ledger = ledger
        self.num_blocks = num_blocks
        self.free_blocks = num_blocks
        self.evicted_blocks = 0
        self.eviction = eviction
        self.index = PrefixIndex()
        self.log = log
        self.watcher: Watcher | None = None
        self.heard = ledger is not None or log.events is not None  # whether anybody hears of contents that go
        self.tells_stored = log.events is not None  # whether anybody hears of contents that can be found
        self.births = 0  # runs made so far, where they are counted (`Run.born`)
        self.allocations: list[int] | None = None  # blocks taken, where somebody wants to know
        self.freed: list[int] = []  # while a log is kept: blocks just freed, in the order they will be taken
        # Free blocks without content that are taken before all others, the next one last.
        self.blanks: list[int] = list(_numbers(num_blocks))

    def watch(self, watcher: Watcher) -> None:
        """Tells a watcher from now on which content can be found, beside any that watches already."""
        self.watcher = watcher if self.watcher is None else _Both(self.watcher, watcher)
        self.heard = self.tells_stored = True

    # ---- taking

    def take(self, n: int) -> list[int]:
        """Takes `n` blocks, blanks first, then in eviction order, and evicts what they held.

        The caller has checked that `n` are free. O(pieces touched), plus one slice per piece.
        """
        self.free_blocks -= n
        blanks = self.blanks
        blocks: list[int] = []
        if blanks and n:
            blocks = blanks[-n:]
            del blanks[-n:]
            blocks.reverse()
            n -= len(blocks)
        if n:
            self._take_pieces(n, blocks)
        if self.allocations is not None:
            self.allocations += blocks
        return blocks

    def _take_pieces(self, n: int, blocks: list[int]) -> None:
        """Takes `n` blocks with content in eviction order, and appends them to `blocks`."""
        eviction = self.eviction
        next_piece = eviction.nexts()
        while n:
            piece = next_piece()
            run = piece.run
            most = eviction.at_once(piece)
            if n < most:
                most = n
            n -= most
            length = piece.high = piece.high - most
            if length == piece.low:
                eviction.remove(piece)
                assert run.free is not None
                run.free.remove(piece)
            # These are the run's end: of its free pieces the deepest goes first.
            taken = run.blocks[length:]
            del run.blocks[length:]
            taken.reverse()
            blocks += taken
            if run.published:
                self._evict(run, taken)

    def take_in_turn(self, n: int, takers: list[str]) -> list[int]:
        """As `take`, one block at a time, for several tenants: the k-th for tenant k modulo their number."""
        ledger = self.ledger
        assert ledger is not None
        ledger.taker = takers[0]
        count = len(takers)
        blank = len(self.blanks)
        if n <= blank or (self.eviction.leaves_first and takers.count(ledger.taker) == count):
            return self.take(n)
        blocks = self.take(blank)
        self.free_blocks -= n - blank
        eviction = self.eviction
        pieces = iter(eviction.nexts(), None)
        only_ledger = self.watcher is None and self.log.events is None
        cached, evicted_for = ledger.cached, ledger.evicted_for
        for taker, piece in zip(islice(cycle(takers), blank, n), pieces, strict=False):
            run = piece.run
            high = piece.high = piece.high - 1
            if high == piece.low:
                eviction.remove(piece)
                run.free.remove(piece)  # type: ignore[union-attr]
            block = run.blocks.pop()
            blocks.append(block)
            published = run.published
            if not published:
                continue
            ledger.taker = taker
            length = len(run.blocks)
            if length and only_ledger:
                # As `_evict`, of a run that keeps other blocks: nearly always.
                lost = published - length
                run.published = length
                self.evicted_blocks += lost
                cached[run.tenant] -= lost
                evicted_for[taker, run.tenant] += lost
            else:
                self._evict(run, [block])
        if self.allocations is not None:
            self.allocations += blocks[blank:]
        return blocks

    def take_last(self, run: Run) -> list[int]:
        """Takes the last block of a run, which is free, with its content: that can't be found any more."""
        assert run.free is not None
        piece = run.free[0]
        piece.high -= 1
        self.free_blocks -= 1
        if piece.high == piece.low:
            self.eviction.remove(piece)
            run.free.remove(piece)
        blocks = [run.blocks.pop()]
        if run.published:
            self._evict(run, blocks)
        return blocks

    def _evict(self, run: Run, blocks: list[int]) -> None:
        length = len(run.blocks)
        published = run.published
        self.evicted_blocks += published - length
        if self.heard:
            self._tell_evicted(run, length, blocks)
        run.published = length
        if not length:
            self.index.remove(run)
            if run.parent is not None or run.children:
                run.leave_tree()

    def _tell_evicted(self, run: Run, length: int, blocks: list[int]) -> None:
        """Tells ledger, watcher and log what content a run loses: all but its first `length` blocks."""
        published = run.published
        if self.ledger is not None:
            self.ledger.evict(run.tenant, published - length)
        if self.watcher is not None and run.key is not None:
            self.watcher.removed(run.key, run.start + length, run.start + published)
        if self.log.events is not None:
            detail = "" if run.keep is None else f"priority={run.keep.priority}"
            if run.tenant:
                detail = f"{detail} tenant={run.tenant}".lstrip()
            self.log.add(EventKind.EVICTED, "", blocks, detail)
            if self.log.kv is not None:
                self.log.kv.removed(blocks)

    def unpublish(self, run: Run, published: int) -> None:
        """Makes the blocks of a run after the first `published` unfindable; their holders keep them."""
        if self.watcher is not None and run.key is not None:
            self.watcher.removed(run.key, run.start + published, run.start + run.published)
        if self.log.kv is not None:
            self.log.kv.removed(run.blocks[published : run.published])
        run.published = published
        if not published:
            self.index.remove(run)

    # ---- holding and giving back

    def hold(self, run: Run, length: int) -> int:
        """Adds a reader of the run's first `length` blocks. Returns how many of them were free."""
        top = run.owned()
        woken = 0
        if length > top:
            woken = length - top
            pieces = run.free
            assert pieces is not None
            self.free_blocks -= woken
            if self.ledger is not None and run.published:
                self.ledger.cached[run.tenant] -= woken
            while pieces and pieces[-1].low < length:
                piece = pieces[-1]
                if piece.high <= length:
                    pieces.pop()
                    self.eviction.remove(piece)
                else:
                    piece.low = length
                    self.eviction.lose_front(piece)
        run.uses += 1
        if run.held is None:
            run.held = {length: 1}
        else:
            run.held[length] = run.held.get(length, 0) + 1
        return woken

    def drop(self, run: Run, length: int) -> None:
        """Removes a reader of `length` blocks; the blocks that nobody else holds become free."""
        held = run.held
        assert held is not None
        if held[length] > 1:
            held[length] -= 1
            return
        top = run.owned()
        del held[length]
        if length < top or run.writer is not None:
            return
        self._free(run, max(held) if held else 0, length)

    def give_back(self, run: Run) -> list[int] | None:
        """The writer lets go of a run: what readers hold stays, the rest becomes free, the last block first.

        Returns blocks without content that go ahead of all others: the caller passes them to `free_first`.
        """
        first: list[int] | None = None
        run.writer = None
        published = run.published
        blocks = run.blocks
        n = len(blocks)
        if published < n:
            blank = blocks[published:]
            del blocks[published:]
            if self.eviction.blanks_first:
                first = blank
            else:
                self._free(Run(None, 0, blank), 0, n - published)
        if published:
            first_free = max(run.held) if run.held else 0
            if first_free < published:
                self._free(run, first_free, published)
        else:
            if run.indexed:
                self.index.remove(run)
            run.leave_tree()
        return first

    def free_first(self, parts: list[list[int]]) -> None:
        """Frees blocks without content ahead of all others, the last block of the first part foremost."""
        for part in reversed(parts):
            self.blanks += part
            self.free_blocks += len(part)
        if self.log.events is not None:
            self.freed = [block for part in parts for block in reversed(part)] + self.freed

    def _free(self, run: Run, low: int, high: int) -> None:
        piece = FreePiece(run, low, high)
        if run.free is None:
            run.free = [piece]
        else:
            run.free.append(piece)
        if self.heard:
            self._tell_freed(run, low, high)
        self.eviction.add(piece)
        self.free_blocks += high - low

    def _tell_freed(self, run: Run, low: int, high: int) -> None:
        """Tells ledger and log of blocks of a run that become free."""
        if self.ledger is not None and run.published:
            self.ledger.cached[run.tenant] += high - low
        if self.log.events is not None:
            self.freed += run.blocks[low:high][::-1]

    def empty(self, blocks: int) -> None:
        """Evicts the next `blocks` free blocks; they stay free, ahead of all others."""
        victims = self.take(blocks)
        victims.reverse()
        self.blanks += victims
        self.free_blocks += blocks

    # ---- splitting

    def split(self, run: Run, at: int) -> Run:
        """Cuts a run in two at block `at` and returns the second part, which may then be held by itself.

        Needed only where two runs of one key overlap and a reader takes the first part from one and the
        second from the other.
        """
        rest = Run(run.key, run.start + at, run.blocks[at:], run.writer)
        del run.blocks[at:]
        rest.published = max(run.published - at, 0)
        run.published = min(run.published, at)
        rest.uses = run.uses
        rest.born = run.born
        rest.keep = run.keep
        rest.tenant = run.tenant
        rest.keys = run.keys
        rest.rest, run.rest = run.rest, rest
        rest.indexed, rest.next, run.next = run.indexed, run.next, rest
        run.move_children(rest)
        rest.follow(run)
        if run.writer is not None:
            run.writer.replace(run, rest)
        if run.held:
            longer = {length: n for length, n in run.held.items() if length > at}
            if longer:
                rest.held = {length - at: n for length, n in longer.items()}
                for length in longer:
                    del run.held[length]
                run.held[at] = run.held.get(at, 0) + sum(longer.values())
        self._split_pieces(run, rest, at)
        return rest

    def _split_pieces(self, run: Run, rest: Run, at: int) -> None:
        pieces = run.free or []
        run.free = None
        for piece in pieces:
            if piece.low >= at:
                piece.run = rest
                piece.low -= at
                piece.high -= at
                rest.free = [*(rest.free or []), piece]
                continue
            if piece.high > at:
                part = FreePiece(rest, 0, piece.high - at)
                rest.free = [*(rest.free or []), part]
                self.eviction.add_beside(part, piece)
                piece.high = at
            run.free = [*(run.free or []), piece]
