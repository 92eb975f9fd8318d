"""Prefixes that a router believes replicas to have, from either kind of index."""

from __future__ import annotations

from typing import Protocol

from pagecast.sim.fleet.index.approximate import ApproximateIndex
from pagecast.sim.fleet.index.events import EventIndex
from pagecast.sim.fleet.query import Query


class KnownPrefixes(Protocol):
    """How much of a prompt each replica has, in blocks of `block_tokens` tokens."""

    block_tokens: int

    def overlaps(self, query: Query) -> dict[int, int]:
        """Blocks from the prompt's start by replica; those with none are left out."""
        ...

    def first_holder(self, query: Query, blocks: int, replicas: list[int]) -> int:
        """Which of these replicas, that all have so many blocks, got the last part of them first."""
        ...

    def add(self, query: Query, replica: int) -> None:
        """The prompt was sent to a replica."""

    def forget(self, replica: int) -> None:
        """A replica is gone."""


class ApproximatePrefixes:
    """From an approximate index. `most_tokens`: the router looks at no more of a prompt."""

    def __init__(self, index: ApproximateIndex, block_tokens: int, most_tokens: int | None = None) -> None:
        self.index = index
        self.block_tokens = block_tokens
        self._most = None if most_tokens is None else most_tokens // block_tokens

    def _path(self, query: Query) -> list[tuple[bytes, int, int]]:
        path = query.path(self.block_tokens)
        most = self._most
        if most is None or not path or path[-1][2] <= most:
            return path
        return [(key, begin, min(end, most)) for key, begin, end in path if begin < most]

    def overlaps(self, query: Query) -> dict[int, int]:
        """As `KnownPrefixes.overlaps`."""
        return self.index.overlaps(self._path(query), query.now)

    def first_holder(self, query: Query, blocks: int, replicas: list[int]) -> int:
        """As `KnownPrefixes.first_holder`."""
        return self.index.first_holder(self._path(query), blocks, replicas)

    def add(self, query: Query, replica: int) -> None:
        """As `KnownPrefixes.add`."""
        self.index.add(replica, self._path(query), query.now)

    def forget(self, replica: int) -> None:
        """As `KnownPrefixes.forget`."""
        self.index.forget(replica)


class EventPrefixes:
    """From the replicas' own events, in their block size."""

    def __init__(self, index: EventIndex, block_tokens: int) -> None:
        self.index = index
        self.block_tokens = block_tokens

    def overlaps(self, query: Query) -> dict[int, int]:
        """As `KnownPrefixes.overlaps`."""
        return self.index.overlaps(query.engine_path(self.block_tokens), query.now)

    def first_holder(self, query: Query, blocks: int, replicas: list[int]) -> int:
        """As `KnownPrefixes.first_holder`."""
        return self.index.first_holder(query.engine_path(self.block_tokens), blocks, replicas)

    def add(self, query: Query, replica: int) -> None:
        """The replica itself will tell."""

    def forget(self, replica: int) -> None:
        """As `KnownPrefixes.forget`."""
        self.index.forget(replica)
