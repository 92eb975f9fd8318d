"""Promises of a fleet: one replica as before, an end for every request, views that disturb nothing."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import simpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.costs.step_costs import DecodeLine
from pagecast.sim.fleet.gauges import Scrape
from pagecast.sim.fleet.routers.registry import KINDS
from pagecast.sim.fleet.settings import FleetSettings, ReplicaGroup, RouterSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay import replay
from pagecast.sim.replay.clients import Arrivals, ClosedLoop
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replay.recorder import Recorder
from pagecast.sim.replay.replica import Replica
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.schema import Spans, Trace


class Even:
    """Costs that are simple and not round."""

    name = "even"

    def device_ns(self, batch):
        return 3_000_017 + 1_000 * sum(tokens for tokens, _ in batch.prefill)

    def launch_ns(self, batch):
        return 0

    def decode_line(self, n):
        return DecodeLine(n, 3_000_017 * 10**6, 7_000 * 10**6, 0)

    def host_ns(self, requests):
        return 250_000

    def warm_ns(self, after):
        return 0

    def shared_ns(self, tokens, requests):
        return tokens

    def arrival_ns(self, tokens):
        return 120_000

    def expected_error(self):
        return "none: made up"


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "arrival_s": st.floats(0, 2, width=32),
            "input_tokens": st.integers(1, 260),
            "output_tokens": st.integers(1, 90),
            "text": st.integers(0, 3),
            "follows": st.booleans(),
            "gap_s": st.sampled_from([0.0, 0.0, 0.2]),
            "cancel_after_s": st.sampled_from([np.nan, np.nan, np.nan, 0.3]),
        }
    ),
    min_size=1,
    max_size=24,
)
SCENARIOS = st.fixed_dictionaries(
    {
        "num_gpu_blocks": st.integers(12, 60),
        "block_size": st.sampled_from([4, 16]),
        "max_num_seqs": st.sampled_from([2, 5, 32]),
        "max_num_batched_tokens": st.sampled_from([32, 64, 2048]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "async_scheduling": st.booleans(),
    }
)
ANY = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def made(rows):
    """A trace of generated rows: some follow the row before, and prompts begin with one of a few texts."""
    rows = sorted(rows, key=lambda row: row["arrival_s"])
    after = [i - 1 if i and row["follows"] else -1 for i, row in enumerate(rows)]
    table = pd.DataFrame(
        {
            "arrival_s": [np.nan if a >= 0 else row["arrival_s"] for a, row in zip(after, rows, strict=True)],
            "input_tokens": [row["input_tokens"] for row in rows],
            "output_tokens": [row["output_tokens"] for row in rows],
            "session": [f"s{row['text']}" for row in rows],
            "after": after,
            "gap_s": [row["gap_s"] for row in rows],
            "cancel_after_s": [row["cancel_after_s"] for row in rows],
        }
    )
    count = np.arange(len(rows) + 1)
    texts = np.array([row["text"] for row in rows], np.int64)
    return Trace("made", table, Spans(count, texts, np.zeros_like(texts), table["input_tokens"].to_numpy()))


def fleet_of(replicas, policy="round-robin", **router):
    groups = (ReplicaGroup(replicas=replicas),)
    return FleetSettings(groups=groups, router=RouterSettings(policy=policy, **router))


def without(result, *names):
    return {name: value for name, value in result.summary.items() if name not in names}


def assert_same(alone, fleet, *, rows_of_steps=True):
    pd.testing.assert_frame_equal(alone.requests, fleet.requests.drop(columns="replica"), check_exact=True)
    if rows_of_steps:
        pd.testing.assert_frame_equal(alone.steps, fleet.steps.drop(columns="replica"), check_exact=True)
    assert without(alone, "wall_s") == without(fleet, "wall_s", "fleet")


@given(REQUESTS, SCENARIOS, st.sampled_from(sorted(KINDS)), st.booleans())
@ANY
def test_one_replica_behind_a_router_is_the_replay_of_today(rows, fields, policy, fast_forward):
    """Every time, step and figure is the same, to the bit.

    But for stretches of steps: a lone replica ends one where the patience of a client runs out that has its
    answer by then.
    """
    trace = made(rows)
    scenario = Scenario(**fields)
    options = {"costs": Even(), "fast_forward": fast_forward}
    alone = replay(trace, scenario, **options)
    patient = not fast_forward or bool(trace.requests["cancel_after_s"].isna().all())
    fleet = replay_fleet(trace, scenario, fleet_of(1, policy), **options)
    assert_same(alone, fleet, rows_of_steps=patient)


@pytest.mark.parametrize("depth", [False, True], ids=["sync", "async"])
def test_one_replica_serves_a_sample_as_today(depth):
    trace = read("chat", limit=500)
    scenario = Scenario(async_scheduling=depth, num_gpu_blocks=1000)
    assert_same(replay(trace, scenario), replay_fleet(trace, scenario, fleet_of(1)))
    users = partial(ClosedLoop, users=20)
    assert_same(
        replay(trace, scenario, arrivals=users), replay_fleet(trace, scenario, fleet_of(1), arrivals=users)
    )


@given(REQUESTS, SCENARIOS, st.sampled_from(sorted(KINDS)), st.integers(2, 5))
@ANY
def test_every_request_ends_once_and_fast_forward_changes_nothing(rows, fields, policy, replicas):
    trace = made(rows)
    scenario = Scenario(**fields)
    fleet = fleet_of(replicas, policy, hop_s=0.001)
    fast = replay_fleet(trace, scenario, fleet, costs=Even())
    ended = fast.requests
    assert ended["row"].tolist() == sorted(set(ended["row"]))
    assert set(ended["state"]) <= {"completed", "cancelled", "rejected"}
    assert len(ended) == fast.summary["requests"] == len(trace)
    assert fast.summary["completed"] + fast.summary["rejected"] + fast.summary["cancelled"] == len(ended)
    assert fast.replicas["requests"].sum() == len(ended)
    slow = replay_fleet(trace, scenario, fleet, costs=Even(), fast_forward=False)
    pd.testing.assert_frame_equal(fast.requests, slow.requests, check_exact=True)
    assert without(fast, "wall_s") == without(slow, "wall_s")


@given(REQUESTS, SCENARIOS, st.sampled_from([1, 7, 40, 333]))
@ANY
def test_a_scrape_reads_what_a_look_at_its_time_would(rows, fields, period_ms):
    """Gauges read late are those of the latest scrape, as if every step had been looked at."""
    trace = made(rows)
    scenario = Scenario(**fields)
    period = period_ms * 1_000_000

    def seen(fast_forward, every):
        env = simpy.Environment()
        scheduler = Scheduler(scenario.limits())
        feed = Feed(trace, scenario.block_size)
        replica = Replica(
            env, scheduler, Even(), Arrivals(trace), feed, Recorder(), fast_forward=fast_forward
        )
        scrape = Scrape(replica, period)
        found = {}

        def reader():
            for look in range(1, 400):
                yield env.timeout(every)
                if look * every % (10 * period) == 0:
                    found[look * every] = scrape.read(int(env.now))
                elif not fast_forward:
                    scrape.read(int(env.now))

        env.process(reader())
        env.run()
        return found

    late = seen(True, 10 * period)
    often = seen(False, period)
    assert {time: late[time] for time in often} == often


def test_equal_seeds_give_equal_fleets_and_others_break_ties_differently():
    trace = read("chat", limit=300)
    runs = [
        replay_fleet(trace, Scenario(seed=seed), fleet_of(4, "least-loaded")).requests["replica"].tolist()
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_prefix_affinity_finds_more_than_round_robin():
    trace = read("chat", limit=800)
    scenario = Scenario(num_gpu_blocks=3000)
    hits = {
        policy: replay_fleet(trace, scenario, fleet_of(4, policy)).summary["reused_prefix_tokens"]
        for policy in ("round-robin", "prefix-affinity", "session")
    }
    assert hits["prefix-affinity"] > 1.1 * hits["round-robin"]
    assert hits["session"] > 1.1 * hits["round-robin"]


def test_what_is_gone_is_a_miss():
    """An index that never hears of evictions sends requests to replicas that must compute them again."""
    trace = read("chat", limit=800)
    scenario = Scenario(num_gpu_blocks=1000)
    guessed = replay_fleet(trace, scenario, fleet_of(3, "prefix-affinity")).summary
    told = replay_fleet(trace, scenario, fleet_of(3, "prefix-affinity", index="events")).summary
    assert guessed["completed"] == told["completed"] == 800
    assert guessed["fleet"]["stale_tokens"] > 5 * told["fleet"]["stale_tokens"]


def test_different_replicas_in_one_fleet():
    groups = (
        ReplicaGroup(replicas=2, name="big", scenario={"gpu": "H200"}),
        ReplicaGroup(replicas=1, name="small", scenario={"gpu": "L4", "block_size": 32}),
    )
    fleet = FleetSettings(groups=groups, router=RouterSettings(policy="least-loaded"))
    result = replay_fleet(read("chat", limit=300), Scenario(costs="roofline"), fleet)
    assert result.replicas["replica"].tolist() == ["big-0", "big-1", "small-0"]
    assert result.summary["completed"] == 300
    assert result.replicas["requests"][2] < result.replicas["requests"][:2].min()


@pytest.mark.parametrize(
    ("fleet", "words"),
    [
        (fleet_of(2, "nobody"), "routers are round-robin"),
        (fleet_of(2, "random", options={"a": 1}), "has no option 'a'"),
        (fleet_of(2, "session", index="events"), "uses no prefix index"),
        (fleet_of(0), "no replica"),
        (FleetSettings(groups=(ReplicaGroup(scenario={"gpus": 2}),)), "gpus"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(fleet, words):
    with pytest.raises(BadInput, match=words):
        replay_fleet(read("chat", limit=5), Scenario(), fleet)


def test_a_fleet_leaves_its_folder(tmp_path):
    fleet = fleet_of(2, "least-loaded")
    replay_fleet(read("chat", limit=50), Scenario(), fleet, out=tmp_path / "run")
    assert FleetSettings.load(tmp_path / "run" / "fleet.yaml") == fleet
    assert len(pd.read_parquet(tmp_path / "run" / "replicas.parquet")) == 2
    assert set(pd.read_parquet(tmp_path / "run" / "steps.parquet")["replica"]) == {"replica-0", "replica-1"}
