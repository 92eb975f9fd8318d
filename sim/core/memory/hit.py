"""Hit: a cached prefix that a memory found for a request."""

from __future__ import annotations

from typing import NamedTuple

from pagecast.sim.core.memory.table_hit import TableHit


class Hit(NamedTuple):
    """A cached prefix of `tokens` tokens. `tables` has its blocks, group by group.

    It is valid in the step in which it was found.
    """

    tokens: int
    tables: tuple[TableHit, ...] = ()

    @property
    def held(self) -> int:
        """Its blocks that somebody holds now, in all groups."""
        held = 0
        for table in self.tables:
            for extent, low, high in table.parts:
                if extent.holders:
                    held += (high - low) * extent.width
        return held
