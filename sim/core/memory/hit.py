"""Hit: a cached prefix that a memory found for a request."""

from __future__ import annotations

from typing import NamedTuple

from pagecast.sim.core.memory.group import GroupHit
from pagecast.sim.core.memory.table_hit import TableHit


class Hit(NamedTuple):
    """A cached prefix: `tokens` tokens in `blocks` blocks of all groups, `idle` of them free now.

    The blocks are in `groups` (`KvMemory`), or in `tables` where groups keep different tokens
    (`HybridMemory`). It is valid in the step in which it was found.
    """

    tokens: int
    blocks: int
    idle: int
    groups: tuple[GroupHit, ...]
    tables: tuple[TableHit, ...] = ()
