"""Eviction policies of the host tier: which stored blocks give way to others.

Blocks that a transfer reads or writes are pinned and stay. Source: vllm/v1/kv_offload/cpu/policies (0.24).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

Pins = dict[int, int]
"""The blocks that transfers use, by name: how many read it, or -1 while it is being written."""


class HostEviction(Protocol):
    """Order in which blocks give way. A block is named by a whole number (see `content.py`).

    `settles`: looking at the same blocks twice changes nothing that looking once did not.
    """

    settles: bool

    def add(self, names: Sequence[int]) -> None:
        """Blocks are about to be written."""

    def free(self, names: Sequence[int]) -> None:
        """Blocks are not pinned any more."""

    def pin(self, name: int) -> None:
        """A block that was not pinned is from now on."""

    def remove(self, name: int) -> None:
        """A block is gone because its transfer failed."""

    def touch(self, names: Sequence[int]) -> None:
        """A request looked for these blocks of its sequence, whether they are stored or not."""

    def choose(self, count: int, spared: set[int]) -> list[int] | None:
        """Takes out `count` blocks, none of `spared`; None, and nothing is done, where too few may go."""
        ...

    def names(self) -> Iterator[int]:
        """The names of blocks that gave way and are remembered."""
        ...

    def clear(self) -> None:
        """Forgets all blocks."""


class HostLeastRecentlyUsed:
    """The block first whose last store, load or look is longest ago; of one look, a sequence's tail first."""

    def __init__(self) -> None:
        self.settles = True
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._last: tuple[Sequence[int], int] | None = None  # touched last, if nothing has happened since

    def add(self, names: Sequence[int]) -> None:
        """Nothing: they are pinned."""

    def free(self, names: Sequence[int]) -> None:
        """Puts blocks last."""
        idle = self._idle
        for name in names:
            idle[name] = None
        self._last = None

    def pin(self, name: int) -> None:
        """Takes a block out of the order."""
        del self._idle[name]

    def remove(self, name: int) -> None:
        """Forgets a block."""
        self._idle.pop(name, None)

    def touch(self, names: Sequence[int]) -> None:
        """Puts the blocks last, the first of them foremost."""
        if self._last is not None and self._last[0] is names and self._last[1] == len(names):
            return  # all of them are already
        self._last = names, len(names)
        idle = self._idle
        if idle.keys().isdisjoint(names):
            return
        move = idle.move_to_end
        for name in reversed(names):
            if name in idle:
                move(name)

    def choose(self, count: int, spared: set[int]) -> list[int] | None:
        """The first blocks in order."""
        idle = self._idle
        if len(idle) < count:
            return None
        take_first = idle.popitem
        victims = [take_first(False)[0] for _ in range(count)]
        if spared.isdisjoint(victims):
            return victims
        for name in reversed(victims):
            idle[name] = None
            idle.move_to_end(name, last=False)
        return self._choose_others(count, spared)

    def _choose_others(self, count: int, spared: set[int]) -> list[int] | None:
        victims = list(islice((name for name in self._idle if name not in spared), count))
        if len(victims) < count:
            return None
        for name in victims:
            del self._idle[name]
        return victims

    def names(self) -> Iterator[int]:
        """None."""
        return iter(())

    def clear(self) -> None:
        """Forgets all blocks."""
        self._idle.clear()


class AdaptiveReplacement:
    """ARC: blocks looked for once (`recent`) and those looked for again (`frequent`) share the room.

    The names of blocks that gave way lately are kept. A look for one that was recent lets `recent` have more
    room (`target`), for one that was frequent less. A block being written does not become frequent.
    """

    def __init__(self, blocks: int, pins: Pins) -> None:
        self.settles = False
        self.target = 0.0
        self.recent: OrderedDict[int, None] = OrderedDict()
        self.frequent: OrderedDict[int, None] = OrderedDict()
        self.recent_gone: OrderedDict[int, None] = OrderedDict()
        self.frequent_gone: OrderedDict[int, None] = OrderedDict()
        self._blocks = blocks
        self._pins = pins

    def add(self, names: Sequence[int]) -> None:
        """New blocks are recent."""
        for name in names:
            self.recent[name] = None
            self.recent_gone.pop(name, None)
            self.frequent_gone.pop(name, None)

    def free(self, names: Sequence[int]) -> None:
        """Nothing: pins are asked for when blocks are chosen."""

    def pin(self, name: int) -> None:
        """Nothing: pins are asked for when blocks are chosen."""

    def remove(self, name: int) -> None:
        """Forgets a block, leaving no trace."""
        self.recent.pop(name, None)
        self.frequent.pop(name, None)

    def touch(self, names: Sequence[int]) -> None:
        """Moves stored blocks up, and the target for each that gave way; the last of the names first."""
        for name in reversed(names):
            if name in self.recent:
                del self.recent[name]
                written = self._pins.get(name) != -1
                (self.frequent if written else self.recent)[name] = None
            elif name in self.frequent:
                self.frequent.move_to_end(name)
            elif name in self.recent_gone:
                more = max(1, len(self.frequent_gone) / len(self.recent_gone))
                self.target = min(self.target + more, self._blocks)
                self.recent_gone.move_to_end(name)
            elif name in self.frequent_gone:
                less = max(1, len(self.recent_gone) / len(self.frequent_gone))
                self.target = max(self.target - less, 0)
                self.frequent_gone.move_to_end(name)

    def choose(self, count: int, spared: set[int]) -> list[int] | None:
        """Recent blocks while they have more than their room, and frequent ones otherwise."""
        recent, frequent = self._movable(self.recent, spared), self._movable(self.frequent, spared)
        recent_blocks = len(self.recent)
        victims: list[tuple[int, bool]] = []
        for _ in range(count):
            name = next(recent, None) if recent_blocks >= int(self.target) else None
            if name is not None:
                recent_blocks -= 1
                victims.append((name, True))
                continue
            name = next(frequent, None)
            if name is None:
                return None
            victims.append((name, False))
        for name, was_recent in victims:
            del (self.recent if was_recent else self.frequent)[name]
            (self.recent_gone if was_recent else self.frequent_gone)[name] = None
        for traces in (self.recent_gone, self.frequent_gone):
            while len(traces) > self._blocks:
                traces.popitem(last=False)
        return [name for name, _ in victims]

    def _movable(self, names: Iterable[int], spared: set[int]) -> Iterator[int]:
        return (name for name in names if name not in self._pins and name not in spared)

    def names(self) -> Iterator[int]:
        """The traces."""
        yield from self.recent_gone
        yield from self.frequent_gone

    def clear(self) -> None:
        """Forgets all blocks and traces."""
        for names in (self.recent, self.frequent, self.recent_gone, self.frequent_gone):
            names.clear()
        self.target = 0.0
