"""Host blocks: what is stored in host memory, and which of it transfers use.

Source: vllm/v1/kv_offload/cpu/manager.py (0.24).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from pagecast.sim.core.tiers.host_eviction import (
    AdaptiveReplacement,
    HostEviction,
    HostLeastRecentlyUsed,
    HostUse,
)
from pagecast.sim.core.tiers.offload_rules import FIRST_RULES, OffloadRules
from pagecast.sim.core.tiers.request_access import RequestAccess, RequestAdaptive, RequestRecency

HostChange = tuple[tuple[int, ...], bool]
"""Blocks that can be loaded from now on (True), or that gave way together (False)."""

_MOST_COUNTED = 64_000  # blocks whose looks are counted at most, where a threshold asks for it


class HostBlocks:
    """`room` blocks of host memory by the names of their contents; each has a `slot` numbered from 0.

    `pins` says how many transfers read a block, where any do; `writing` are those that one writes.

    `changes`, where it is a list, gets a `HostChange` for blocks that can be loaded from now on or give way.
    `new_slots` are those of the blocks that `reserve` returned last, in their order.
    """

    def __init__(
        self,
        room: int,
        eviction_policy: str = "lru",
        store_threshold: int = 0,
        rules: OffloadRules = FIRST_RULES,
    ) -> None:
        self.room = room
        use = HostUse()
        self.slots = use.slots
        self.pins = use.pins
        self.writing = use.writing
        self.evicted_blocks = 0
        self.skipped_stores = 0
        self.refused_stores = 0
        self.changes: list[HostChange] | None = None
        self.new_slots: list[int] = []
        adaptive = eviction_policy == "arc"
        self._by_request: RequestRecency | RequestAdaptive | None = None
        self.eviction: HostEviction
        if rules.by_request:
            recency = RequestRecency(use, by_place=rules.by_place)
            self._by_request = RequestAdaptive(room, use, falls_back=True) if adaptive else recency
            self.eviction = self._by_request
        elif adaptive:
            self.eviction = AdaptiveReplacement(room, use, falls_back=rules.falls_back_to_recent)
        else:
            self.eviction = HostLeastRecentlyUsed(use)
        self._rules = rules
        self._threshold = store_threshold
        self._looks: OrderedDict[int, int] | None = OrderedDict() if store_threshold > 1 else None
        # Whether to look for blocks that are not there leaves no trace.
        self._forgets_misses = rules.by_request or (self._looks is None and not adaptive)
        # Blocks looked for last, their number and `_state` then, where none of them was stored.
        self._missed: tuple[Sequence[int], int, int] = ((), 0, -1)
        self._state = 0  # changes whenever a slot gets or loses its content
        self._refused: dict[tuple[int, int, int], tuple[int, int]] = {}  # see `_is_refused_again`
        self._fresh = 0  # slots used so far, counted from 0
        self._free: list[int] = []

    @property
    def used(self) -> int:
        """Slots that have content or are about to."""
        return len(self.slots)

    def free_slots(self) -> list[int]:
        """The slots that have no content and are not about to."""
        return [*self._free, *range(self._fresh, self.room)]

    def names(self) -> Iterator[Iterable[int]]:
        """Every name that is kept here: of content, and of content that was looked for or gave way."""
        yield self.slots
        yield self.eviction.names()
        yield self._looks or ()

    @property
    def settles(self) -> bool:
        """Whether asking again for the same blocks changes nothing."""
        return self._by_request is not None or (self._looks is None and self.eviction.settles)

    # ---- looking

    def has(self, name: int) -> bool | None:
        """Whether a block can be loaded; None: not yet, it is being written."""
        if self._looks is not None and not self._rules.counts_offers:
            self._count(self._looks, name)
        if name not in self.slots:
            return False
        return None if name in self.writing else True

    def misses(self, names: Sequence[int], first: int, *, new: bool) -> bool:
        """Whether none of the blocks is stored and a look for them, from a place on, would leave no trace.

        `new`: nobody has asked for one of them before.
        """
        if not self._forgets_misses or names[first] in self.slots:
            return False
        if not new and not self.slots.keys().isdisjoint(names):
            return False
        self._missed = names, len(names), self._state
        return True

    def _count(self, looks: OrderedDict[int, int], name: int) -> None:
        if name in looks:
            looks.move_to_end(name)
            looks[name] += 1
            return
        if len(looks) >= _MOST_COUNTED:
            looks.popitem(last=False)
        looks[name] = 1

    def leading(self, names: Sequence[int]) -> int | None:
        """How many of the first names can be loaded; None: one of those stored is still being written."""
        if self._looks is not None:
            return self._leading(names)
        slots = self.slots
        count = 0
        for name in names:
            if name not in slots:
                break
            count += 1
        return count if self.writing.isdisjoint(names[:count]) else None

    def _leading(self, names: Sequence[int]) -> int | None:
        """`leading`, by asking for one block after the other."""
        count = 0
        late = False
        for name in names:
            there = self.has(name)
            if there is False:
                break
            late |= there is None
            count += 1
        return None if late else count

    def last_run(self, names: Sequence[int], length: int, newest: int) -> int | None:
        """The end of the last `length` names in a row that can be loaded, or of those at the very start.

        A run that ends with the last name needs `newest`. 0: there are none. None: a block that counts is
        still being written, or it is not known yet whether it is there.
        """
        rules = self._rules
        late = waits = False
        count = 0
        needed = newest
        for place in range(len(names) - 1, -1, -1):
            name = names[place]
            pending = name in self.writing
            there = self.has(name)
            if there is None and rules.counts_pending:
                pending = pending or (rules.promotions_pend and name in self.writing)
                if not pending:
                    late = True
                elif rules.ends_windows:
                    waits = True
                else:
                    late = True
                there = pending
            elif there is None:
                late = True
            if not there:
                count = 0
                needed = length
                waits = False
                continue
            count += 1
            if count == needed:
                return None if late or waits else place + needed
        return None if late or waits else count

    def touch(self, names: Sequence[int]) -> None:
        """Takes note that a request looked for these blocks, whether they are stored or not."""
        self.eviction.touch(names)

    def ended(self, access: RequestAccess) -> None:
        """A request has ended."""
        assert self._by_request is not None
        self._by_request.ended(access)

    # ---- loading

    def pin(self, names: Sequence[int], access: RequestAccess | None = None) -> list[int]:
        """Keeps blocks until `unpin`. Returns their slots. `access`: of the request that loads them."""
        if access is not None:
            assert self._by_request is not None
            self._by_request.load(names, access)
        pins = self.pins
        for name in names:
            if name not in pins:
                self.eviction.pin(name)
            pins[name] = pins.get(name, 0) + 1
        return [self.slots[name] for name in names]

    def unpin(self, names: Iterable[int]) -> None:
        """Takes back one `pin` of each block."""
        pins = self.pins
        unpinned: list[int] = []
        for name in names:
            if pins[name] > 1:
                pins[name] -= 1
                continue
            del pins[name]
            unpinned.append(name)
        self.eviction.free(unpinned)

    # ---- storing

    def reserve(
        self, names: Sequence[int], sequence: Sequence[int] = (), access: RequestAccess | None = None
    ) -> list[int] | None:
        """Makes room for those of the blocks that are not stored yet, and returns them.

        Their slots are in `slots`; they can be loaded from `written` on. None: there is no room now, since
        too many blocks are pinned. `sequence`: the blocks that they are of, if somebody has looked for those.
        `access`: of the request that stores them, where that decides what gives way.
        """
        looks = self._looks
        if self._refused and looks is None and access is None and self._is_refused_again(names):
            return None
        if looks is not None and self._rules.counts_offers:
            self._count_offer(looks, names)
        if looks is not None and access is None:
            names = self._often(looks, names)
        slots = self.slots
        stored: AbstractSet[int] = frozenset()
        missing_names = list(names)
        if not self._just_missed(sequence) and not slots.keys().isdisjoint(names):
            stored = slots.keys() & names
            missing_names = [name for name in names if name not in stored]
        if access is not None:
            if looks is not None:
                missing_names = self._often(looks, missing_names)
            assert self._by_request is not None
            self._by_request.offer(names, missing_names, stored - self.writing, access)
        count = len(missing_names)
        missing = count - (self.room - len(slots))
        if missing > 0 and not self._give_way(missing, stored):
            self.refused_stores += 1
            if access is None:
                self._refused[_query(names)] = (self._state, missing)
            return None
        if not count:
            return missing_names
        self._state += 1
        if self._refused:
            self._refused.clear()
        self.new_slots = new_slots = self._take_slots(count)
        slots.update(zip(missing_names, new_slots, strict=True))
        self.writing.update(missing_names)
        if access is None:
            self.eviction.add(missing_names)
        else:
            assert self._by_request is not None
            self._by_request.insert(missing_names, access)
        return missing_names

    def _often(self, looks: OrderedDict[int, int], names: Sequence[int]) -> list[int]:
        """Those of the blocks that were looked for, or offered, as often as the threshold asks."""
        often = [name for name in names if looks.get(name, 0) >= self._threshold]
        self.skipped_stores += len(names) - len(often)
        return often

    def _count_offer(self, looks: OrderedDict[int, int], names: Sequence[int]) -> None:
        """Counts blocks that are to be stored. They don't push out one another."""
        known = {name for name in names if name in looks}
        for name in names:
            if name in known:
                looks.move_to_end(name)
                looks[name] += 1
        others = len(looks) - len(known)
        for name in names:
            if name in looks:
                continue
            if len(looks) >= _MOST_COUNTED:
                if not others:
                    continue
                looks.popitem(last=False)
                others -= 1
            looks[name] = 1

    def _just_missed(self, sequence: Sequence[int]) -> bool:
        """Whether no block of a sequence was stored when it was looked for, and nothing has changed since."""
        missed, length, state = self._missed
        return missed is sequence and state == self._state and length == len(sequence)

    def _take_slots(self, count: int) -> list[int]:
        """So many slots without content, those never used first."""
        slots: list[int] = []
        if self._fresh < self.room:
            slots += range(self._fresh, min(self._fresh + count, self.room))
            self._fresh += len(slots)
            count -= len(slots)
        if count:
            slots += self._free[: -count - 1 : -1]
            del self._free[-count:]
        return slots

    def _is_refused_again(self, names: Sequence[int]) -> bool:
        """Whether blocks that found no room still find none.

        That is told without looking at each: nothing has been stored since, and too few are unpinned.
        """
        query = _query(names)
        if query not in self._refused:
            return False
        state, missing = self._refused[query]
        if state != self._state or missing <= self._idle_blocks:
            return False
        self.refused_stores += 1
        return True

    @property
    def _idle_blocks(self) -> int:
        """Stored blocks that no transfer uses."""
        return len(self.slots) - len(self.pins) - len(self.writing)

    def _give_way(self, count: int, spared: AbstractSet[int]) -> bool:
        """Frees so many slots, none of those of `spared`. False: there are too few, and nothing was done."""
        if count > self._idle_blocks:
            return False
        victims = self.eviction.choose(count, spared)
        if victims is None:
            return False
        self._free.extend(map(self.slots.pop, victims))
        self.evicted_blocks += len(victims)
        if self.changes is not None:
            self.changes.append((tuple(victims), False))
        return True

    def written(self, names: Sequence[int], *, failed: bool = False) -> None:
        """Takes note that reserved blocks have their content; `failed`: that they never will."""
        self.writing.difference_update(names)
        if failed:
            for name in names:
                self.eviction.remove(name)
                self._state += 1
                self._free.append(self.slots.pop(name))
            return
        self.eviction.free(names)
        if self.changes is not None:
            self.changes += [((name,), True) for name in names]


def _query(names: Sequence[int]) -> tuple[int, int, int]:
    """What blocks were asked for: the first, the last, how many."""
    return names[0], names[-1], len(names)
