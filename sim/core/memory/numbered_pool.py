"""Pool of single blocks, for models whose layers keep different tokens.

`BlockPool` keeps runs of blocks, and whoever holds one of them holds all before it. Where blocks leave a
window that is not so. Here every block stands for itself: who holds it, what it contains, and its place in
the order of free blocks. The order, and which of several equal blocks is found, are vLLM's.

Source: vllm/v1/core/block_pool.py (0.24).
"""

from __future__ import annotations

from collections import OrderedDict

from pagecast.sim.core.events import EventKind, EventLog


class NumberedPool:
    """`num_blocks` blocks, numbered from 0, for all groups. Block number `num_blocks` is the null block.

    The null block stands in tables for content that is not kept; it is never taken or freed. Content is
    found by a segment's key (with its group) and the number of a key block in it, as `BlockKeys` names it.
    """

    def __init__(self, num_blocks: int, log: EventLog) -> None:
        self.num_blocks = num_blocks
        self.null = num_blocks
        self.log = log
        self.evicted_blocks = 0
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.holders: list[int] = [0] * num_blocks
        self.keys: list[bytes | None] = [None] * num_blocks
        self.numbers: list[int] = [0] * num_blocks
        self.index: dict[bytes, dict[int, int]] = {}
        self.later: dict[tuple[bytes, int], list[int]] = {}  # blocks of content that an older one has, too

    # ---- holding

    def take(self, n: int) -> list[int]:
        """Takes the next `n` free blocks and evicts what they held; the caller checked that there are."""
        pop = self.free.popitem
        taken = [pop(last=False)[0] for _ in range(n)]
        evicted: list[int] = []
        for block in taken:
            self.holders[block] = 1
            if self.keys[block] is not None:
                self.forget(block)
                evicted.append(block)
        if evicted:
            self.evicted_blocks += len(evicted)
            self.log.add(EventKind.EVICTED, "", evicted)
        return taken

    def hold(self, blocks: list[int]) -> int:
        """Adds a holder to each of these blocks. Returns how many were held already."""
        shared = 0
        for block in blocks:
            if self.holders[block]:
                shared += 1
            else:
                del self.free[block]
            self.holders[block] += 1
        return shared

    def drop(self, blocks: list[int]) -> list[int]:
        """Takes a holder from each of these blocks. Returns those now free.

        Blocks without content go ahead of all others, in this order; the others go last.
        """
        blank: list[int] = []
        kept: list[int] = []
        for block in blocks:
            left = self.holders[block] - 1
            self.holders[block] = left
            if not left:
                (blank if self.keys[block] is None else kept).append(block)
        free = self.free
        for block in kept:
            free[block] = None
        for block in reversed(blank):
            free[block] = None
            free.move_to_end(block, last=False)
        return blank + kept

    # ---- content

    def publish(self, block: int, key: bytes, number: int) -> None:
        """Makes a block findable, behind those of equal content that are already."""
        self.keys[block] = key
        self.numbers[block] = number
        segment = self.index.get(key)
        if segment is None:
            self.index[key] = {number: block}
        elif number in segment:
            self.later.setdefault((key, number), []).append(block)
        else:
            segment[number] = block

    def forget(self, block: int) -> None:
        """Makes a block unfindable."""
        key = self.keys[block]
        assert key is not None
        self.keys[block] = None
        number = self.numbers[block]
        segment = self.index[key]
        behind = self.later.get((key, number))
        if segment[number] != block:
            assert behind is not None
            behind.remove(block)
        elif behind is not None:
            segment[number] = behind.pop(0)
        else:
            del segment[number]
            if not segment:
                del self.index[key]
        if behind is not None and not behind:
            del self.later[key, number]

    def findable(self) -> set[int]:
        """Every block whose content can be found. Linear in the pool."""
        return {block for block, key in enumerate(self.keys) if key is not None}
