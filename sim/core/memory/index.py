"""Prefix index: which published runs hold a segment's content."""

from __future__ import annotations

from collections.abc import Iterator

from pagecast.sim.core.memory.run import Run


class PrefixIndex:
    """Published runs by key. Runs with one key are chained by `next`, the one published first in front."""

    def __init__(self) -> None:
        self.first: dict[bytes, Run] = {}

    def chain(self, key: bytes) -> Iterator[Run]:
        """The runs published under a key, oldest first."""
        run = self.first.get(key)
        while run is not None:
            following = run.next
            yield run
            run = following

    def add(self, run: Run) -> None:
        """Makes a run findable under its key, behind any run that is already."""
        key = run.key
        assert key is not None and not run.indexed
        run.indexed = True
        last = self.first.get(key)
        if last is None:
            self.first[key] = run
            return
        while last.next is not None:
            last = last.next
        last.next = run

    def remove(self, run: Run) -> None:
        """Makes a run unfindable."""
        key = run.key
        assert key is not None and run.indexed
        run.indexed = False
        before = self.first[key]
        if before is run:
            if run.next is None:
                del self.first[key]
            else:
                self.first[key] = run.next
        else:
            while before.next is not run:
                assert before.next is not None
                before = before.next
            before.next = run.next
        run.next = None

    def blocks(self) -> set[int]:
        """Every block whose content can be found. Linear in what is cached; for displays and checks."""
        numbers: set[int] = set()
        for key in self.first:
            for run in self.chain(key):
                numbers.update(run.blocks[: run.published])
        return numbers
