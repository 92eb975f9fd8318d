"""Watched device blocks: those that others may get before a store has copied them.

Source: vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py (0.24).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.plan import Chunk
from pagecast.sim.core.request import Request
from pagecast.sim.core.tiers.offloaded_group import OffloadedGroup
from pagecast.sim.core.tiers.progress import OffloadProgress


class WatchedBlocks:
    """The stores of watched blocks, and those that must be done before the next step.

    `stores`: numbers of the stores by device block. The memory notes which blocks it gives away: always where
    groups have windows, else while blocks of requests that have gone are watched. `factor`: device blocks of
    an offloaded one.
    """

    def __init__(self, memory: KvMemory, groups: tuple[OffloadedGroup, ...], factor: int) -> None:
        self.stores: dict[int, set[int]] = {}
        self._memory = memory
        self._groups = groups
        self._windows = [group for group in groups if group.window]
        self._factor = factor
        self._until_done = False  # the memory takes notes until nothing is watched any more
        self._due: dict[int, None] = {}
        self._new: set[int] = set()  # blocks given to requests in this step
        if self._windows:
            memory.watch_allocations(on=True)

    def watch(self, blocks: Iterable[int], number: int) -> None:
        """Watches blocks that the store of this number reads."""
        for block in blocks:
            self.stores.setdefault(block, set()).add(number)

    def watch_until_done(self, *, noting: bool) -> None:
        """Has the memory take notes while anything is watched: a request is about to give blocks back.

        `noting`: until the next plan in any case.
        """
        if (self.stores or noting) and not self._until_done:
            self._until_done = not self._windows
            self._memory.watch_allocations(on=True)

    def watch_late(self, blocks: Iterable[int], number: int) -> None:
        """Watches blocks of a request that has ended; some may have been given to others in this step."""
        for block in blocks:
            self.stores.setdefault(block, set()).add(number)
            if block in self._new:
                self._due[number] = None

    def end_store(self, number: int, blocks: Iterable[int]) -> None:
        """A store of these blocks has ended."""
        for block in blocks:
            stores = self.stores.get(block)
            if stores is not None:
                stores.discard(number)
                if not stores:
                    del self.stores[block]

    def relax(self, *, noting: bool) -> None:
        """Has the memory take no more notes where nothing is watched any more, unless `noting`."""
        if self._until_done and not self.stores and not noting:
            self._until_done = False
            self._memory.watch_allocations(on=False)

    def begin_step(
        self,
        chunks: Sequence[Chunk],
        decodes: Sequence[Request],
        newcomers: Iterable[Request],
        progress: Mapping[Request, OffloadProgress],
        *,
        preempted: bool,
    ) -> None:
        """Notes which stores must be done before the step, because it gives their blocks to others.

        `newcomers`: the requests admitted, or that began to load, in this step.
        """
        memory = self._memory
        new = set(memory.take_allocations())
        computing = [*decodes, *(chunk.request for chunk in chunks)]
        if preempted:
            held: set[int] = set()
            for request in (*computing, *newcomers):
                for group in self._groups:
                    held.update(memory.blocks(request, group.number))
            new &= held
        for request in newcomers:
            for group in self._groups:
                new.update(memory.blocks(request, group.number))
        new.discard(memory.null)
        self._new = new
        if self._windows:
            self._update_tables(computing, new, set(newcomers), progress)
        if self.stores:
            for block in self.stores.keys() & new:
                self.require(self.stores[block])

    def _update_tables(
        self,
        computing: Iterable[Request],
        new: set[int],
        newcomers: set[Request],
        progress: Mapping[Request, OffloadProgress],
    ) -> None:
        """Adds new blocks to the tables, and strikes out those that left a window and were given away."""
        memory = self._memory
        null = memory.null
        ends: dict[Request, list[int]] = {}
        for request in computing:
            own = progress.get(request)
            if own is None:
                continue
            if request in newcomers:
                for table in own.tables:
                    table.clear()
            ends[request] = [len(table) for table in own.tables]
            for group, table in zip(self._groups, own.tables, strict=True):
                table += memory.blocks_from(request, group.number, len(table))
        factor = self._factor
        for request, own in progress.items():
            for group in self._windows:
                table = own.tables[group.number]
                end = ends[request][group.number] if request in ends else len(table)
                first = own.stored[group.number] * factor
                if not new.isdisjoint(table[first:end]):
                    table[first:end] = [null if block in new else block for block in table[first:end]]

    def require(self, stores: Iterable[int]) -> None:
        """Notes that these stores must be done before the next step."""
        self._due.update(dict.fromkeys(stores))

    def take_due(self) -> tuple[int, ...]:
        """The stores that must be done before the next step computes anything."""
        if not self._due:
            return ()
        due = tuple(self._due)
        self._due.clear()
        return due
