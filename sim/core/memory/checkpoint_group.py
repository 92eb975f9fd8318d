"""Checkpoint groups: block tables of recurrent layers whose states can be found at the ends of blocks.

A state stands for all tokens before it, so a chunk takes a block where it ends, and the places before that
are null. The block at the place before, from which the chunk goes on, leaves once the chunk is computed.
Blocks for draft tokens follow the newest state; a step that passes them takes them along. Kernels that export
states within a chunk fill the place before the last too, with the state at the last end of a block.

Source: vllm/v1/core/single_type_kv_cache_manager.py, `MambaManager` with `mamba_cache_mode` align (0.33).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pagecast.sim.core.events import EventKind
from pagecast.sim.core.identity.keys import BlockKeys, segment_of
from pagecast.sim.core.memory.extent import Extent
from pagecast.sim.core.memory.hit import TableHit
from pagecast.sim.core.memory.layer_group import HandedState, LayerGroup, Part
from pagecast.sim.core.memory.table import Table
from pagecast.sim.core.request import Request, State


class CheckpointTable(Table):
    """A table whose blocks stand apart: `at` has the place of each of `held`, of one row each.

    `started`: it has had its first chunk. `exported`: the place that the chunk fills with a state within it,
    and that of the block at whose end this state is; until it is published.
    """

    __slots__ = ("at", "exported", "started")

    def __init__(self, nothing: array[int], width: int = 1) -> None:
        super().__init__(nothing, width)
        self.at: list[int] = []
        self.started = False
        self.exported: tuple[int, int] | None = None

    def has(self, place: int) -> bool:
        """Whether a place has a block."""
        return place in self.at

    def by_place(self, null: int, group: int = 0) -> list[int]:
        blocks = dict(zip(self.at, self.blocks(group), strict=True))
        return [blocks.get(place, null) for place in range(self.places)]

    def note_nulls(self) -> None:
        """Counts the null places before the first block."""
        self.nulls = self.at[0] if self.at else self.places


class CheckpointGroup(LayerGroup):
    """One group of the kind `KvKind.CHECKPOINT`: its tables have null places anywhere."""

    scattered = True
    _leaves_block = False  # whether hits leave out their last block in other groups (EAGLE)

    def new_table(self) -> CheckpointTable:
        return CheckpointTable(self.pool.nothing, self.width)

    # ---- how many blocks

    def missing(self, request: Request, table: Table | None, tokens: int) -> int:
        """Those of a step that ends at token `tokens`; below 0 where draft tokens were rejected.

        Then the table has more places than the step needs. vLLM adds the difference to the blocks of the
        other groups as it is (`MambaManager.get_num_blocks_to_allocate`), so `KvMemory.missing` must too.
        """
        return self._missing(request, table, request.computed_tokens, tokens)

    def _missing(self, request: Request, table: Table | None, start: int, tokens: int) -> int:
        assert table is None or isinstance(table, CheckpointTable)
        blocks = self.spec.blocks_of(tokens) - (0 if table is None else table.places)
        if blocks <= 0:
            return blocks
        started = table is not None and table.started
        exports = self._in_chunks(request) and self._exports(request, table, start, tokens)
        return min(blocks, 1 + exports + (0 if started else self.spec.drafts))

    def still_needed(self, request: Request, table: Table | None, start: int, tokens: int) -> int:
        """No more than one step takes: what leaves makes room for what comes."""
        return self._missing(request, table, start, min(tokens, request.known_tokens))

    def needed(
        self, request: Request, hit: TableHit | None, hit_tokens: int, tokens: int, *, capped: bool
    ) -> int:
        places = 0 if hit is None else hit.places
        idle = 0
        if hit is not None and hit.parts:
            extent, low, _ = hit.parts[-1]
            idle = not extent.holders
            if (extent.key, extent.number + low * extent.units) in self.just_stored:
                return self.pool.num_blocks + 1  # the step that computes the state is still to come
        exports = self._exports(request, None, hit_tokens, tokens)
        blocks = self.spec.blocks_of(tokens) - places
        if blocks > 0:
            blocks = min(blocks, 1 + exports + self.spec.drafts)
        return blocks + idle

    def _in_chunks(self, request: Request) -> bool:
        """Whether a request computes chunks, so that its computed tokens are known."""
        return bool(self.spec.drafts) or request.state is not State.DECODE

    def _exports(self, request: Request, table: Table | None, start: int, end: int) -> bool:
        """Whether a chunk exports a state, and takes a block for it."""
        place = -(-end // self._size) - 2
        prompt_end = max(request.prompt_tokens, request.known_tokens - 1)
        if end < prompt_end or place < 0 or not self._can_export(start, end, self.last_end(end)):
            return False
        if table is not None and place < table.places:
            assert isinstance(table, CheckpointTable)
            drafts = table.started and place >= table.places - self.spec.drafts
            return drafts or not table.has(place)
        return True

    def _can_export(self, start: int, end: int, at: int) -> bool:
        """Whether a kernel exports the state at token `at` within the chunk from `start` to `end`."""
        size, step = self._size, self.spec.exported
        return (
            step > 0
            and start % size == 0
            and -(-end // size) - 2 > (start - 1) // size
            and start + size <= at < end
            and (at - start) % step == 0
        )

    def exports_at(self, request: Request, start: int, end: int, prompt_end: int) -> bool:
        """Whether a chunk that ends a prompt exports the last state that a later one finds."""
        return end >= prompt_end and self._can_export(start, end, self.last_end(prompt_end))

    def last_end(self, tokens: int) -> int:
        """The last end of a block before a prompt's end at which its state can be found.

        A hit leaves the last token to compute, or its last block (EAGLE), or what the last key covers more.
        """
        left = self._size if self._leaves_block else max(1, self.key_lookahead)
        return max(tokens - left, 0) // self._size * self._size

    # ---- claiming, growing, giving back

    def claim(self, request: Request, hit: TableHit | None, hit_tokens: int) -> Table:
        table = super().claim(request, hit, hit_tokens)
        assert isinstance(table, CheckpointTable)
        if table.held:
            table.at = [table.places - 1]
        table.note_nulls()
        return table

    def arrange(self, request: Request, table: Table, blocks: array[int], tokens: int) -> None:
        """Gives a table the blocks of its next chunk, which ends at token `tokens`."""
        assert isinstance(table, CheckpointTable)
        drafts = self.spec.drafts
        places = self.spec.blocks_of(tokens)
        exports = self._in_chunks(request) and self._exports(request, table, request.computed_tokens, tokens)
        before = table.places
        if places > before or exports:
            skipped = places - drafts - 1 - exports
            last = max(before, skipped)
            if table.started:
                for place in range(before - drafts, before):
                    if place >= skipped:
                        break
                    number = table.at.index(place)
                    table.at[number] = last
                    last += 1
                    if self.pool.allocations is not None:  # what is taken along counts as taken anew
                        self.pool.allocations += table.held[number][0].blocks
            self._put(table, blocks, last)
            last += len(blocks)
            order = sorted(range(len(table.at)), key=table.at.__getitem__)
            table.held = [table.held[number] for number in order]
            table.at = [table.at[number] for number in order]
            table.places = max(last, before)
        table.started = True
        table.exported = None
        if exports:
            table.exported = -(-tokens // self._size) - 2, self.last_end(tokens) // self._size - 1
        table.note_nulls()
        self._tell_taken(request, blocks)

    def grow(self, request: Request, table: Table, blocks: array[int]) -> None:
        """Adds the block of a state that a load brings, at the next place."""
        assert isinstance(table, CheckpointTable)
        self._put(table, blocks, table.places)
        table.places += len(blocks)
        table.note_nulls()
        self._tell_taken(request, blocks)

    @staticmethod
    def _put(table: CheckpointTable, blocks: array[int], place: int) -> None:
        """Adds blocks to a table, from a place on."""
        for number in range(len(blocks)):
            extent = Extent(blocks[number : number + 1], None, 0, 1)
            extent.origin = table.origin
            table.held.append((extent, 1))
            table.at.append(place + number)

    def leave(self, request: Request, table: Table, skipped: int) -> None:
        assert isinstance(table, CheckpointTable)
        count = sum([place < skipped for place in table.at])
        if not count:
            return
        extents = [extent for extent, _ in table.held[:count]]
        del table.held[:count], table.at[:count]
        table.note_nulls()
        if self.log.events is not None:
            unread = [block for extent in reversed(extents) for block in extent.blocks]
            self.log.add(EventKind.LEFT, request.id, unread, group=self.index)
        self._drop(request, extents, self.pool.nothing)

    def release(self, request: Request, table: Table) -> None:
        if self.handed:
            self.handed = [state for state in self.handed if state.request is not request]
        super().release(request, table)

    # ---- publishing

    def drop_last(self) -> None:
        """From now on hits end a block earlier; a state stands for all before it, and none is left out."""
        self._leaves_block = True

    def withdraw(self, table: Table, full: int) -> None:
        """Leaves states findable: no hit goes beyond what the layers have that keep every token."""

    def full(self, table: Table, tokens: int, computed: int) -> int:
        """The last place whose state can be found; there are more to publish once a step has ended."""
        return tokens // self._size

    def parts(self, keys: BlockKeys, table: Table, full: int, boundaries: Sequence[int]) -> list[Part]:
        return []

    def publish(
        self, request: Request, table: Table, full: int, parts: list[Part], boundaries: Sequence[int]
    ) -> None:
        assert isinstance(table, CheckpointTable)
        first = table.stored
        table.stored = full
        exported, table.exported = table.exported, None
        found: list[
            tuple[int, int]
        ] = []  # numbers of blocks, and the places of the blocks at whose ends they are
        for number, place in enumerate(table.at):
            end = exported[1] if exported is not None and place == exported[0] else place
            if first <= place < full and self._is_reachable(end, boundaries):
                found.append((number, end))
        if self.log.kv is not None:
            places = [end for _, end in found]
            blocks = [block for number, _ in found for block in table.held[number][0].blocks]
            self.log.kv.stored(request, first, full, places, blocks, self.index, self.spec)
        for number, end in found:
            self._store(request, table, number, end)

    def _store(self, request: Request, table: CheckpointTable, number: int, place: int) -> None:
        """Makes the state of a block findable, as that at the end of the block at `place`."""
        extent, _ = table.held[number]
        if extent.key is not None:
            return
        keys = request.keys
        end = (place + 1) * self._units - 1
        key = keys.digests[segment_of(keys, end)] + self.mark
        log = self.log
        if log.events is not None:
            log.add(EventKind.STORED, request.id, extent.blocks.tolist(), group=self.index)
        one = Table(self.pool.nothing, self.width)
        one.tail, one.origin = extent.blocks, table.origin
        self.pool.publish(one, 1, key, end, self._units)
        table.held[number] = one.held[0]
        self.just_stored.add((key, end))
        if self._hands_over:
            self.handed.append(HandedState(request, self.index, extent.blocks[0], (place + 1) * self._size))
