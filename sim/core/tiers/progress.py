"""Progress of offloading: how far each request is stored and loaded, and the transfers under way."""

from __future__ import annotations

from collections.abc import Sequence

from pagecast.sim.core.request import Request
from pagecast.sim.core.tiers.request_access import RequestAccess


class TransferJob:
    """A transfer under way. `names`: the offloaded blocks it moves; `blocks`: those of the device."""

    __slots__ = ("blocks", "is_store", "names", "number", "request")

    def __init__(
        self, number: int, request: Request, names: list[int], blocks: Sequence[int], *, is_store: bool
    ) -> None:
        self.number = number
        self.request = request
        self.names = names
        self.blocks = blocks
        self.is_store = is_store


class OffloadProgress:
    """How far a request is offloaded, for each group.

    `names`: of its blocks, as far as they are known. `stored`: offloaded blocks, from the start, that need no
    storing any more. `tables`: its device blocks as the connector knows them, where groups have windows, or
    where it runs no more. `hits`: offloaded blocks found when it was last asked for. `jobs`: its transfers
    under way. `access`: what it did with the host, where that decides what gives way. `ended`: it has ended,
    and stores nothing any more.
    """

    __slots__ = ("access", "ended", "hits", "jobs", "local", "names", "stored", "tables")

    def __init__(self, groups: int) -> None:
        self.names: list[list[int]] = [[]]
        self.tables: list[list[int]] = [[]]
        if groups > 1:
            self.names += [[] for _ in range(1, groups)]
            self.tables += [[] for _ in range(1, groups)]
        self.stored = [0] * groups
        self.hits = [0] * groups
        self.local = 0
        self.jobs: list[int] = []
        self.access: RequestAccess | None = None
        self.ended = False
