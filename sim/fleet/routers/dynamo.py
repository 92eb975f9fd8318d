"""Dynamo's KV router (1.6): the least cost in blocks, or a draw by softmax.

    cost   = prefill_load_scale * max(raw - credit, 0) + decode + active_request_weight * active
    raw    = (prefill tokens under way + prompt tokens) / block size
    credit = overlap_score_credit * decay * overlap blocks
    decay  = 1 / (1 + overlap_score_credit_decay * (excess prefill blocks / the prompt's blocks))
    decode = blocks of the prompts in flight, this one included

A request's prefill is under way until its first token, and counts what its replica had to compute when it
was sent. `temperature` 0 takes the least cost, of equals one at random. The index hears KV events; an
approximate one forgets after 120 s. A block that prompts in flight share counts for each of them here; Dynamo
counts it once.
"""

from __future__ import annotations

import math
from random import Random

from pagecast.sim.fleet.index.known import KnownPrefixes
from pagecast.sim.fleet.query import Query
from pagecast.sim.fleet.routers.router import Choice
from pagecast.sim.fleet.view import View, Views


def softmax_draw(costs: list[float], temperature: float, sample: float) -> int:
    """The position drawn with `sample` (0 to 1). Costs are scaled to 0 to 1; cheap ones are likely."""
    low = min(costs)
    span = max(costs) - low
    if not span:
        weights = [1.0] * len(costs)
    else:
        weights = [math.exp(-(cost - low) / (span * temperature)) for cost in costs]
    total = sum(weights)
    reached = 0.0
    for position, weight in enumerate(weights):
        reached += weight / total
        if sample <= reached:
            return position
    return len(costs) - 1


class Dynamo:
    """Weights as in Dynamo's default configuration."""

    def __init__(
        self,
        prefixes: KnownPrefixes,
        rng: Random,
        *,
        prefill_load_scale: float = 1.0,
        overlap_score_credit: float = 1.0,
        overlap_score_credit_decay: float = 0.0,
        active_request_weight: float = 0.0,
        temperature: float = 0.0,
    ) -> None:
        self._prefixes = prefixes
        self._rng = rng
        self.prefill_load_scale = prefill_load_scale
        self.overlap_score_credit = overlap_score_credit
        self.overlap_score_credit_decay = overlap_score_credit_decay
        self.active_request_weight = active_request_weight
        self.temperature = temperature
        self._replica_tokens: dict[int, int] = {}  # tokens under way, by replica
        self._row_tokens: dict[int, int] = {}  # tokens of each row that are under way
        self._missing = 0

    def choose(self, query: Query, views: Views) -> Choice:
        """The replica with the least cost."""
        size = self._prefixes.block_tokens
        overlaps = self._prefixes.overlaps(query)
        prompt = query.prompt_tokens
        prefill = [self._prefill_tokens(view, query.now) for view in views]
        floor = min(prefill)
        cost = self.cost
        costs = [
            cost(
                prompt,
                size,
                tokens,
                tokens - floor,
                overlaps.get(view.number, 0),
                view.prompt_tokens + prompt,
                view.requests,
            )
            for view, tokens in zip(views, prefill, strict=True)
        ]
        if self.temperature:
            chosen = views[softmax_draw(costs, self.temperature, self._rng.random())]
        else:
            least = min(costs)
            best = [view for view, cost in zip(views, costs, strict=True) if cost == least]
            chosen = best[0] if len(best) == 1 else self._rng.choice(best)
        cached = overlaps.get(chosen.number, 0) * size
        self._missing = max(query.prompt_tokens - cached, 0)
        return Choice(chosen, cached)

    def cost(
        self,
        prompt_tokens: int,
        block_size: int,
        prefill_tokens: int,
        excess_tokens: int,
        overlap_blocks: int,
        decode_tokens: int,
        active: int,
    ) -> float:
        """The cost of one replica, in blocks. `decode_tokens`: of the prompts in flight, with this one."""
        decay = 1.0
        if self.overlap_score_credit_decay:
            excess = excess_tokens / block_size / max(-(-prompt_tokens // block_size), 1)
            decay = 1.0 / (1.0 + self.overlap_score_credit_decay * excess)
        raw = (prefill_tokens + prompt_tokens) / block_size
        credit = self.overlap_score_credit * decay * overlap_blocks
        prefill = raw - credit if raw > credit else 0.0
        cost = self.prefill_load_scale * prefill + decode_tokens / block_size
        return cost + self.active_request_weight * active

    def _prefill_tokens(self, view: View, now: int) -> int:
        for row in view.settle(now) if view.prefill_rows else ():
            self._replica_tokens[view.number] -= self._row_tokens.pop(row, 0)
        return self._replica_tokens.get(view.number, 0)

    def on_dispatch(self, query: Query, view: View) -> None:
        """Its prefill is under way."""
        self._prefixes.add(query, view.number)
        view.prefill_rows.append(query.row)
        self._row_tokens[query.row] = self._missing
        self._replica_tokens[view.number] = self._replica_tokens.get(view.number, 0) + self._missing

    def on_end(self, row: int, view: View, now: int, output_tokens: int) -> None:
        """As `Router.on_end`."""

    def on_leave(self, view: View) -> None:
        """As `Router.on_leave`."""
        self._prefixes.forget(view.number)
        for row in view.prefill_rows:
            self._row_tokens.pop(row, None)
        self._replica_tokens.pop(view.number, None)
