"""Routers decide as the originals do: recorded decisions of their code, and examples worked out by hand."""

import gzip
import json
from pathlib import Path
from random import Random

import numpy as np
import pandas as pd
import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.limits import Limits
from pagecast.sim.fleet.gauges import Gauges
from pagecast.sim.fleet.query import Prompts, Query
from pagecast.sim.fleet.routers.dynamo import Dynamo, softmax_draw
from pagecast.sim.fleet.routers.registry import make, with_router
from pagecast.sim.fleet.routers.session import HashRing
from pagecast.sim.fleet.settings import RouterSettings
from pagecast.sim.fleet.view import View
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Spans, Trace

RECORDED = Path(__file__).parent / "recorded" / "production_stack.json.gz"
SGLANG = Path(__file__).parent / "recorded" / "sglang.json.gz"
# Of equally loaded workers the gateway takes the first in the order of its own table, which was this one.
SGLANG_ORDER = (2, 3, 1, 0)
NS = 1_000_000_000


def prompts_of(rows, unit):
    """Prompts of `unit` tokens per content; equal contents in equal places are equal texts."""
    lengths = [len(row) * unit for row in rows]
    table = pd.DataFrame({"arrival_s": 0.0, "input_tokens": lengths, "output_tokens": 1})
    flat = [content for row in rows for content in row]
    start = np.cumsum([0, *(len(row) for row in rows)])
    size = len(flat)
    spans = Spans(start, np.array(flat, np.int64), np.zeros(size, np.int64), np.full(size, unit, np.int64))
    return Prompts(Trace("made", table, spans))


def views_of(count, gauges=None, **fields):
    found = gauges or [Gauges(0, 0, 0.0)] * count
    return [View(i, f"e{i}", gauges=lambda now, i=i: found[i], **fields) for i in range(count)]


def router_of(policy, **options):
    return make(RouterSettings(policy=policy, options=options), 0, 16)[0]


def send(router, query, view):
    router.choose(query, [view])
    view.add(query.row, query.prompt_tokens)
    router.on_dispatch(query, view)


def compare_with_production_stack(cases):
    """Errors: AssertionError where a decision is another one than that of the stack's own code."""
    for case in cases:
        requests = case["requests"]
        prompts = prompts_of([request["chunks"] for request in requests], 32)
        views = views_of(case["engines"])
        prefix = router_of("production-stack")
        pace = router_of("production-stack", mode="priority")
        for row, request in enumerate(requests):
            query = Query(prompts, row, round(request["time_s"] * NS))
            up = [views[engine] for engine in request["up"]]
            _, best = prefix.longest(query, up)
            assert [view.number for view in best] == request["matched"]
            prefix.on_dispatch(query, views[request["chosen"]])
            slowest = pace.choose(query, up).view
            assert slowest.number == request["slowest"]
            pace.on_dispatch(query, slowest)


def compare_with_sglang(recorded, order):
    """How many requests had several workers with equally long matches.

    Errors: AssertionError where a decision is another one than the gateway's.

    `order`: that of the gateway's table of workers, of which the first of equally loaded ones is taken.
    """
    tied = 0
    for requests in recorded["scenarios"]:
        prompts = prompts_of([request["chunks"] for request in requests], 32)
        views = views_of(recorded["workers"])
        ordered = [views[number] for number in order]
        router = router_of("sglang", **recorded["options"])
        place = {}
        for row, request in enumerate(requests):
            for ended in request["ends"]:
                place[ended].remove(ended)
            query = Query(prompts, row, row)
            overlaps = list(router._prefixes.overlaps(query).values())
            longest = max(overlaps, default=0)
            tied += overlaps.count(longest) > 1
            chosen = place[row] = router.choose(query, ordered).view
            assert chosen.number == request["chosen"]
            chosen.add(row, query.prompt_tokens)
            router.on_dispatch(query, chosen)
    return tied


def test_production_stack_decides_as_its_own_code_in_200_scenarios():
    cases = json.loads(gzip.decompress(RECORDED.read_bytes()))
    assert len(cases) == 200
    compare_with_production_stack(cases)


def test_sglang_decides_as_its_own_gateway_in_200_scenarios():
    recorded = json.loads(gzip.decompress(SGLANG.read_bytes()))
    assert len(recorded["scenarios"]) == 200
    assert sum(map(len, recorded["scenarios"])) == 2210
    assert compare_with_sglang(recorded, SGLANG_ORDER) > 70


def test_dynamo_takes_the_worker_of_its_documented_example():
    """Prefill and decode blocks of 8 + 10, 5 + 5 and 2 + 9: the second worker, with a cost of 10."""
    router = router_of("dynamo")
    costs = [
        router.cost(160, 16, 0, 0, overlap_blocks=o, decode_tokens=16 * d, active=0)
        for o, d in ((2, 10), (5, 5), (8, 9))
    ]
    assert costs == [18.0, 10.0, 11.0]


