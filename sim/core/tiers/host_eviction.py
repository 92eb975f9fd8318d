"""Eviction policies of the host tier: which stored blocks give way to others.

Blocks that a transfer reads or writes are pinned and stay. These are not `EvictionOrder`s: a lookup moves all
blocks of a sequence at once, thousands of names in each step, so LRU is a list that whole stretches are added
to and taken from rather than a rank of each block; and ARC's two lists have no rank of one block at all.

Source: vllm/v1/kv_offload/cpu/policies (0.24).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Protocol

_LEAST_TIDIED = 4096  # places of the order that may always be out of date


class HostUse:
    """The blocks in host memory by name, and those that transfers use.

    `slots` has the slot of each; `pins` how many transfers read one, where there are any; `writing` are those
    that are being written.
    """

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.writing: set[int] = set()

    def idle(self, names: Sequence[int]) -> list[int]:
        """Those of the blocks that are there and that no transfer uses."""
        slots, pins, writing = self.slots, self.pins, self.writing
        if slots.keys().isdisjoint(names):
            return []
        stored = list(filter(slots.__contains__, names))
        if pins and not pins.keys().isdisjoint(stored):
            stored = [name for name in stored if name not in pins]
        if writing and not writing.isdisjoint(stored):
            stored = [name for name in stored if name not in writing]
        return stored


class HostEviction(Protocol):
    """Order in which blocks give way. A block is named by a whole number (see `content.py`).

    `settles`: looking at the same blocks twice changes nothing that looking once did not. `ignores_writing`:
    nor does looking at blocks that are being written.
    """

    settles: bool
    ignores_writing: bool

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

    def choose(self, count: int, spared: AbstractSet[int]) -> list[int] | None:
        """Takes out `count` blocks, none of `spared`; None, and nothing is done, where too few may go."""
        ...

    def names(self) -> Iterator[int]:
        """The names of blocks that gave way and are remembered."""
        ...


class HostLeastRecentlyUsed:
    """The block first whose last store, load or look is longest ago; of one look, a sequence's tail first.

    `order` has the idle blocks from place `first` on. A block that moves back is added at the end; `moved`
    says how often it stands ahead of its place, so that whole stretches of the order can be taken at once.
    """

    def __init__(self, use: HostUse) -> None:
        self.settles = True
        self.ignores_writing = True
        self._use = use
        self._order: list[int] = []
        self._first = 0
        self._moved: dict[int, int] = {}
        self._last: tuple[Sequence[int], int] | None = None  # touched last, if nothing has happened since

    def add(self, names: Sequence[int]) -> None:
        """Leaves blocks out of the order: they are pinned until they are written."""

    def free(self, names: Sequence[int]) -> None:
        """Puts blocks last."""
        self._order += names
        self._last = None
        self._tidy()

    def pin(self, name: int) -> None:
        """Takes a block out of the order."""
        self._moved[name] = self._moved.get(name, 0) + 1

    def remove(self, name: int) -> None:
        """Leaves the order as it is: a block that was being written is not in it."""

    def touch(self, names: Sequence[int]) -> None:
        """Puts the blocks last, the first of them foremost."""
        if self._last is not None and self._last[0] is names and self._last[1] == len(names):
            return  # all of them are already
        self._last = names, len(names)
        idle = self._use.idle(names)
        if not idle:
            return
        idle.reverse()
        moved = self._moved
        for name in idle:
            moved[name] = moved.get(name, 0) + 1
        self._order += idle
        self._tidy()

    def _tidy(self) -> None:
        """Drops what was taken from the order, and then also what moved, once it is most of it."""
        length = len(self._order)
        if 2 * self._first > length:
            del self._order[: self._first]
            self._first = 0
        elif length - self._first > 2 * len(self._use.slots) + _LEAST_TIDIED:
            self._order = list(self._idle())
            self._first = 0
            self._moved.clear()

    def _idle(self) -> Iterator[int]:
        """The idle blocks in order."""
        moved = dict(self._moved)
        for place in range(self._first, len(self._order)):
            name = self._order[place]
            count = moved.get(name, 0)
            if count:
                moved[name] = count - 1
            else:
                yield name

    def choose(self, count: int, spared: AbstractSet[int]) -> list[int] | None:
        """The first blocks in order."""
        first = self._first
        if self._moved:
            victims, end = self._first_idle(count)
        else:
            end = first + count
            victims = self._order[first:end]
        if spared and not spared.isdisjoint(victims):
            self._order[first:end] = victims
            return self._choose_others(count, spared)
        self._first = end
        return victims

    def _first_idle(self, count: int) -> tuple[list[int], int]:
        """The first idle blocks, and the place behind them. What moved counts as moved no more."""
        order, moved = self._order, self._moved
        place = self._first
        victims: list[int] = []
        while len(victims) < count:
            name = order[place]
            place += 1
            if name not in moved:
                victims.append(name)
            elif moved[name] > 1:
                moved[name] -= 1
            else:
                del moved[name]
        return victims, place

    def _choose_others(self, count: int, spared: AbstractSet[int]) -> list[int] | None:
        victims = list(islice((name for name in self._idle() if name not in spared), count))
        if len(victims) < count:
            return None
        for name in victims:
            self.pin(name)
        return victims

    def names(self) -> Iterator[int]:
        """No names: blocks that gave way are forgotten."""
        return iter(())


class AdaptiveReplacement:
    """ARC: blocks looked for once (`recent`) and those looked for again (`frequent`) share the room.

    The names of blocks that gave way lately are kept. A look for one that was recent lets `recent` have more
    room (`target`), for one that was frequent less. A block being written does not become frequent.
    """

    def __init__(self, blocks: int, use: HostUse, *, falls_back: bool = False) -> None:
        self.settles = False
        self.ignores_writing = False
        self.target = 0.0
        self.recent: OrderedDict[int, None] = OrderedDict()
        self.frequent: OrderedDict[int, None] = OrderedDict()
        self.recent_gone: OrderedDict[int, None] = OrderedDict()
        self.frequent_gone: OrderedDict[int, None] = OrderedDict()
        self._blocks = blocks
        self._use = use
        self._falls_back = falls_back  # to recent blocks, where no frequent one may go

    def add(self, names: Sequence[int]) -> None:
        """New blocks are recent."""
        for name in names:
            self.recent[name] = None
            self.recent_gone.pop(name, None)
            self.frequent_gone.pop(name, None)

    def free(self, names: Sequence[int]) -> None:
        """Leaves the lists as they are: pins are looked up when blocks are chosen."""

    def pin(self, name: int) -> None:
        """Leaves the lists as they are: pins are looked up when blocks are chosen."""

    def remove(self, name: int) -> None:
        """Forgets a block, leaving no trace."""
        self.recent.pop(name, None)
        self.frequent.pop(name, None)

    def touch(self, names: Sequence[int]) -> None:
        """Moves stored blocks up, and the target for each that gave way; the last of the names first."""
        for name in reversed(names):
            if name in self.recent:
                del self.recent[name]
                written = name not in self._use.writing
                (self.frequent if written else self.recent)[name] = None
            elif name in self.frequent:
                self.frequent.move_to_end(name)
            else:
                self._learn(name)

    def _learn(self, name: int) -> None:
        """Moves the target where a block is asked for that gave way."""
        if name in self.recent_gone:
            more = max(1, len(self.frequent_gone) / len(self.recent_gone))
            self.target = min(self.target + more, self._blocks)
            self.recent_gone.move_to_end(name)
        elif name in self.frequent_gone:
            less = max(1, len(self.recent_gone) / len(self.frequent_gone))
            self.target = max(self.target - less, 0)
            self.frequent_gone.move_to_end(name)

    def choose(self, count: int, spared: AbstractSet[int]) -> list[int] | None:
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
            if name is not None:
                victims.append((name, False))
                continue
            name = next(recent, None) if self._falls_back else None
            if name is None:
                return None
            recent_blocks -= 1
            victims.append((name, True))
        for name, was_recent in victims:
            del (self.recent if was_recent else self.frequent)[name]
            (self.recent_gone if was_recent else self.frequent_gone)[name] = None
        for traces in (self.recent_gone, self.frequent_gone):
            while len(traces) > self._blocks:
                traces.popitem(last=False)
        return [name for name, _ in victims]

    def _movable(self, names: Iterable[int], spared: AbstractSet[int]) -> Iterator[int]:
        pins, writing = self._use.pins, self._use.writing
        return (name for name in names if not (name in pins or name in writing or name in spared))

    def names(self) -> Iterator[int]:
        """The traces."""
        yield from self.recent_gone
        yield from self.frequent_gone
