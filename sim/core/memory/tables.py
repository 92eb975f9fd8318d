"""Block tables of one request, with the rows that are taken for it ahead."""

from __future__ import annotations

from array import array

from pagecast.sim.core.memory.table import Table


class Tables:
    """One request's block tables, in the order of the memory's `layers`.

    `pending` rows are taken for it but are not in its tables yet: a row has a block for each group that
    grows. `blocks` has them row by row, where blocks have numbers.
    """

    __slots__ = ("blocks", "by_group", "pending", "published")

    def __init__(self, by_group: list[Table], nothing: array[int]) -> None:
        self.by_group = by_group
        self.published = 0  # of so many tokens every full block is published
        self.pending = 0
        self.blocks = nothing
