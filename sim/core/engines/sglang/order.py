"""Orders of SGLang's waiting queue: arrival, and longest cached prefix first.

SGLang arranges its queue whenever it tries to admit somebody. Looking a prefix up counts as a use of it, so
the order also decides what is evicted.

Source: SGLang 0.5.23, srt/managers/schedule_policy.py, `SchedulePolicy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagecast.sim.core.engines.sglang.memory import RadixMemory
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.request import Request

_MATCH_AT_MOST = 128  # with more waiting, prefixes are not looked up
_REFRESH_INTERVAL = 32  # so often, in attempts to admit, the prefixes of those that wait are refreshed
_SHARED_HEAD = 32  # tokens: who shares so many with one ahead, and finds no more cached, waits for it


class SglangFcfs:
    """Arrival order; retracted requests go to the end. O(1) per request."""

    stable = True

    def __init__(self) -> None:
        self._waiting: dict[Request, None] = {}
        self._attempts = 0

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def add(self, request: Request) -> None:
        """Adds an arrival at the end."""
        self._waiting[request] = None

    def put_back(self, requests: Sequence[Request]) -> None:
        """Adds requests at the end: retracted ones are treated as arrivals."""
        self._waiting.update(dict.fromkeys(requests))

    def bring_back(self, requests: Sequence[Request]) -> None:
        """Adds requests that were set aside in front of all others."""
        self._waiting = {**dict.fromkeys(requests), **self._waiting}

    def pass_over(self, request: Request) -> None:
        pass  # it keeps its place

    def first(self, memory: Memory) -> Request | None:
        """The request at the front, as the queue stands."""
        return next(iter(self._waiting), None)

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        del self._waiting[request]

    def arrange(self, memory: RadixMemory) -> list[Request]:
        """Puts the queue in order for an attempt to admit, and returns it."""
        waiting = list(self._waiting)
        self._refresh(memory, waiting)
        return waiting

    def _refresh(self, memory: RadixMemory, waiting: list[Request]) -> None:
        """Now and then marks the prefixes of those that wait as used, those at the front last."""
        if not waiting or not memory.caching or not memory.least_recent:
            return
        due = not self._attempts % _REFRESH_INTERVAL
        self._attempts += 1
        if due:
            for request in reversed(waiting[:_MATCH_AT_MOST]):
                memory.match(request, request.known_tokens)


class LongestPrefixFirst(SglangFcfs):
    """Longest cached prefix first, while at most 128 wait; then arrival order.

    Of several with the same beginning, none of which is cached, all but the first go last: they will find it.
    """

    stable = False

    def arrange(self, memory: RadixMemory) -> list[Request]:
        """Puts the queue in order for an attempt to admit, and returns it."""
        if not memory.caching or len(self._waiting) > _MATCH_AT_MOST:
            return super().arrange(memory)
        size = memory.block_size
        last = 1 << 62
        rank: dict[Request, int] = {}
        heads: set[object] = set()
        for request in self._waiting:
            cached = memory.match(request, request.known_tokens).pages * size
            rank[request] = -min(cached, request.known_tokens - 1)
            if cached <= _SHARED_HEAD and request.known_tokens >= _SHARED_HEAD:
                head = _head(request, size)
                if head is None:
                    continue
                if head in heads:
                    rank[request] = last
                else:
                    heads.add(head)
        waiting = sorted(self._waiting, key=rank.__getitem__)
        self._waiting = dict.fromkeys(waiting)
        return waiting


def _head(request: Request, size: int) -> object:
    """Something that two requests share exactly where their first 32 tokens are equal.

    Where pages are longer than that, only prompts given as spans can be told apart so early; None for others.
    """
    keys = request.keys
    if _SHARED_HEAD % size:
        return keys.head(_SHARED_HEAD)
    page = _SHARED_HEAD // size - 1
    for digest, end in zip(keys.digests, keys.ends, strict=True):
        if page < end:
            return digest
    return None
