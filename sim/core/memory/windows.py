"""Windows of a model's layers: which rows leave them while requests decode, and what that frees."""

from __future__ import annotations

from pagecast.sim.core.group_spec import GroupSpec
from pagecast.sim.core.memory.extent import Extent
from pagecast.sim.core.memory.layer_group import LayerGroup
from pagecast.sim.core.memory.table import Leaver, Table, Tables
from pagecast.sim.core.request import Request


class Windows:
    """The layers that read only the newest tokens, and the tables of the requests that hold blocks.

    `numbers` are those of such groups. `least` is the smallest window, 0 without windows.
    `leave_offset` is the only offset within a key block at which blocks leave windows when a decoding
    request computes it; None: there are several. `late`: a decoding request's newest token is in flight, and
    its blocks leave by those before.
    """

    def __init__(
        self, groups: list[LayerGroup], tables: dict[Request, Tables], block_size: int, *, late: bool = False
    ) -> None:
        self._specs = [group.spec for group in groups]
        self._tables = tables
        self._block_size = block_size
        self.numbers = [number for number, spec in enumerate(self._specs) if spec.rules.windowed]
        self.least = min([self._specs[number].window for number in self.numbers], default=0)
        self.leave_offset = _leave_offset(self._specs, block_size)
        self._late = int(late)
        if late and self.leave_offset is not None:
            self.leave_offset = (self.leave_offset + 1) % block_size
        # The numbers of windowed groups, and what a window keeps beside the newest token.
        self._older = [(number, self._specs[number].window - 1 + late) for number in self.numbers]

    def leavers(self, requests: list[Request], tick: int) -> list[Leaver]:
        """The tables of requests whose rows leave windows while they decode up to this tick."""
        leavers = []
        for request in requests:
            by_group = self._tables[request].by_group
            computed = tick - request.lag - self._late
            for number in self.numbers:
                skipped = self._specs[number].skipped_blocks(computed)
                if skipped:
                    leavers.append((request, by_group[number], number, skipped))
        return leavers

    def leavers_in_turn(self, requests: list[Request], turns: int, tick: int) -> list[Leaver]:
        """The tables whose rows leave windows while requests decode, in this order, over and over.

        The k-th turn is that of request k modulo their number, when it first computes the `leave_offset` of a
        block after `tick`, or then again one block further each time.
        """
        offset = self.leave_offset
        assert offset is not None
        size = self._block_size
        tables = self._tables
        windows = self._older
        least = self.least - 1 + size + self._late
        leavers: list[Leaver] = []
        ahead = offset - tick
        while turns > 0:
            leavers += [
                (request, tables[request].by_group[number], number, (computed - window) // size)
                for request in requests[:turns]
                for computed in [tick - request.lag + (ahead + request.lag) % size]
                if computed >= least
                for number, window in windows
                if computed >= window + size
            ]
            turns -= len(requests)
            tick += size  # in the next round each is a block further
        return leavers

    def tick_of(self, leaver: Leaver) -> int:
        """The tick at which these rows leave the window of a request that decodes."""
        request, _, number, skipped = leaver
        return request.lag + self._late + self._specs[number].window - 1 + skipped * self._block_size

    def freed_blocks(self, leavers: list[Leaver]) -> int:
        """How many blocks become free when these rows leave windows."""
        freed = 0
        shared: dict[tuple[Extent, int], int] = {}
        rows_by_table = {table: skipped - table.nulls for _, table, _, skipped in leavers}
        for table, rows in rows_by_table.items():
            if rows < 1:
                continue
            if table.held:
                extent, length = table.held[0]
                longer = extent.rest is not None and length > extent.length
                if rows > length or extent.holders > 1 or longer:
                    freed += _own_blocks(table, rows, shared)
                    continue
            freed += rows * table.width
        for (extent, _), count in shared.items():
            freed += (extent.holders == count) * extent.width
        return freed


def _leave_offset(specs: list[GroupSpec], unit: int) -> int | None:
    """The offset at which blocks leave windows, if there is one, and they were full long before."""
    offsets = set()
    for spec in specs:
        if spec.rules.windowed:
            offset = spec.rules.leave_offset(spec, unit)
            if offset is None:
                return None
            offsets.add(offset)
    return offsets.pop() if len(offsets) == 1 else None


def _own_blocks(table: Table, count: int, shared: dict[tuple[Extent, int], int]) -> int:
    """How many blocks of a table's next `count` rows are its own. Counts the others in `shared`."""
    width = table.width
    own = 0
    for extent in table.extents():
        if count <= 0:
            return own
        rows = min(count, extent.length)
        count -= extent.length
        if extent.holders == 1:
            own += rows * width
            continue
        for row in range(rows):
            shared[extent, row] = shared.get((extent, row), 0) + 1
    return own + max(count, 0) * width
