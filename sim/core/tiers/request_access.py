"""Request access: which blocks of the host one request stored and used, and the orders made of that.

Source: vllm/v1/kv_offload/cpu/manager.py and policies (0.31 on).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush

from pagecast.sim.core.tiers.host_eviction import AdaptiveReplacement, HostUse

_LEAST_TIDIED = 64

Rank = tuple[int, int, int]


class RequestAccess:
    """What one request did with blocks of the host, until it ends.

    `places`: the token with which each of its blocks ends, and the group, by the block's name. `seen`: those
    that it stored, tried to, or used, in order. `inserted` are those that it stored, `reused` those that it
    found there, `missed` those that it was to store. `turn`: its place in the order of requests; 0: none yet.
    """

    __slots__ = ("inserted", "missed", "places", "reused", "seen", "turn")

    def __init__(self) -> None:
        self.places: dict[int, tuple[int, int]] = {}
        self.seen: dict[int, None] = {}
        self.inserted: set[int] = set()
        self.reused: set[int] = set()
        self.missed: set[int] = set()
        self.turn = 0

    def use(self, names: Sequence[int], reused: Sequence[int] | AbstractSet[int]) -> list[int]:
        """Takes note of blocks, and of those that were there before. Returns those not seen before."""
        new = [name for name in names if name not in self.seen]
        self.seen.update(dict.fromkeys(new))
        self.reused.update([name for name in reused if name not in self.inserted])
        return new

    def from_the_end(self) -> list[int]:
        """The blocks seen, the last tokens first."""
        return sorted(self.seen, key=self.places.__getitem__, reverse=True)


class RequestRecency:
    """LRU by requests: the block first whose request ended first, and of one request the last tokens first.

    `by_place`: the blocks of requests that have not ended share the request's turn; else each has its own
    from the time that it is stored.
    """

    def __init__(self, use: HostUse, *, by_place: bool) -> None:
        self.settles = True
        self.ignores_writing = True
        self._use = use
        self._by_place = by_place
        self._ranks: dict[int, Rank] = {}
        self._heap: list[tuple[Rank, int]] = []  # of idle blocks; some entries are out of date
        self._turn = 0

    def _next(self) -> int:
        self._turn += 1
        return self._turn

    def _rank(self, name: int, access: RequestAccess) -> Rank:
        """The rank of a block that a request uses which has not ended."""
        if not access.turn:
            access.turn = self._next()
        token, group = access.places[name]
        return access.turn, -token, group

    def _is_idle(self, name: int) -> bool:
        use = self._use
        return name in use.slots and name not in use.pins and name not in use.writing

    def _push(self, names: Sequence[int]) -> None:
        for name in names:
            if self._is_idle(name):
                heappush(self._heap, (self._ranks[name], name))
        if len(self._heap) > 2 * len(self._ranks) + _LEAST_TIDIED:
            self._heap = [(rank, name) for name, rank in self._ranks.items() if self._is_idle(name)]
            heapify(self._heap)

    def insert(self, names: Sequence[int], access: RequestAccess) -> None:
        """A request is about to store blocks."""
        for name in names:
            self._ranks[name] = self._rank(name, access) if self._by_place else (self._next(), 0, 0)

    def accessed(self, names: Sequence[int], access: RequestAccess) -> None:
        """A request uses blocks for the first time, stored ones and others."""
        if not self._by_place or not names:
            return
        if not access.turn:
            access.turn = self._next()
        moved = []
        for name in names:
            before = self._ranks.get(name)
            if before is not None and before < (rank := self._rank(name, access)):
                self._ranks[name] = rank
                moved.append(name)
        self._push(moved)

    def missed(self, names: Sequence[int]) -> None:
        """Blocks that a request is to store are not there: nothing to learn."""

    def ended(self, access: RequestAccess) -> None:
        """A request has ended."""
        names = [name for name in access.from_the_end() if name in self._ranks]
        for name in names:
            self._ranks[name] = self._next(), 0, 0
        self._push(names)

    def add(self, names: Sequence[int]) -> None:
        """Nothing: `insert` did it."""

    def free(self, names: Sequence[int]) -> None:
        """Blocks are not pinned any more: they have their old places."""
        self._push(names)

    def pin(self, name: int) -> None:
        """Nothing: whoever chooses looks."""

    def remove(self, name: int) -> None:
        """A block is gone because its transfer failed."""
        del self._ranks[name]

    def touch(self, names: Sequence[int]) -> None:
        """Nothing: looks don't count."""

    def choose(self, count: int, spared: AbstractSet[int]) -> list[int] | None:
        """The idle blocks of the lowest ranks."""
        heap = self._heap
        taken: dict[int, Rank] = {}
        kept: list[tuple[Rank, int]] = []
        while heap and len(taken) < count:
            rank, name = heappop(heap)
            if name in taken or self._ranks.get(name) != rank or not self._is_idle(name):
                continue
            if name in spared:
                kept.append((rank, name))
            else:
                taken[name] = rank
        if len(taken) < count:
            kept += [(rank, name) for name, rank in taken.items()]
        for entry in kept:
            heappush(heap, entry)
        if len(taken) < count:
            return None
        for name in taken:
            del self._ranks[name]
        return list(taken)

    def names(self) -> Iterator[int]:
        """No names: blocks that gave way are forgotten."""
        return iter(())


class RequestAdaptive(AdaptiveReplacement):
    """ARC by requests: a block is frequent once a request that found it has ended."""

    def insert(self, names: Sequence[int], access: RequestAccess) -> None:
        """A request is about to store blocks: they are recent."""
        self.add(names)

    def accessed(self, names: Sequence[int], access: RequestAccess) -> None:
        """Nothing: a request's end counts."""

    def missed(self, names: Sequence[int]) -> None:
        """Blocks that a request is to store are not there: those that gave way move the target."""
        for name in reversed(names):
            self._learn(name)

    def ended(self, access: RequestAccess) -> None:
        """A request has ended: what it found is frequent, what it stored stays what it is."""
        for name in access.from_the_end():
            if name in access.reused:
                if name in self.recent:
                    del self.recent[name]
                    self.frequent[name] = None
                elif name in self.frequent:
                    self.frequent.move_to_end(name)
            elif name in access.inserted:
                if name in self.recent:
                    self.recent.move_to_end(name)
                elif name in self.frequent:
                    self.frequent.move_to_end(name)

    def touch(self, names: Sequence[int]) -> None:
        """Nothing: looks don't count."""
