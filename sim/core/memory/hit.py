"""Hit: a cached prefix that a memory found for a request, with its blocks in each group."""

from __future__ import annotations

from typing import NamedTuple

from pagecast.sim.core.memory.extent import Extent

Part = tuple[Extent, int, int]
"""Blocks `low` to `high` of an extent."""


class TableHit:
    """A block table of `places` places: null in the first `nulls` of them, then the blocks of `parts`."""

    __slots__ = ("nulls", "parts", "places")

    def __init__(self, nulls: int) -> None:
        self.nulls = nulls
        self.places = nulls
        self.parts: list[Part] = []

    def add(self, parts: list[Part]) -> None:
        """Adds blocks at its end."""
        self.parts += parts
        for _, low, high in parts:
            self.places += high - low

    def cut(self, places: int) -> None:
        """Shortens it to at most so many places."""
        while self.parts and self.places > places:
            extent, low, high = self.parts.pop()
            self.places -= high - low
            if self.places < places:
                kept = places - self.places
                self.parts.append((extent, low, low + kept))
                self.places = places
        if self.places > places:
            self.nulls = self.places = places

    def after(self, places: int) -> list[Part]:
        """What it has after its first `places` places."""
        place = self.nulls
        if places <= place:
            return self.parts
        parts: list[Part] = []
        for extent, low, high in self.parts:
            first = low + max(places - place, 0)
            place += high - low
            if first < high:
                parts.append((extent, first, high))
        return parts


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