def test_dynamo_counts_prefill_until_the_first_token():
    first = {}
    prompts = prompts_of([[1] * 4, [2] * 4, [3] * 4], 16)
    views = views_of(2, first_token_ns=lambda row: first.get(row, 1 << 62))
    router = router_of("dynamo")
    send(router, Query(prompts, 0, 0), views[0])
    assert router.choose(Query(prompts, 1, 1), views).view is views[1]
    views[1].prompt_tokens = 100  # decode blocks: 64 + 64 against 100 + 64 tokens, prefill 64 against 0
    assert router.choose(Query(prompts, 1, 1), views).view is views[1]
    first[0] = 5
    assert router.choose(Query(prompts, 1, 4), views).view is views[1]
    assert router.choose(Query(prompts, 1, 5), views).view is views[0]


def test_dynamo_decays_the_credit_of_the_busy_and_draws_by_softmax():
    router = Dynamo(None, Random(0), overlap_score_credit_decay=1.0)
    busy = {"prefill_tokens": 160, "overlap_blocks": 10, "decode_tokens": 0, "active": 0}
    assert router.cost(160, 16, excess_tokens=160, **busy) == 20 - 10 / 2
    assert router.cost(160, 16, excess_tokens=0, **busy) == 10
    assert softmax_draw([1.0, 1.0], 0.5, 0.6) == 1
    chances = np.exp([0.0, -1.0]) / np.exp([0.0, -1.0]).sum()
    assert softmax_draw([3.0, 7.0], 1.0, chances[0] - 1e-9) == 0
    assert softmax_draw([3.0, 7.0], 1.0, chances[0] + 1e-9) == 1


def test_llm_d_sums_weighted_scores():
    """Scores 2 * queue + 2 * (1 - KV use) + 3 * prefix: 0 + 1.8 + 3 against 2 + 1 + 0."""
    prompts = prompts_of([[1] * 4, [1] * 4], 64)
    gauges = [Gauges(1, 3, 0.1), Gauges(1, 0, 0.5)]
    views = views_of(2, gauges)
    router = router_of("llm-d")
    assert router.choose(Query(prompts, 0, 0), views).view is views[1]
    send(router, Query(prompts, 0, 0), views[0])
    choice = router.choose(Query(prompts, 1, 1), views)
    assert (choice.view, choice.cached_tokens) == (views[0], 256)
    gauges[0] = Gauges(1, 3, 1.0)  # 0 + 0 + 3 against 2 + 1 + 0: a tie, and then not
    gauges[1] = Gauges(1, 0, 0.49)
    assert router.choose(Query(prompts, 1, 1), views).view is views[1]


def test_sglang_balances_where_loads_differ_and_else_follows_the_text():
    prompts = prompts_of([[1] * 10, [1] * 3 + [2] * 7, [1] * 4 + [3] * 6], 10)
    views = views_of(2)
    router = router_of("sglang")
    send(router, Query(prompts, 0, 0), views[1])
    assert router.choose(Query(prompts, 1, 1), views).view is views[0]  # 0.3 is not more than 0.3
    assert router.choose(Query(prompts, 2, 1), views).view is views[1]
    views[1].requests = 64
    assert router.choose(Query(prompts, 2, 1), views).view is views[1]
    views[1].requests = 65
    assert router.choose(Query(prompts, 2, 1), views).view is views[0]
    views[0].requests, views[1].requests = 200, 265  # far apart, and yet less than 1.5 times
    assert router.choose(Query(prompts, 2, 1), views).view is views[1]


def test_aibrix_leaves_a_match_that_is_too_busy():
    prompts = prompts_of([[1] * 4, [1] * 4], 32)
    views = views_of(4)
    router = router_of("aibrix")
    send(router, Query(prompts, 0, 0), views[2])
    query = Query(prompts, 1, 1)
    assert router.choose(query, views).view is not views[2]  # 1 request > mean 0.25 + deviation 0.43
    views[0].requests = 1
    assert router.choose(query, views).view is views[2]  # 1 <= 0.5 + 0.5
    for view, requests in zip(views, (3, 3, 4, 3), strict=True):
        view.requests = requests
    assert router.choose(query, views).view is not views[2]  # 4 > 3.25 + 0.43
    router.deviations = 2.0
    assert router.choose(query, views).view is views[2]
    for view, requests in zip(views, (0, 9, 20, 0), strict=True):
        view.requests = requests
    router.deviations = 10.0
    assert router.choose(query, views).view in (views[0], views[3])  # 20 > 2 * (7.25 + 1), and 20 apart


