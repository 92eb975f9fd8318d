"""Eviction orders: which cached content goes first. Each order is written once, here.

An order gives content a level. The lowest level is evicted first, and of equal levels the content that was
used least recently. Content is ranked by these levels in three forms:

- `ExtentPool`: a ring, for `Lru` where the order of freeing is that of use;
- `RankedEviction`: a heap of free extents, for every order;
- `RadixTree`: a heap of leaves, for those of `LEAF_ORDERS`.

Host memory evicts names that whole lookups move at once, and has its own forms (`tiers/host_eviction.py`).

To add an order, write a class here and name it in `ORDERS`; `EVICTIONS` of `cache_policy.py` offers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

LEAF_ORDERS = ("lru", "lfu", "slru", "fifo", "mru", "filo", "priority")  # of a radix tree

_USES = 8  # requests that have read a block are told apart up to this many
_MEMORY = 4096.0  # blocks after which what was learned of reuse counts half


class Content(Protocol):
    """Content that may be evicted: neighbouring blocks of a sequence.

    Times are those of the memory's own clock. The request that wrote it is not among its `uses`.
    """

    @property
    def uses(self) -> int:
        """How many requests have reused it."""
        ...

    @property
    def used(self) -> int:
        """When it was last used; of free blocks, when they became free."""
        ...

    @property
    def made(self) -> int:
        """When it was written."""
        ...

    @property
    def priority(self) -> int:
        """Its retention priority."""
        ...

    @property
    def start(self) -> int:
        """The number of its first block."""
        ...

    @property
    def end(self) -> int:
        """The number of the block after its last."""
        ...


def equal_cost(block: int) -> float:
    """The same for every block, where the cost of its prefill is not known."""
    return 1.0


class OrderSettings(NamedTuple):
    """Settings of orders, in blocks. Each order reads its own.

    `most_protected`: of `Slru` (None: any number). `most_valued` and `recompute`: of `Cost`.
    """

    most_protected: int | None = None
    most_valued: int = 1 << 62
    recompute: Callable[[int], float] = equal_cost


NO_SETTINGS = OrderSettings()


class EvictionOrder:
    """An order of content. `level` is all that most orders have.

    `most_protected`: at most so many blocks may be above level 0; beyond that, those of them that were used
    least recently fall to level 0 and count as just used (None: any number).
    `gains`: levels may change while content waits. Then `level_now` and `at_once` are asked.
    `keeps_retention`: levels are retention priorities, which end with time where a duration was asked for.
    """

    most_protected: int | None = None
    gains: bool = False
    keeps_retention: bool = False

    def __init__(self, settings: OrderSettings = NO_SETTINGS) -> None:
        pass

    def level(self, content: Content) -> float:
        """The level of content that can be evicted from now on."""
        raise NotImplementedError

    def level_now(self, content: Content, level: float) -> float | None:
        """The new level of content that is to be evicted next; None: it stays, and is evicted."""
        return None

    def at_once(self, content: Content, most: int) -> int:
        """How many of its last `most` blocks are evicted before the level of the rest is asked for again."""
        return most

    def divided(self, part: Content, content: Content) -> None:
        """`part` was cut off the end of content that has a level, and has the same one."""

    def removed(self, content: Content) -> None:
        """Content is evicted, as far as its end has moved forward, or in use again."""

    def figures(self) -> dict[str, object]:
        """The order's figures, for a replay's summary."""
        return {}


class Lru(EvictionOrder):
    """Least recently used first."""

    def level(self, content: Content) -> float:
        """One level for all."""
        return 0


class Lfu(EvictionOrder):
    """Content that the fewest requests have reused first.

    A prefix is reused by all that reuse its continuation, so its level is never the lower one.
    """

    def level(self, content: Content) -> float:
        """How many requests have reused it."""
        return content.uses


class Slru(EvictionOrder):
    """Content that was never reused before content that was: segmented LRU.

    The protected segment may be bounded (Karedy, Love and Wherry, 1994).
    """

    def __init__(self, settings: OrderSettings = NO_SETTINGS) -> None:
        self.most_protected = settings.most_protected

    def level(self, content: Content) -> float:
        """1 in the protected segment."""
        return 1 if content.uses > 0 else 0


class Fifo(EvictionOrder):
    """Content that was written first first, however often it was reused."""

    def level(self, content: Content) -> float:
        """When it was written."""
        return content.made


class Filo(EvictionOrder):
    """Content that was written last first."""

    def level(self, content: Content) -> float:
        """When it was written, backwards."""
        return -content.made


class Mru(EvictionOrder):
    """Most recently used first."""

    def level(self, content: Content) -> float:
        """When it was used, backwards."""
        return -content.used


class Priority(EvictionOrder):
    """Lowest retention priority first (TensorRT-LLM)."""

    keeps_retention: bool = True

    def level(self, content: Content) -> float:
        """The priority."""
        return content.priority


class Cost(EvictionOrder):
    """Content whose loss is expected to cost the least prefill time goes first.

    A block's value is the time to compute it again, which grows with its position, times the probability
    that it is reused. The probability is learned: of blocks that as many requests had reused when they became
    free, the share that was reused again before it was evicted. Values age as in GreedyDual-Size-Frequency
    (Cherkasova, 1998): each eviction raises the value that later ones start from.

    `recompute(block)` is the time to compute the block with that number in its sequence; any unit. Blocks
    from number `most_valued` on have no value, so that one huge prefix cannot own the cache.
    """

    gains: bool = True

    def __init__(self, settings: OrderSettings = NO_SETTINGS) -> None:
        self._recompute = settings.recompute
        self._most_valued = settings.most_valued
        self._floor = 0.0  # the value of what was evicted last
        self._reuses = [1.0] * (_USES + 1)
        self._evictions = [1.0] * (_USES + 1)
        self._freed: dict[Content, tuple[int, int, int]] = {}  # uses, start and end when it became free

    def probability(self, uses: int) -> float:
        """The share of blocks with so many uses that are reused before they are evicted."""
        uses = min(uses, _USES)
        return self._reuses[uses] / (self._reuses[uses] + self._evictions[uses])

    def level(self, content: Content) -> float:
        """The floor and the value of the last block. Takes note of the content."""
        uses, end = content.uses, content.end
        self._freed[content] = (uses, content.start, end)
        if end > self._most_valued:
            return self._floor
        return self._floor + self.probability(uses) * self._recompute(end - 1)

    def level_now(self, content: Content, level: float) -> float | None:
        """Content that was cut down to the cap has a value from then on."""
        uses, _, freed = self._freed[content]
        end = content.end
        if freed > self._most_valued >= end:
            self._evictions[min(uses, _USES)] += freed - end
            return self.level(content)
        self._floor = max(self._floor, level)
        return None

    def at_once(self, content: Content, most: int) -> int:
        """All, but first only the blocks beyond the cap, which have no value."""
        beyond = content.end - self._most_valued
        return beyond if 0 < beyond < most else most

    def divided(self, part: Content, content: Content) -> None:
        """Takes note of both parts."""
        uses, low, high = self._freed[content]
        cut = part.start
        self._freed[content] = uses, low, cut
        self._freed[part] = uses, cut, high

    def removed(self, content: Content) -> None:
        """Learns how much of the content was reused: what was evicted is its end."""
        uses, low, high = self._freed.pop(content)
        uses = min(uses, _USES)
        end = content.end
        self._reuses[uses] += end - low
        self._evictions[uses] += high - end
        if self._reuses[uses] + self._evictions[uses] > _MEMORY:
            self._reuses[uses] /= 2
            self._evictions[uses] /= 2

    def figures(self) -> dict[str, object]:
        """By how often content was reused before: the learned probability that it is reused again, and from
        how many blocks it was learned (those of long ago count less)."""
        learned = zip(self._reuses, self._evictions, strict=True)
        return {
            "reuse_probability": [round(self.probability(uses), 4) for uses in range(_USES + 1)],
            "learned_blocks": [round(reused + evicted) for reused, evicted in learned],
        }


ORDERS: dict[str, Callable[[OrderSettings], EvictionOrder]] = {
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "fifo": Fifo,
    "filo": Filo,
    "mru": Mru,
    "priority": Priority,
    "cost": Cost,
}
