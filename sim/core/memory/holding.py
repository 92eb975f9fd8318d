"""Holding: the blocks that one request has in one KV group."""

from __future__ import annotations

from collections.abc import Iterator

from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.memory.run import Run, Writer
from pagecast.sim.core.retention import BlockRange


class Holding(Writer):
    """Blocks of one sequence: a prefix that was found in the cache, then the runs it writes itself.

    `prefix` are pairs of a run and the number of its blocks held. `own` (of `Writer`) are its own runs.
    `segment` is the segment of `keys` in which its next block lies. `retention` is what was asked for its
    blocks, if anything, and `tenant` is who holds them.
    """

    __slots__ = ("keys", "prefix", "prefix_blocks", "retention", "segment", "tenant")

    def __init__(
        self, keys: BlockKeys, retention: tuple[BlockRange, ...] | None = None, tenant: str = ""
    ) -> None:
        self.tenant = tenant
        self.retention = retention
        self.own: list[Run] = []
        self.tail: Run | None = None
        self.generating = False
        self.keys = keys
        self.prefix: list[tuple[Run, int]] = []
        self.prefix_blocks = 0
        self.segment = 0

    @property
    def end(self) -> int:
        """How many blocks it has. O(1)."""
        tail = self.tail
        return self.prefix_blocks if tail is None else tail.start + len(tail.blocks)

    @property
    def last_run(self) -> Run | None:
        """The run with its last block; None where it has no blocks. O(parts of the prefix)."""
        if self.tail is not None:
            return self.tail
        last = None
        for part, _ in self.prefix_parts():
            last = part
        return last

    @property
    def last_block(self) -> int:
        """Its newest own block. O(1)."""
        assert self.tail is not None
        return self.tail.blocks[-1]

    def prefix_parts(self) -> Iterator[tuple[Run, int]]:
        """The runs of its cached prefix in order, each with the number of blocks held of it."""
        for run, length in self.prefix:
            yield from split_parts(run, length)

    def parts(self) -> Iterator[tuple[Run, int]]:
        """All its runs in order, each with the number of blocks held of it."""
        yield from self.prefix_parts()
        for run in self.own:
            yield run, len(run.blocks)

    def blocks(self) -> list[int]:
        """Block numbers in sequence order: its block table."""
        numbers: list[int] = []
        if self.prefix:
            for run, count in self.prefix_parts():
                numbers += run.blocks[:count]
        for run in self.own:
            numbers += run.blocks
        return numbers

    def append_run(self, run: Run) -> None:
        """Adds a run that it writes from now on."""
        self.own.append(run)
        self.tail = run


def split_parts(run: Run, length: int) -> Iterator[tuple[Run, int]]:
    """The parts of a run whose first `length` blocks are held, if it was split since it was claimed."""
    end = run.start + length
    part: Run | None = run
    while part is not None and part.start < end:
        yield part, min(end, part.end) - part.start
        part = part.rest
