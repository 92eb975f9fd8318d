"""Cost router: the replica where a request would end first, by step costs and the router's account."""

from __future__ import annotations

from random import Random

from pagecast.sim.costs.step_costs import Batch, StepCosts
from pagecast.sim.fleet.index.known import KnownPrefixes
from pagecast.sim.fleet.query import Query
from pagecast.sim.fleet.routers.router import Choice
from pagecast.sim.fleet.view import View, Views

_FIRST_GUESS = 256.0  # output tokens of a request, before any has ended
_NEWEST = 0.02  # weight of the newest output length in the running mean


class ExpectedCost:
    """Queue delay + missing prefill + expected decode, in nanoseconds: the least wins, of equals any.

    Queue delay is the prefill sent to a replica whose first token has not come, and where its blocks are
    short, the time until enough requests have ended. Decode is the running mean of output lengths times a
    step of the replica's requests and this one.
    """

    def __init__(self, prefixes: KnownPrefixes, rng: Random) -> None:
        self._prefixes = prefixes
        self._rng = rng
        self._output_tokens = _FIRST_GUESS
        self._estimate: dict[int, tuple[View, int]] = {}  # prefill of each row without a first token
        self._waiting: dict[int, int] = {}  # their sum by replica
        self._prefills: dict[tuple[int, int, int], int] = {}
        self._steps: dict[tuple[int, int], tuple[int, float]] = {}

    def choose(self, query: Query, views: Views) -> Choice:
        """The replica with the least expected cost."""
        overlaps = self._prefixes.overlaps(query)
        size = self._prefixes.block_tokens
        prompt = query.prompt_tokens
        best: list[tuple[View, int]] = []
        least = float("inf")
        for view in views:
            cached = min(overlaps.get(view.number, 0) * size, prompt - 1) if overlaps else 0
            cost = self._cost(view, prompt, cached, query.now)
            if cost < least:
                least = cost
                best = [(view, cached)]
            elif cost == least:
                best.append((view, cached))
        chosen, cached = best[0] if len(best) == 1 else self._rng.choice(best)
        assert chosen.costs is not None
        self._estimate[query.row] = (chosen, self._prefill(chosen.costs, prompt - cached, cached))
        return Choice(chosen, cached)

    def _cost(self, view: View, prompt: int, cached: int, now: int) -> float:
        costs = view.costs
        assert costs is not None
        if view.prefilling:
            self._settle(view, now)
        count = view.requests + 1
        if count > view.max_num_seqs:
            count = view.max_num_seqs
        base, per_token = self._step(costs, count)
        step = base + per_token * (view.prompt_tokens + prompt)
        cost = self._output_tokens * step
        cost += self._waiting.get(view.number, 0) + self._prefill(costs, prompt - cached, cached)
        held = view.prompt_tokens + prompt + self._output_tokens * (view.requests / 2 + 1)
        short = held - view.num_blocks * view.block_size
        if short > 0 and view.requests:
            each = held / (view.requests + 1)
            cost += short / each * self._output_tokens * step / view.requests
        return cost

    def _settle(self, view: View, now: int) -> None:
        """Takes what has its first token out of the queue delay."""
        for row in view.settle(now):
            entry = self._estimate.pop(row, None)
            if entry is not None:
                self._waiting[view.number] -= entry[1]

    def _prefill(self, costs: StepCosts, tokens: int, cached: int) -> int:
        key = (id(costs), tokens, cached)
        found = self._prefills.get(key)
        if found is None:
            if len(self._prefills) > 100_000:
                self._prefills.clear()
            found = costs.device_ns(Batch(0, 0, 0, ((tokens, cached),))) + costs.host_ns(1)
            self._prefills[key] = found
        return found

    def _step(self, costs: StepCosts, count: int) -> tuple[int, float]:
        """A decode step of so many requests: its time without context, and per token of it."""
        key = (id(costs), count)
        found = self._steps.get(key)
        if found is None:
            line = costs.decode_line(count)
            low = line.ns(count, 1)
            high = line.ns(count * 4097, 4097)
            found = self._steps[key] = (low + costs.host_ns(count), (high - low) / (count * 4096))
        return found

    def sent(self, query: Query, view: View) -> None:
        """The prefill waits there until the first token comes."""
        self._prefixes.sent(query, view.number)
        view.prefilling.append(query.row)
        entry = self._estimate.get(query.row)
        if entry is not None:
            self._waiting[view.number] = self._waiting.get(view.number, 0) + entry[1]

    def ended(self, row: int, view: View, now: int, output_tokens: int) -> None:
        """The output's length goes into the mean."""
        self._output_tokens += _NEWEST * (output_tokens - self._output_tokens)

    def left(self, view: View) -> None:
        """As `Router.left`."""
        self._prefixes.forget(view.number)
        for row in view.prefilling:
            self._estimate.pop(row, None)
        self._waiting.pop(view.number, None)
