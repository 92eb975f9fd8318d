"""Request access: which blocks of the host one request stored and used, and the orders made of that.

Source: vllm/v1/kv_offload/cpu/manager.py and policies (0.31 on).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush

from pagecast.sim.core.tiers.host_eviction import AdaptiveReplacement, HostUse

_LEAST_TIDIED = 64


class RequestAccess:
    """What one request did with blocks of the host, until it ends.

    `names` are its blocks, group by group in the order of its tokens, `sizes` the tokens of a block in each
    group. `seen`: those that it stored, tried to, or used. `inserted` are those that it stored, `reused`
    those that it found there, `missed` those that it was to store; only ARC asks for these. `turn`: its place
    in the order of requests, once it has one.
    """

    __slots__ = ("inserted", "missed", "names", "reused", "seen", "sizes", "turn")

    def __init__(self, names: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        self.names = names
        self.sizes = sizes
        self.seen: set[int] = set()
        self.inserted: set[int] = set()
        self.reused: set[int] = set()
        self.missed: set[int] = set()
        self.turn: Turn | None = None

    def see(self, names: Sequence[int]) -> Sequence[int]:
        """Takes note of blocks. Returns those not seen before."""
        seen = self.seen
        new = names if seen.isdisjoint(names) else [name for name in names if name not in seen]
        seen.update(new)
        return new

    def in_order(self, wanted: AbstractSet[int], last_group: int) -> list[int]:
        """Those of its blocks that are wanted, by the tokens with which they end.

        Of several that end with the same token the groups come in order, or the other way round: `last_group`
        is 1 or -1.
        """
        if len(self.names) == 1:
            names = self.names[0]
            return [*names] if len(wanted) == len(names) else [name for name in names if name in wanted]
        places = [
            (place * size, group * last_group, name)
            for group, (names, size) in enumerate(zip(self.names, self.sizes, strict=True))
            for place, name in enumerate(names, 1)
            if name in wanted
        ]
        return [name for _, _, name in sorted(places)]


class Turn:
    """A place in the order of requests, and the blocks that share it.

    `idle` are those that may give way, the last one first, and others that have gone since; `in_order` says
    whether they stand in order. That is the order of `sequence`, or, while there is none, of the tokens of
    the request whose `access` it is. `queued`: the turn stands in the queue of those that have such blocks.
    """

    __slots__ = ("access", "idle", "in_order", "number", "queued", "sequence")

    def __init__(self, number: int, access: RequestAccess, sequence: list[int] | None = None) -> None:
        self.number = number
        self.access = access
        self.sequence = sequence
        self.idle: list[int] = []
        self.in_order = True
        self.queued = False

    def sort(self) -> None:
        """Puts the idle blocks in order, each once."""
        if not self.in_order:
            idle = set(self.idle)
            if self.sequence is None:
                self.idle = self.access.in_order(idle, -1)
            else:
                self.idle = [name for name in self.sequence if name in idle]
            self.in_order = True


class RequestRecency:
    """LRU by requests: the block first whose request ended first, and of one request the last tokens first.

    `by_place`: the blocks of requests that have not ended share the request's turn; else those stored
    together have one from the time that they are stored.
    """

    def __init__(self, use: HostUse, *, by_place: bool) -> None:
        self.settles = True
        self.ignores_writing = True
        self._use = use
        self._by_place = by_place
        self._turns: dict[int, Turn] = {}  # that of each block
        self._queue: list[tuple[int, Turn]] = []  # a heap of the turns with idle blocks, by number
        self._numbers = 0
        self._listed = 0  # blocks in all lists of idle ones, with those that have gone

    def _new_turn(self, access: RequestAccess, sequence: list[int] | None = None) -> Turn:
        self._numbers += 1
        return Turn(self._numbers, access, sequence)

    def _turn_of(self, access: RequestAccess) -> Turn:
        """The turn of a request that has not ended."""
        turn = access.turn
        if turn is None:
            turn = access.turn = self._new_turn(access)
        return turn

    def _add_idle(self, turn: Turn, names: Sequence[int]) -> None:
        """Lists blocks of a turn that no transfer uses any more."""
        if not names:
            return
        turn.in_order = False
        turn.idle += names
        self._listed += len(names)
        if not turn.queued:
            turn.queued = True
            heappush(self._queue, (turn.number, turn))
        if self._listed > 2 * len(self._turns) + _LEAST_TIDIED:
            self._tidy()

    def _tidy(self) -> None:
        """Strikes out blocks that have gone."""
        turns = self._turns
        for _, turn in self._queue:
            turn.sort()
            turn.idle = self._use.idle([name for name in turn.idle if turns.get(name) is turn])
            turn.queued = bool(turn.idle)
        self._queue = [(number, turn) for number, turn in self._queue if turn.queued]
        heapify(self._queue)
        self._listed = sum([len(turn.idle) for _, turn in self._queue])

    def load(self, names: Sequence[int], access: RequestAccess) -> None:
        """A request is about to load blocks."""
        self._see(names, access)

    def offer(
        self,
        names: Sequence[int],
        missing: Sequence[int],
        ready: AbstractSet[int],
        access: RequestAccess,
    ) -> None:
        """A request is to store blocks: some are missing, others `ready`, the rest is being written."""
        if len(names) > len(missing) + len(ready):
            used = ready | set(missing)
            names = [name for name in names if name in used]
        self._see(names, access)

    def _see(self, names: Sequence[int], access: RequestAccess) -> None:
        """A request uses blocks: those that it has not used before get its turn, unless theirs is later."""
        new = access.see(names)
        if not self._by_place or not new:
            return
        turn = self._turn_of(access)
        turns = self._turns
        if turns.keys().isdisjoint(new):
            return
        moved = [name for name in new if (old := turns.get(name)) is not None and old.number < turn.number]
        turns.update(dict.fromkeys(moved, turn))
        self._add_idle(turn, self._use.idle(moved))

    def insert(self, names: Sequence[int], access: RequestAccess) -> None:
        """A request is about to store blocks."""
        turn = self._turn_of(access) if self._by_place else self._new_turn(access, [*reversed(names)])
        self._turns.update(dict.fromkeys(names, turn))

    def ended(self, access: RequestAccess) -> None:
        """A request has ended."""
        if access.turn is not None:  # all its blocks leave it
            self._listed -= len(access.turn.idle)
            access.turn.idle = []
        names = access.in_order(access.seen & self._turns.keys(), 1)
        turn = self._new_turn(access, names)
        self._turns.update(dict.fromkeys(names, turn))
        self._add_idle(turn, self._use.idle(names))
        turn.in_order = True

    def add(self, names: Sequence[int]) -> None:
        """Nothing: `insert` did it."""

    def free(self, names: Sequence[int]) -> None:
        """Blocks are not pinned any more: they have their old places."""
        turns = self._turns
        together = set(map(turns.__getitem__, names))
        for turn in together:
            alone = len(together) == 1
            self._add_idle(turn, names if alone else [name for name in names if turns[name] is turn])

    def pin(self, name: int) -> None:
        """Nothing: whoever chooses looks."""

    def remove(self, name: int) -> None:
        """A block is gone because its transfer failed."""
        del self._turns[name]

    def touch(self, names: Sequence[int]) -> None:
        """Nothing: looks don't count."""

    def choose(self, count: int, spared: AbstractSet[int]) -> list[int] | None:
        """The idle blocks of the first turns."""
        turns = self._turns
        queue = self._queue
        victims: list[int] = []
        places: list[tuple[Turn, list[int]]] = []
        kept: list[tuple[Turn, list[int]]] = []
        while queue and len(victims) < count:
            turn = queue[0][1]
            turn.sort()
            last = turn.idle[len(victims) - count :]
            del turn.idle[len(victims) - count :]
            self._listed -= len(last)
            if not turn.idle:
                heappop(queue)
                turn.queued = False
            chosen = self._use.idle([name for name in reversed(last) if turns.get(name) is turn])
            if spared and not spared.isdisjoint(chosen):
                kept.append((turn, [name for name in chosen if name in spared]))
                chosen = [name for name in chosen if name not in spared]
            for name in chosen:
                del turns[name]
            places.append((turn, chosen))
            victims += chosen
        for turn, names in kept:
            self._add_idle(turn, names)
        if len(victims) == count:
            return victims
        for turn, names in places:
            turns.update(dict.fromkeys(names, turn))
            self._add_idle(turn, names)
        return None

    def names(self) -> Iterator[int]:
        """No names: blocks that gave way are forgotten."""
        return iter(())


class RequestAdaptive(AdaptiveReplacement):
    """ARC by requests: a block is frequent once a request that found it has ended."""

    def load(self, names: Sequence[int], access: RequestAccess) -> None:
        """A request is about to load blocks."""
        access.see(names)
        access.reused.update([name for name in names if name not in access.inserted])

    def offer(
        self,
        names: Sequence[int],
        missing: Sequence[int],
        ready: AbstractSet[int],
        access: RequestAccess,
    ) -> None:
        """A request is to store blocks: those missing that gave way before move the target."""
        new = [name for name in missing if name not in access.missed]
        access.missed.update(new)
        for name in reversed(new):
            self._learn(name)
        access.seen.update(missing)
        self.load([*ready], access)

    def insert(self, names: Sequence[int], access: RequestAccess) -> None:
        """A request is about to store blocks: they are recent."""
        access.inserted.update(names)
        self.add(names)

    def ended(self, access: RequestAccess) -> None:
        """A request has ended: what it found is frequent, what it stored stays what it is."""
        for name in reversed(access.in_order(access.seen, 1)):
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
