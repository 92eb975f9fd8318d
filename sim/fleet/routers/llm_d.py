"""llm-d's endpoint picker (llm-d-router 0.10): a weighted sum of scores; the highest wins, ties are shuffled.

    score = queue * (most - waiting) / (most - fewest)      1 where all are equal
          + kv * (1 - KV use)
          + prefix * matched blocks / blocks of the prompt

Waiting requests and KV use are scraped every 50 ms. The prefix index is the picker's own: blocks of 64
tokens, at most 131,072 tokens of a prompt, 31,250 blocks per server in an LRU list filled from the prompt's
start.
"""

from __future__ import annotations

from random import Random

from pagecast.sim.fleet.index.known import KnownPrefixes
from pagecast.sim.fleet.query import Query
from pagecast.sim.fleet.routers.router import Choice, PrefixRouter
from pagecast.sim.fleet.view import View, Views


class LlmD(PrefixRouter):
    """Weights as in llm-d's default profile."""

    def __init__(
        self, prefixes: KnownPrefixes, rng: Random, *, queue: float = 2, kv: float = 2, prefix: float = 3
    ) -> None:
        super().__init__(prefixes, rng)
        self.queue = queue
        self.kv = kv
        self.prefix = prefix

    def choose(self, query: Query, views: Views) -> Choice:
        """The replica with the highest score."""
        size = self._prefixes.block_tokens
        overlaps = self._prefixes.overlaps(query)
        blocks = max(query.prompt_tokens // size, 1)
        now = query.now
        gauges = [view.gauges(now) for view in views]
        waiting = [each.waiting for each in gauges]
        most = max(waiting)
        span = most - min(waiting)
        best: list[View] = []
        highest = -1.0
        for view, each in zip(views, gauges, strict=True):
            score = self.queue * ((most - each.waiting) / span if span else 1.0)
            score += self.kv * (1.0 - each.kv_usage)
            if overlaps:
                score += self.prefix * overlaps.get(view.number, 0) / blocks
            if score > highest:
                highest = score
                best = [view]
            elif score == highest:
                best.append(view)
        chosen = best[0] if len(best) == 1 else self._rng.choice(best)
        return Choice(chosen, overlaps.get(chosen.number, 0) * size)
