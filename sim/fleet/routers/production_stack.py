"""vLLM production stack's router: `mode` is its `--routing-logic`.

    roundrobin    one engine after the other
    priority      the engine with the fewest requests per second over the last minute
    session       the session's engine on a hash ring; without a session as `priority`
    kvaware       the engine with the longest prefix, if it lacks at most 2,000 tokens; else as `session`.
                  LMCache's controller knows the prefixes, as the engines tell it what they store and evict
    prefixaware   at random among the engines with the longest prefix, in a trie of chunks of 128 characters
                  that forgets nothing; any engine where none has a chunk

The stack's ring places names with another hash, so which engine a session belongs to differs, not how evenly.
"""

from __future__ import annotations

from collections import deque
from random import Random

from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.index.known import KnownPrefixes
from pagecast.sim.fleet.query import Query
from pagecast.sim.fleet.routers.load import RoundRobin
from pagecast.sim.fleet.routers.router import Choice, longest_prefix
from pagecast.sim.fleet.routers.session import HashRing
from pagecast.sim.fleet.view import View, Views

MODES = ("roundrobin", "priority", "session", "kvaware", "prefixaware")
_WINDOW_NS = 60 * 1_000_000_000


class ProductionStack:
    """Thresholds as in the router's arguments."""

    def __init__(
        self,
        prefixes: KnownPrefixes,
        rng: Random,
        *,
        mode: str = "prefixaware",
        kv_aware_threshold: int = 2000,
    ) -> None:
        if mode not in MODES:
            raise BadInput(f"production-stack: mode is {mode!r}; modes are {', '.join(MODES)}")
        self.mode = mode
        self.kv_aware_threshold = kv_aware_threshold
        self._prefixes = prefixes
        self._rng = rng
        self._round = RoundRobin()
        self._ring = HashRing()
        self._sent: dict[int, deque[int]] = {}

    def choose(self, query: Query, views: Views) -> Choice:
        """The engine that the mode says."""
        if self.mode == "roundrobin":
            return self._round.choose(query, views)
        if self.mode == "priority":
            return Choice(self._slowest_pace(query, views))
        if self.mode == "session":
            return Choice(self._by_session(query, views))
        size = self._prefixes.block_tokens
        longest, best = self.longest(query, views)
        if self.mode == "kvaware" and not (
            longest and longest * size >= max(query.prompt_tokens - self.kv_aware_threshold, 0)
        ):
            return Choice(self._by_session(query, views))
        chosen = best[0] if self.mode == "kvaware" else self._rng.choice(best)
        return Choice(chosen, longest * size)

    def longest(self, query: Query, views: Views) -> tuple[int, list[View]]:
        """The longest match in blocks, and the engines that have it: all of them where it is 0."""
        return longest_prefix(views, self._prefixes.overlaps(query))

    def _by_session(self, query: Query, views: Views) -> View:
        if query.session is None:
            return self._slowest_pace(query, views)
        return views[self._ring.owner(query.session, tuple([view.name for view in views]))]

    def _slowest_pace(self, query: Query, views: Views) -> View:
        """The first engine that has had no request, else the one with the fewest in the last minute."""
        since = query.now - _WINDOW_NS
        least = float("inf")
        chosen = views[0]
        for view in views:
            times = self._sent.get(view.number)
            if times is None:
                return view
            while times and times[0] < since:
                times.popleft()
            if len(times) < least:
                least = len(times)
                chosen = view
        return chosen

    def on_dispatch(self, query: Query, view: View) -> None:
        """The engine's pace counts it."""
        if self.mode == "prefixaware":
            self._prefixes.add(query, view.number)
        elif self.mode != "roundrobin":
            self._sent.setdefault(view.number, deque()).append(query.now)

    def on_end(self, row: int, view: View, now: int, output_tokens: int) -> None:
        """As `Router.on_end`."""

    def on_leave(self, view: View) -> None:
        """As `Router.on_leave`."""
        self._prefixes.forget(view.number)
        self._sent.pop(view.number, None)
