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
        self.allocations: list[int] | None = None  # blocks taken, where somebody wants to know
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.holders: list[int] = [0] * num_blocks
        self.keys: list[bytes | None] = [None] * num_blocks
        self.numbers: list[int] = [0] * num_blocks
        self.index: dict[bytes, dict[int, int]] = {}
        # Further blocks with the content of an indexed one, by its key and number, oldest first.
        self.later: dict[tuple[bytes, int], list[int]] = {}

    # ---- holding

    def take(self, n: int) -> list[int]:
        """Takes the next `n` free blocks and evicts what they held; the caller checked that there are."""
        pop = self.free.popitem
        holders, keys, numbers, index = self.holders, self.keys, self.numbers, self.index
        later = self.later
        blocks: list[int] = []
        evicted: list[int] = []
        for _ in range(n):
            block = pop(False)[0]
            holders[block] = 1
            blocks.append(block)
            key = keys[block]
            if key is None:
                continue
            evicted.append(block)
            if later:
                self.forget(block)
                continue
            # The common case of `forget`: no other block has the same content.
            keys[block] = None
            segment = index[key]
            del segment[numbers[block]]
            if not segment:
                del index[key]
        if evicted:
            self.evicted_blocks += len(evicted)
            if self.log.events is not None:
                self.log.add(EventKind.EVICTED, "", evicted)
                if self.log.kv is not None:
                    self.log.kv.removed(evicted)
        if self.allocations is not None:
            self.allocations += blocks
        return blocks

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
        with_content: list[int] = []
        free, holders, keys = self.free, self.holders, self.keys
        for block in blocks:
            count = holders[block] - 1
            holders[block] = count
            if count:
                continue
            if keys[block] is None:
                blank.append(block)
            else:
                with_content.append(block)
                free[block] = None
        for block in reversed(blank):
            free[block] = None
            free.move_to_end(block, last=False)
        return blank + with_content

    # ---- content

    def publish(self, blocks: list[int], key: bytes, number: int, step: int) -> None:
        """Makes blocks of one segment findable, behind those of equal content that are already.

        The first has the key block `number` last, the others one `step` after another.
        """
        keys, numbers, later = self.keys, self.numbers, self.later
        segment = self.index.get(key)
        if segment is None:
            segment = self.index[key] = {}
        for block in blocks:
            keys[block] = key
            numbers[block] = number
            if number in segment:
                later.setdefault((key, number), []).append(block)
            else:
                segment[number] = block
            number += step

    def forget(self, block: int) -> None:
        """Makes a block unfindable."""
        key = self.keys[block]
        assert key is not None
        self.keys[block] = None
        number = self.numbers[block]
        segment = self.index[key]
        if not self.later or (key, number) not in self.later:
            del segment[number]
            if not segment:
                del self.index[key]
            return
        behind = self.later[key, number]
        if segment[number] == block:
            segment[number] = behind.pop(0)
        else:
            behind.remove(block)
        if not behind:
            del self.later[key, number]

    def findable(self) -> set[int]:
        """Every block whose content can be found. Linear in the pool."""
        return {block for block, key in enumerate(self.keys) if key is not None}
