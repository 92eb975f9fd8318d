"""Cost router: the replica where a request would end first, by step costs and the router's account."""

from __future__ import annotations

from random import Random

from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.fleet.index.known import KnownPrefixes
from pagecast.sim.fleet.query import Query
from pagecast.sim.fleet.routers.router import Choice
from pagecast.sim.fleet.view import View, Views

_FIRST_GUESS = 256.0  # output tokens of a request, before any has ended
_NEWEST = 0.02  # weight of the newest output length in the running mean
_ROUNDING = 1 + 1e-9  # a floor may exceed its cost by so much


class _Pace:
    """Cache of a cost model: a prompt's prefill, and a decode step as a line in its context."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._prefills: dict[tuple[int, int], int] = {}
        self._steps: dict[int, tuple[float, float]] = {}

    def prefill(self, tokens: int, cached: int) -> int:
        """Nanoseconds of a prompt's missing tokens after so many cached ones."""
        kept = self._prefills.get((tokens, cached))
        if kept is None:
            if len(self._prefills) > 100_000:
                self._prefills.clear()
            kept = self.costs.device_ns(Batch(0, 0, 0, ((tokens, cached),))) + self.costs.host_ns(1)
            self._prefills[tokens, cached] = kept
        return kept

    def step(self, count: int) -> tuple[float, float]:
        """A decode step of so many requests: its nanoseconds without context, and per token of it."""
        kept = self._steps.get(count)
        if kept is None:
            line = self.costs.decode_line(count)
            low = line.ns(count, 1)
            high = line.ns(count * 4097, 4097)
            kept = self._steps[count] = (low + self.costs.host_ns(count), (high - low) / (count * 4096))
        return kept


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
        self._paces: dict[int, _Pace] = {}  # by the cost model's id

    def choose(self, query: Query, views: Views) -> Choice:
        """The replica with the least expected cost.

        Few costs are computed: those whose floor is not above the cost of the replica with the least floor.
        """
        overlaps = self._prefixes.overlaps(query)
        size = self._prefixes.block_tokens
        prompt = query.prompt_tokens
        floors = self._floors(query, views, overlaps)
        first = views[floors.index(min(floors))]
        bound = self.cost(first, prompt, overlaps.get(first.number, 0) * size) * _ROUNDING
        best: list[View] = []
        least = float("inf")
        for view, floor in zip(views, floors, strict=True):
            if floor > bound:
                continue
            cost = self.cost(view, prompt, overlaps.get(view.number, 0) * size)
            if cost < least:
                least = cost
                best = [view]
            elif cost == least:
                best.append(view)
        chosen = best[0] if len(best) == 1 else self._rng.choice(best)
        cached = min(overlaps.get(chosen.number, 0) * size, prompt - 1)
        self._estimate[query.row] = (chosen, self._pace(chosen).prefill(prompt - cached, cached))
        return Choice(chosen, cached)

    def cost(self, view: View, prompt: int, cached: int) -> float:
        """Expected nanoseconds until a prompt of so many tokens, `cached` of them there, is answered."""
        pace = self._pace(view)
        cached = min(cached, prompt - 1)
        cost: float = pace.prefill(prompt - cached, cached)
        cost += self._waiting.get(view.number, 0)
        output = self._output_tokens
        requests = view.requests
        base, per_token = pace.step(min(requests + 1, view.max_num_seqs))
        context = view.prompt_tokens + prompt
        decode = output * (base + per_token * context)
        held = context + output * (requests / 2 + 1)
        short = held - view.num_blocks * view.block_size
        if short > 0 and requests:
            decode += short / held * (requests + 1) * decode / requests
        return cost + decode

    def _floors(self, query: Query, views: Views, overlaps: dict[int, int]) -> list[float]:
        """The cost at each replica but for what short blocks add, and for rounding.

        A step of the requests there is kept until one of them comes or goes.
        """
        prompt = query.prompt_tokens
        size = self._prefixes.block_tokens
        output = self._output_tokens
        waiting = self._waiting
        costs = None
        prefills: dict[int, int] = {}  # of these costs, by the blocks that are cached
        floors: list[float] = []
        for view in views:
            if view.prefill_rows:
                self._settle(view, query.now)
            if view.costs is not costs:
                costs = view.costs
                prefills = {}
            number = view.number
            blocks = overlaps.get(number, 0)
            prefill_ns = prefills.get(blocks)
            if prefill_ns is None:
                cached = min(blocks * size, prompt - 1)
                prefill_ns = prefills[blocks] = self._pace(view).prefill(prompt - cached, cached)
            line = view.step_line
            if line is None:
                base, per_token = self._pace(view).step(min(view.requests + 1, view.max_num_seqs))
                line = view.step_line = (base + per_token * view.prompt_tokens, per_token)
            floor = prefill_ns + output * (line[0] + line[1] * prompt)
            floors.append(floor + waiting[number] if number in waiting else floor)
        return floors

    def _pace(self, view: View) -> _Pace:
        costs = view.costs
        assert costs is not None
        pace = self._paces.get(id(costs))
        if pace is None:
            pace = self._paces[id(costs)] = _Pace(costs)
        return pace

    def _settle(self, view: View, now: int) -> None:
        """Takes what has its first token out of the queue delay."""
        for row in view.settle(now):
            entry = self._estimate.pop(row, None)
            if entry is not None:
                self._waiting[view.number] -= entry[1]

    def on_dispatch(self, query: Query, view: View) -> None:
        """The prefill waits there until the first token comes."""
        self._prefixes.add(query, view.number)
        view.prefill_rows.append(query.row)
        entry = self._estimate.get(query.row)
        if entry is not None:
            self._waiting[view.number] = self._waiting.get(view.number, 0) + entry[1]

    def on_end(self, row: int, view: View, now: int, output_tokens: int) -> None:
        """The output's length goes into the mean."""
        self._output_tokens += _NEWEST * (output_tokens - self._output_tokens)

    def on_leave(self, view: View) -> None:
        """As `Router.on_leave`."""
        self._prefixes.forget(view.number)
        for row in view.prefill_rows:
            self._estimate.pop(row, None)
        self._waiting.pop(view.number, None)
