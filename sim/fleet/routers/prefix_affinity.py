"""Prefix affinity: the replica that has the longest part of the prompt, if that is enough of it."""

from __future__ import annotations

from random import Random

from pagecast.sim.fleet.index.known import KnownPrefixes
from pagecast.sim.fleet.query import Query
from pagecast.sim.fleet.routers.router import Choice, PrefixRouter, fewest_requests, longest_prefix
from pagecast.sim.fleet.view import Views


class PrefixAffinity(PrefixRouter):
    """The longest prefix wins whatever the load; of equals the least loaded.

    A prefix of less than `min_share` of the prompt counts for nothing: a system prompt that everybody shares
    must not draw everybody to one replica. Then the least loaded replica gets the request.
    """

    def __init__(self, prefixes: KnownPrefixes, rng: Random, min_share: float = 0.3) -> None:
        super().__init__(prefixes, rng)
        self._min_share = min_share

    def choose(self, query: Query, views: Views) -> Choice:
        """The replica with the longest prefix, as far as the index knows."""
        overlaps = self._prefixes.overlaps(query)
        if overlaps:
            enough = int(self._min_share * query.prompt_tokens) // self._prefixes.block_tokens
            longest, best = longest_prefix(views, overlaps)
            if longest > enough:
                chosen = best[0] if len(best) == 1 else fewest_requests(best, self._rng)
                return Choice(chosen, longest * self._prefixes.block_tokens)
        return Choice(fewest_requests(views, self._rng))
