"""The block pool and the prefix index: which blocks are free, which content can be found, what is evicted.

Freed blocks keep their content until their space is needed: eviction happens when a block is taken. The
order is least recently used, a sequence's tail first; blocks that nobody could find come before all
others. (vLLM v1's free-block queue has this order.)
"""

from __future__ import annotations

from pagecast.sim.core.events import Event, EventKind
from pagecast.sim.core.runs import FreeQueue, Run


class BlockPool:
    """`num_blocks` blocks, numbered from 0. Not for direct use: the cache manager calls it.

    `unfindable_first`: a freed block that was never published is taken before all others (vLLM);
    otherwise it queues up like the rest (nano-vLLM, and vLLM without prefix caching).
    """

    def __init__(self, num_blocks: int, *, unfindable_first: bool) -> None:
        self.num_blocks = num_blocks
        self.queue = FreeQueue()
        self.index: dict[bytes, Run] = {}
        self.evicted_blocks = 0
        self.unfindable_first = unfindable_first
        self.events: list[Event] | None = None
        self.step = 0
        self.freed: list[int] = []  # while events are kept: what became free, in the order it will be taken
        # Pieces are taken from their high end, so the first block to be taken stands last.
        self.queue.append(Run(None, 0, list(range(num_blocks - 1, -1, -1)), None), 0, num_blocks)

    # ---- taking and giving back

    def take(self, n: int) -> list[int]:
        """Takes `n` blocks from the head of the free queue, evicting what they held.

        The caller has checked that `n` are free. O(pieces touched) plus a slice a piece.
        """
        queue = self.queue
        queue.count -= n
        ring = queue.ring
        piece = ring.after
        run = piece.run
        assert run is not None and run.free is not None
        blocks = run.blocks
        if piece.high - piece.low > n:
            # The common case: one piece has enough.
            piece.high -= n
            taken = blocks[piece.high :]
            del blocks[piece.high :]
            taken.reverse()
            if run.published:
                self._evict(run, taken)
            return taken
        taken = []
        while n:
            piece = ring.after
            run = piece.run
            assert run is not None and run.free is not None
            k = min(n, piece.high - piece.low)
            n -= k
            piece.high -= k
            # A run's deepest free piece is the first in the queue, so what is taken is the run's end.
            part = run.blocks[piece.high :]
            del run.blocks[piece.high :]
            part.reverse()
            taken += part
            if piece.high == piece.low:
                queue.unlink(piece)
                run.free.remove(piece)
            if run.published:
                self._evict(run, part)
        return taken

    def _evict(self, run: Run, blocks: list[int]) -> None:
        left = len(run.blocks)
        self.evicted_blocks += run.published - left
        run.published = left
        if not left:
            self.forget(run)
        if self.events is not None:
            self.events.append(Event(self.step, EventKind.EVICTED, "", tuple(blocks)))

    def hold(self, run: Run, length: int) -> int:
        """One more reader of the run's first `length` blocks. Returns how many of them were free."""
        top = run.owned()
        woken = 0
        if length > top:
            woken = length - top
            queue, pieces = self.queue, run.free
            assert pieces is not None
            queue.count -= woken
            while pieces and pieces[-1].low < length:
                piece = pieces[-1]
                if piece.high <= length:
                    pieces.pop()
                    queue.unlink(piece)
                else:
                    piece.low = length
        if run.held is None:
            run.held = {length: 1}
        else:
            run.held[length] = run.held.get(length, 0) + 1
        return woken

    def drop(self, run: Run, length: int) -> None:
        """One reader of `length` blocks fewer; what nobody holds any more queues up."""
        held = run.held
        assert held is not None
        if held[length] > 1:
            held[length] -= 1
            return
        top = run.owned()
        del held[length]
        if length < top or run.writer is not None:
            return
        left = max(held) if held else 0
        self._queue(run, left, length)

    def split(self, run: Run, at: int) -> Run:
        """Cuts a run in two at block `at` and returns the second part, which readers may now hold alone.

        Needed only where two runs of one key overlap and a reader takes the first part from one and the
        second from the other.
        """
        rest = Run(run.key, run.start + at, run.blocks[at:], run.writer)
        del run.blocks[at:]
        rest.published, run.published = max(run.published - at, 0), min(run.published, at)
        rest.rest, run.rest = run.rest, rest
        rest.indexed, rest.next, run.next = run.indexed, run.next, rest
        if run.held:
            longer = {length: n for length, n in run.held.items() if length > at}
            if longer:
                rest.held = {length - at: n for length, n in longer.items()}
                for length in longer:
                    del run.held[length]
                run.held[at] = run.held.get(at, 0) + sum(longer.values())
        pieces, run.free = run.free or [], None
        for piece in pieces:
            if piece.low >= at:
                piece.run, piece.low, piece.high = rest, piece.low - at, piece.high - at
                rest.free = [*(rest.free or []), piece]
            else:
                if piece.high > at:
                    self.queue.insert_before(rest, 0, piece.high - at, piece)
                    piece.high = at
                run.free = [*(run.free or []), piece]
        return rest

    def give_back(self, run: Run) -> Run | None:
        """The writer lets go: what others hold stays, the rest is free, its last block first in the queue.

        Returns what has to go ahead of all others: the caller passes it to `put_first`.
        """
        first: Run | None = None
        run.writer = None
        published = run.published
        blocks = run.blocks
        n = len(blocks)
        if published < n:
            blank = Run(None, 0, blocks[published:], None) if published else run
            if published:
                del blocks[published:]
            if self.unfindable_first:
                first = blank
            else:
                self._queue(blank, 0, n - published)
        if published:
            left = max(run.held) if run.held else 0
            if left < published:
                self._queue(run, left, published)
        elif run.indexed:
            self.forget(run)
        return first

    def put_first(self, runs: list[Run]) -> None:
        """Puts whole runs at the head of the queue, the first of them foremost."""
        for run in reversed(runs):
            self.queue.prepend(run, 0, len(run.blocks))
        if self.events is not None:
            self.freed = [block for run in runs for block in reversed(run.blocks)] + self.freed

    def _queue(self, run: Run, low: int, high: int) -> None:
        self.queue.append(run, low, high)
        if self.events is not None:
            self.freed += run.blocks[low:high][::-1]

    # ---- the index

    def publish(self, run: Run) -> None:
        """Makes a run findable under its key, behind any run that is already."""
        key = run.key
        assert key is not None and not run.indexed
        run.indexed = True
        first = self.index.get(key)
        if first is None:
            self.index[key] = run
            return
        while first.next is not None:
            first = first.next
        first.next = run

    def forget(self, run: Run) -> None:
        """Takes a run out of the index."""
        key = run.key
        assert key is not None and run.indexed
        run.indexed = False
        first = self.index[key]
        if first is run:
            if run.next is None:
                del self.index[key]
            else:
                self.index[key] = run.next
        else:
            while first.next is not run:
                assert first.next is not None
                first = first.next
            first.next = run.next
        run.next = None
