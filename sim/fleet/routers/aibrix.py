"""AIBrix's gateway, algorithm `prefix-cache`.

    if most > 2 * (mean + 1) and most - fewest >= 8 (requests running):  only the least loaded are looked at
    of the pods that have a part of the prompt, the longest part first, then the fewest requests:
        the first with requests <= mean + 1 standard deviation
    none: the pod with the fewest requests

Requests are counted by the gateway. Older versions have only the difference of 8 as a bound: `factor=0`.
"""

from __future__ import annotations

from math import sqrt
from random import Random

from pagecast.sim.fleet.index.known import KnownPrefixes
from pagecast.sim.fleet.query import Query
from pagecast.sim.fleet.routers.router import Choice, PrefixRouter, fewest_requests, longest_prefix
from pagecast.sim.fleet.view import Views


class AIBrix(PrefixRouter):
    """Thresholds as in the gateway's environment variables."""

    def __init__(
        self,
        prefixes: KnownPrefixes,
        rng: Random,
        *,
        factor: float = 2.0,
        min_gap: float = 8,
        deviations: float = 1.0,
    ) -> None:
        super().__init__(prefixes, rng)
        self.factor = factor
        self.min_gap = min_gap
        self.deviations = deviations

    def choose(self, query: Query, views: Views) -> Choice:
        """The pod with the longest part of the prompt that is not much busier than the others."""
        size = self._prefixes.block_tokens
        overlaps = self._prefixes.overlaps(query)
        loads = [view.requests for view in views]
        mean = sum(loads) / len(loads)
        fewest = min(loads)
        most = max(loads)
        matched = [view for view in views if view.number in overlaps]
        if most > self.factor * (mean + 1) and most - fewest >= self.min_gap:
            matched = [view for view in matched if view.requests == fewest]
        chosen = None
        if matched:
            bound = mean + self.deviations * sqrt(sum([(load - mean) ** 2 for load in loads]) / len(loads))
            within = [view for view in matched if view.requests <= bound]
            if within:
                chosen = fewest_requests(longest_prefix(within, overlaps)[1], self._rng)
        if chosen is None:
            chosen = fewest_requests(views, self._rng)
        return Choice(chosen, overlaps.get(chosen.number, 0) * size)
