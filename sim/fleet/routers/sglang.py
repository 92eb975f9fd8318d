"""SGLang's gateway, policy `cache_aware` (sglang-router 0.3.2).

    if most - fewest > 64 and most > 1.5 * fewest (requests in flight):  the least loaded
    else: the worker with the longest match, if that is more than 0.3 of the prompt
          else the least loaded

The match is on characters of the text, in a tree per model that is cut to 2^26 characters per worker every
60 s. Here a token has four characters, and the tree is cut at once.
"""

from __future__ import annotations

from random import Random

from pagecast.sim.fleet.index.known import KnownPrefixes
from pagecast.sim.fleet.query import Query
from pagecast.sim.fleet.routers.router import Choice, PrefixRouter, longest_prefix
from pagecast.sim.fleet.view import View, Views


class SGLang(PrefixRouter):
    """Thresholds as in the router's arguments. Of equal loads the first worker wins.

    The router's own order of workers is that of its table, and arbitrary. A node of its tree keeps the worker
    that it was made for, and gives this one to all that match no further, as long as the worker has it.
    """

    def __init__(
        self,
        prefixes: KnownPrefixes,
        rng: Random,
        *,
        cache_threshold: float = 0.3,
        balance_abs_threshold: float = 64,
        balance_rel_threshold: float = 1.5,
    ) -> None:
        super().__init__(prefixes, rng)
        self.cache_threshold = cache_threshold
        self.balance_abs_threshold = balance_abs_threshold
        self.balance_rel_threshold = balance_rel_threshold

    def choose(self, query: Query, views: Views) -> Choice:
        """The worker by load where loads differ much, else by match."""
        size = self._prefixes.block_tokens
        overlaps = self._prefixes.overlaps(query)
        loads = [view.requests for view in views]
        fewest = min(loads)
        most = max(loads)
        chosen = views[loads.index(fewest)]
        uneven = most - fewest > self.balance_abs_threshold and most > self.balance_rel_threshold * fewest
        if overlaps and not uneven:
            longest, best = longest_prefix(views, overlaps)
            if longest * size / query.prompt_tokens > self.cache_threshold:
                chosen = best[0] if len(best) == 1 else self._first(query, longest, best)
        return Choice(chosen, overlaps.get(chosen.number, 0) * size)

    def _first(self, query: Query, blocks: int, views: list[View]) -> View:
        """Of workers with equally long matches, the one that got the last part of the match first."""
        number = self._prefixes.first_holder(query, blocks, [view.number for view in views])
        return next(view for view in views if view.number == number)
