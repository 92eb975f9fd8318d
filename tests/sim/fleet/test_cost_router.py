"""The cost router looks at few replicas, and decides as if it had looked at all of them."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.limits import Limits
from pagecast.sim.costs.batch import Batch
from pagecast.sim.fleet.gauges import NOTHING
from pagecast.sim.fleet.query import Prompts, Query
from pagecast.sim.fleet.routers.cost import ExpectedCost
from pagecast.sim.fleet.view import View
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

PROMPTS = Prompts(read("chat", limit=200))
COSTS = {gpu: Scenario(gpu=gpu, costs="roofline").step_costs() for gpu in ("H200", "L4")}


class Prefixes:
    """Overlaps as they were drawn."""

    block_tokens = 16

    def __init__(self):
        self.now = {}

    def overlaps(self, query):
        return self.now

    def add(self, query, replica):
        pass

    def forget(self, replica):
        pass


def cost(view, query, overlap, waiting, output):
    """Queue delay + missing prefill + expected decode, from the step costs alone."""
    costs = view.costs
    prompt = query.prompt_tokens
    cached = min(overlap * 16, prompt - 1)
    prefill = costs.device_ns(Batch(0, 0, 0, ((prompt - cached, cached),))) + costs.host_ns(1)
    n = min(view.requests + 1, view.max_num_seqs)
    line = costs.decode_line(n)
    low, high = line.ns(n, 1), line.ns(n * 4097, 4097)
    context = view.prompt_tokens + prompt
    decode = output * ((low + costs.host_ns(n)) + (high - low) / (n * 4096) * context)
    held = context + output * (view.requests / 2 + 1)
    short = held - view.num_blocks * view.block_size
    if short > 0 and view.requests:
        decode += short / held * (view.requests + 1) * decode / view.requests
    return prefill + waiting + decode, prefill


EVENT = st.tuples(
    st.integers(0, 199), st.integers(0, 3), st.lists(st.integers(0, 9), min_size=12, max_size=12)
)


@given(
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([40, 400, 40_000]),
    st.lists(EVENT, min_size=1, max_size=60, unique_by=lambda event: event[0]),
)
@settings(max_examples=60, deadline=None)
def test_the_choice_is_the_first_or_a_drawn_one_of_the_cheapest(replicas, different, blocks, events):
    prefixes = Prefixes()
    router = ExpectedCost(prefixes, Random(5))
    draws = Random(5)
    tokens: dict[int, int] = {}  # requests that have their first token
    views = [
        View(
            number,
            f"replica-{number}",
            limits=Limits(blocks, max_num_seqs=4),
            costs=COSTS["L4" if different and number % 3 == 1 else "H200"],
            gauges=lambda now: NOTHING,
            first_token_ns=lambda row: tokens.get(row, 1 << 62),
            changed_ns=lambda: len(tokens),
        )
        for number in range(replicas)
    ]
    waiting = [{} for _ in views]
    output = 256.0
    for now, (row, end, overlap) in enumerate(events):
        query = Query(PROMPTS, row, 1000 + now)
        prefixes.now = {n: min(overlap[n], query.prompt_tokens // 16) for n in range(replicas) if overlap[n]}
        for pending in waiting:
            while pending and next(iter(pending)) in tokens:
                del pending[next(iter(pending))]
        costs = [
            cost(view, query, prefixes.now.get(view.number, 0), sum(waiting[view.number].values()), output)
            for view in views
        ]
        least = min(total for total, _ in costs)
        best = [view for view, (total, _) in zip(views, costs, strict=True) if total == least]
        expected = best[0] if len(best) == 1 else draws.choice(best)
        view, _ = router.choose(query, views)
        assert view is expected
        view.add(row, query.prompt_tokens)
        router.on_dispatch(query, view)
        waiting[view.number][row] = costs[view.number][1]
        if end == 1:
            tokens[row] = 0
        elif end == 2 and view.prompts:
            gone = next(iter(view.prompts))
            tokens[gone] = 0
            view.remove(gone)
            router.on_end(gone, view, 1000 + now, 30 + now)
            output += 0.02 * (30 + now - output)