def test_production_stack_by_cache_and_by_session():
    rows = [[1] * 100, [1] * 40 + [2] * 60, [1] * 100]
    prompts = prompts_of(rows, 32)
    prompts._sessions = ["a", None, None]
    views = views_of(3)
    router, parts = make(RouterSettings(policy="production-stack", options={"mode": "kvaware"}), 0, 16)
    at = router.choose(Query(prompts, 0, 0), views).view
    router.on_dispatch(Query(prompts, 0, 0), views[0])
    assert router.choose(Query(prompts, 0, 1), views) == (at, 0)  # what was sent is not what is stored
    for key, begin, end in Query(prompts, 0, 0).engine_path(16):
        parts.events.receive(1, True, key, begin, end, 0)
    assert router.choose(Query(prompts, 2, 1), views).view is views[1]
    assert router.choose(Query(prompts, 1, 1), views).view is views[1]  # 1,280 of 3,200 tokens: lacks 1,920
    router.kv_aware_threshold = 1900
    assert router.choose(Query(prompts, 1, 1), views).view is views[1]  # now by pace: the first without any


def test_cost_weighs_the_queue_against_the_prefix():
    """A replica that has the prompt is left alone once its queue costs more than computing the prompt."""
    prompts = prompts_of([[1] * 8] + [[number] * 8 for number in range(2, 12)] + [[1] * 8], 512)
    costs = Scenario(costs="roofline").step_costs()
    views = views_of(2, costs=costs, limits=Limits(30_000))
    router = router_of("cost")
    send(router, Query(prompts, 0, 0), views[0])
    views[0].prefill_rows.clear()
    router._waiting.clear()
    assert router.choose(Query(prompts, 11, 1), views).view is views[0]
    for row in range(1, 6):
        send(router, Query(prompts, row, 2), views[0])
    assert router.choose(Query(prompts, 11, 3), views).view is views[1]


def test_a_hash_ring_moves_only_the_keys_of_the_one_that_left():
    ring = HashRing()
    names = tuple("abcde")
    keys = [f"session {number}" for number in range(1000)]
    before = [names[ring.owner(key, names)] for key in keys]
    after = [tuple("abde")[ring.owner(key, tuple("abde"))] for key in keys]
    assert all(new == old for new, old in zip(after, before, strict=True) if old != "c")
    counts = np.unique(before, return_counts=True)[1]
    assert counts.min() > 120 and counts.max() < 300


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("production-stack", {"mode": "best"}, "modes are roundrobin"),
        ("production-stack", {"mode": 3}, "give a text"),
        ("llm-d", {"queue": "much"}, "give a number"),
    ],
)
def test_options_that_cannot_be_are_refused(policy, options, words):
    with pytest.raises(BadInput, match=words):
        router_of(policy, **options)


def test_round_robin_goes_on_after_a_replica_that_left():
    views = views_of(4)
    router = router_of("round-robin")
    query = Query(prompts_of([[1]], 16), 0, 0)
    order = [router.choose(query, views).view.number for _ in range(3)]
    left = [views[0], views[1], views[3]]
    order += [router.choose(query, left).view.number for _ in range(2)]
    assert order == [0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("policy", "fields", "words"),
    [
        ("round-robin", {"index": "events"}, "uses no prefix index; leave --index out"),
        ("least-loaded", {"index_delay_s": 1.0}, "uses no prefix index; leave --index-delay out"),
        ("session", {"index_ttl_s": 1.0}, "uses no prefix index; leave index_ttl_s out"),
        ("random", {"index_blocks": 9}, "uses no prefix index; leave index_blocks out"),
        ("power-of-two", {"block_tokens": 9}, "uses no prefix index; leave block_tokens out"),
        (
            "production-stack",
            {"index_delay_s": 1.0, "options": {"mode": "session"}},
            "router production-stack in mode session uses no prefix index; leave --index-delay out",
        ),
        ("dynamo", {"index_blocks": 9}, "follows KV events, which need no approximate index"),
        (
            "production-stack",
            {"block_tokens": 9, "options": {"mode": "kvaware"}},
            "in mode kvaware follows KV events, which need no approximate index; leave block_tokens out",
        ),
        (
            "production-stack",
            {"index": "approximate", "options": {"mode": "kvaware"}},
            "in mode kvaware uses an index of events; leave --index approximate out",
        ),
    ],
)
def test_a_router_refuses_settings_of_an_index_that_it_does_not_use(policy, fields, words):
    with pytest.raises(BadInput, match=words):
        make(RouterSettings(policy=policy, **fields), 0, 16)


def test_another_router_keeps_what_it_uses_of_the_settings():
    cost = RouterSettings(policy="cost", index="events", index_delay_s=0.5, hop_s=0.1)
    assert with_router(cost, "dynamo") == RouterSettings(policy="dynamo", index_delay_s=0.5, hop_s=0.1)
    assert with_router(cost, "random") == RouterSettings(policy="random", hop_s=0.1)
    llm_d = RouterSettings(policy="llm-d", metrics_period_s=1.0, index_blocks=9)
    assert with_router(llm_d, "cost") == RouterSettings(policy="cost", index_blocks=9)
    make(with_router(llm_d, "round-robin"), 0, 16)


def test_a_router_that_reads_no_gauges_refuses_a_period_for_them():
    with pytest.raises(BadInput, match="reads no gauges"):
        make(RouterSettings(policy="least-loaded", metrics_period_s=1.0), 0, 16)
