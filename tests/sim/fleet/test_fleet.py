"""Promises of a fleet: one replica as before, an end for every request, views that disturb nothing."""

import json
from functools import partial

import numpy as np
import pandas as pd
import pytest
import simpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagecast.planner_app.wording.note_sentences import sentences
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.decode_line import DecodeLine
from pagecast.sim.fleet.gauges import Scrape
from pagecast.sim.fleet.routers.registry import KINDS
from pagecast.sim.fleet.settings import FleetSettings, ReplicaGroup, RouterSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay import Kept, replay
from pagecast.sim.replay.clients import Arrivals, ClosedLoop
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replay.recorder import Recorder
from pagecast.sim.replica.replica import Replica
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.replica.workload import TraceWorkload
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

    def outside(self, *largest):
        return None


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
    alone = replay(trace, scenario, costs=Even(), fast_forward=fast_forward)
    patient = not fast_forward or bool(trace.requests["cancel_after_s"].isna().all())
    fleet = replay_fleet(
        trace, scenario, fleet_of(1, policy), change=lambda _: Even(), fast_forward=fast_forward
    )
    assert_same(alone, fleet, rows_of_steps=patient)


@pytest.mark.parametrize("fast_forward", [False, True])
@pytest.mark.parametrize(("arrival_s", "handled_first"), [(0.2999, True), (0.3, False), (0.3001, False)])
def test_arrivals_and_cancellations_during_a_step_are_handled_in_the_order_of_time(
    arrival_s, handled_first, fast_forward
):
    """With a fleet and without; at the same time the client that gives up comes first."""
    rows = [
        {"arrival_s": 0.0, "input_tokens": 20, "output_tokens": 200, "cancel_after_s": 0.3},
        {"arrival_s": arrival_s, "input_tokens": 20, "output_tokens": 2, "cancel_after_s": np.nan},
    ]
    trace = made([{"text": i, "follows": False, "gap_s": 0.0} | row for i, row in enumerate(rows)])
    alone = replay(trace, Scenario(async_scheduling=False), costs=Even(), fast_forward=fast_forward)
    fleet = replay_fleet(
        trace,
        Scenario(async_scheduling=False),
        fleet_of(1),
        change=lambda _: Even(),
        fast_forward=fast_forward,
    )
    assert_same(alone, fleet)
    cancelled, other = alone.requests.itertuples()
    assert cancelled.state == "cancelled"
    # The new request is planned as soon as it has been handled.
    arrival_handled_s = Even().arrival_ns(20) * 1e-9
    gap_s = 0.0 if handled_first else arrival_handled_s
    assert other.admitted_s - cancelled.finished_s == pytest.approx(gap_s, abs=1e-9)


@pytest.mark.parametrize("fast_forward", [False, True])
def test_followers_due_at_the_same_time_come_in_the_order_in_which_that_became_known(fast_forward):
    """Row 2 ends with a step, and row 0 is cancelled during it: row 3 is sent before row 1."""
    rows = [
        {"arrival_s": 0.0, "output_tokens": 200},
        {"arrival_s": 0.0, "output_tokens": 2, "follows": True},
        {"arrival_s": 0.0, "output_tokens": 90},
        {"arrival_s": 0.0, "output_tokens": 2, "follows": True},
    ]
    usual = {"input_tokens": 20, "follows": False, "gap_s": 0.0, "cancel_after_s": np.nan}
    trace = made([{"text": i} | usual | row for i, row in enumerate(rows)])
    scenario = Scenario(async_scheduling=False, max_num_seqs=2, max_num_batched_tokens=20)
    end_s = replay(trace, scenario, costs=Even(), fast_forward=fast_forward).requests["finished_s"][2]
    trace.requests.loc[0, "cancel_after_s"] = end_s - 0.001
    alone = replay(trace, scenario, costs=Even(), fast_forward=fast_forward)
    assert alone.requests["arrival_s"][1] == alone.requests["arrival_s"][3]
    assert alone.requests["admitted_s"][3] < alone.requests["admitted_s"][1]
    assert_same(
        alone, replay_fleet(trace, scenario, fleet_of(1), change=lambda _: Even(), fast_forward=fast_forward)
    )


@pytest.mark.parametrize("depth", [False, True], ids=["sync", "async"])
def test_one_replica_serves_a_sample_as_today(depth):
    trace = read("chat", limit=500)
    scenario = Scenario(async_scheduling=depth, num_gpu_blocks=1000)
    assert_same(replay(trace, scenario), replay_fleet(trace, scenario, fleet_of(1)))
    users = partial(ClosedLoop, users=20)
    assert_same(
        replay(trace, scenario, arrivals=users), replay_fleet(trace, scenario, fleet_of(1), arrivals=users)
    )


def drafted(count=40):
    """Requests with recorded draft tokens, a few of them at each step."""
    rng = np.random.default_rng(1)
    texts = [" ".join(map(str, rng.integers(0, 4, 30))) for _ in range(2 * count)]
    table = pd.DataFrame(
        {"arrival_s": np.arange(count) * 0.05, "input_tokens": 300, "output_tokens": 30}
        | {"drafts": texts[:count], "accepted_drafts": texts[count:]}
    )
    return Trace("drafted", table)


@pytest.mark.parametrize("config", ["ngram:3:0", "eagle:3:0.7"])
def test_a_fleet_follows_recorded_draft_tokens_and_tells_of_them_as_a_replica_alone(config):
    scenario = Scenario(speculative_config=config, costs="roofline")
    alone = replay(drafted(), scenario)
    plain = Trace("plain", drafted().requests.drop(columns=["drafts", "accepted_drafts"]))
    assert alone.summary["speculation"] != replay(plain, scenario).summary["speculation"]
    assert_same(alone, replay_fleet(drafted(), scenario, fleet_of(1)))


def test_speculation_of_a_fleet_is_that_of_all_its_replicas_together():
    scenario = Scenario(speculative_config="ngram:3:0", costs="roofline")
    trace = drafted()
    fleet = replay_fleet(trace, scenario, fleet_of(2)).summary
    halves = [Trace("half", trace.requests.iloc[first::2].reset_index(drop=True)) for first in (0, 1)]
    parts = [replay(half, scenario).summary for half in halves]
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert fleet["speculation"][name] == sum(part["speculation"][name] for part in parts) > 0
    assert fleet["itl_s"]["max"] == pytest.approx(max(part["itl_s"]["max"] for part in parts))
    means = [part["itl_s"]["mean"] for part in parts]
    assert min(means) < fleet["itl_s"]["mean"] < max(means)
    groups = (ReplicaGroup(name="a"), ReplicaGroup(name="b", scenario={"speculative_config": "ngram:5:0"}))
    mixed = replay_fleet(trace, scenario, FleetSettings(groups=groups)).summary
    assert len(mixed["speculation"]["acceptance_rates_per_position"]) == 5


@pytest.mark.parametrize("patience_s", [[5.0, 3.0], [3.0, 5.0]])
def test_retention_is_counted_to_the_end_of_the_last_request(patience_s):
    """Clients that have their answers change nothing, whenever they would have given up."""
    table = {"arrival_s": 0.0, "input_tokens": 64, "output_tokens": [1, 2], "cancel_after_s": patience_s}
    scenario = Scenario(costs="roofline", num_gpu_blocks=100, eviction="priority", retention="0-:80:1")
    alone = replay(Trace("made", pd.DataFrame(table)), scenario)
    assert alone.summary["eviction"]["reverted_blocks"] == 0
    assert_same(alone, replay_fleet(Trace("made", pd.DataFrame(table)), scenario, fleet_of(1)))


def test_retention_ends_on_replicas_that_idle_until_the_last_request_has_ended():
    table = {"arrival_s": [0.0, 0.001, 9.0], "input_tokens": 64, "output_tokens": 1}
    scenario = Scenario(costs="roofline", num_gpu_blocks=100, eviction="priority", retention="0-:80:1")
    summary = replay_fleet(Trace("made", pd.DataFrame(table)), scenario, fleet_of(2)).summary
    by_replica = [row["eviction"]["reverted_blocks"] for row in summary["fleet"]["by_replica"]]
    assert by_replica == [4, 4]
    assert summary["eviction"]["reverted_blocks"] == 8


@given(REQUESTS, SCENARIOS, st.sampled_from(sorted(KINDS)), st.integers(2, 5))
@ANY
def test_every_request_ends_once_and_fast_forward_changes_nothing(rows, fields, policy, replicas):
    trace = made(rows)
    scenario = Scenario(**fields)
    fleet = fleet_of(replicas, policy, hop_s=0.001)
    fast = replay_fleet(trace, scenario, fleet, change=lambda _: Even())
    ended = fast.requests
    assert ended["row"].tolist() == sorted(set(ended["row"]))
    assert set(ended["state"]) <= {"completed", "cancelled", "rejected"}
    assert len(ended) == fast.summary["requests"] == len(trace)
    assert fast.summary["completed"] + fast.summary["rejected"] + fast.summary["cancelled"] == len(ended)
    assert fast.replicas["requests"].sum() == len(ended)
    slow = replay_fleet(trace, scenario, fleet, change=lambda _: Even(), fast_forward=False)
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
        spec = ReplicaSpec.of(scenario, TraceWorkload(trace), Even())
        feed = Feed(trace, scenario.block_size)
        replica = Replica(env, spec, Arrivals(trace), feed, fast_forward=fast_forward)
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


def test_production_stack_by_cache_knows_what_its_replicas_store():
    options = {"mode": "kvaware"}
    trace = read("chat", limit=300)
    fleet = replay_fleet(trace, Scenario(), fleet_of(4, "production-stack", options=options)).summary
    assert fleet["fleet"]["believed_tokens"] > 10_000
    assert fleet["fleet"]["stale_tokens"] == 0, "it hears of what is evicted"


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
    scenario = Scenario(costs="roofline", max_model_len=16_384)
    result = replay_fleet(read("chat", limit=300), scenario, fleet)
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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"groups": [{"name": "a", "replicas": 2}, {"name": "a"}]}, "group name 'a' is given twice"),
        ({"groups": [{"name": "group1"}, {}]}, "group name 'group1' is given twice"),
        ({"scaling": {"target": 1, "least": 8, "most": 2}}, "scaling: least is 8 and most is 2; lower least"),
        ({"router": "cost"}, "router is 'cost': write {policy: cost}"),
        ({"retries": 2}, "retries is 2: write {most: 2} or {after_s: 2}"),
        ({"scaling": 3}, "scaling is 3: write it as FIELD: VALUE; fields are metric, target,"),
        ({"foo": 3}, "field 'foo' is not known; is this a fleet? Its fields are groups, router,"),
    ],
)
def test_a_fleets_file_that_cannot_be_is_refused_in_words_of_the_file(tmp_path, fields, words):
    path = tmp_path / "fleet.yaml"
    path.write_text(json.dumps(fields))
    with pytest.raises(BadInput) as caught:
        FleetSettings.load(path)
    assert str(caught.value).startswith(f"{path}: {words}")


def test_a_fleet_leaves_its_folder(tmp_path):
    fleet = fleet_of(2, "least-loaded")
    replay_fleet(read("chat", limit=50), Scenario(), fleet, kept=Kept(folder=tmp_path / "run"))
    assert FleetSettings.load(tmp_path / "run" / "fleet.yaml") == fleet
    assert len(pd.read_parquet(tmp_path / "run" / "replicas.parquet")) == 2
    assert set(pd.read_parquet(tmp_path / "run" / "steps.parquet")["replica"]) == {"replica-0", "replica-1"}


@pytest.mark.parametrize(
    ("fields", "costs"),
    [
        ({"groups": [{"replicas": 1}, {"replicas": 1, "scenario": {"gpu": "H100"}}]}, "auto"),
        ({"rollout": {"at_s": 2.0, "scenario": {"gpu": "H100"}}, "startup": {"engine_s": 1}}, "auto"),
        (
            {"groups": [{"replicas": 1}, {"scenario": {"gpu": "H100", "costs": "roofline"}}]},
            "vllm-0.24-h200-qwen3-8b",
        ),
        ({"groups": [{"replicas": 2, "scenario": {"gpu": "H100"}}]}, "vllm-0.24-h100-qwen3-8b"),
    ],
    ids=["groups", "rollout", "group with its own costs", "another GPU alone"],
)
def test_a_fleet_of_several_gpus_can_be_repeated_from_its_folder(tmp_path, fields, costs):
    folder = tmp_path / "run"
    was = replay_fleet(
        read("chat", limit=80), Scenario(), FleetSettings.make(fields), kept=Kept(folder=folder)
    )
    scenario = Scenario.load(folder / "scenario.yaml")
    fleet = FleetSettings.load(folder / "fleet.yaml")
    again = replay_fleet(read(folder / "trace.parquet"), scenario, fleet)
    assert scenario.costs == costs
    assert again.summary["costs"] == was.summary["costs"]
    pd.testing.assert_frame_equal(again.requests, was.requests, check_exact=True)


def windowed(rows):
    count = len(rows)
    table = pd.DataFrame(rows, columns=["arrival_s", "input_tokens", "output_tokens"])
    texts = np.arange(count) % 2
    spans = Spans(np.arange(count + 1), texts, np.zeros(count, np.int64), table["input_tokens"].to_numpy())
    return Trace("windowed", table, spans)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "openai/gpt-oss-20b", "gpu": "H200"},
        {"model": "google/gemma-3-27b-it", "gpu": "H200"},
        {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "gpu": "H200", "tensor_parallel_size": 2}
        | {"enable_prefix_caching": False},
        {"model": "Qwen/Qwen3-8B"},
    ],
    ids=lambda fields: fields["model"],
)
@pytest.mark.parametrize("depth", [False, True], ids=["sync", "async"])
def test_gauges_within_a_stretch_count_the_blocks_that_leave_windows(fields, depth):
    """Gauges are those of a replica that goes step by step, and reading them changes nothing."""
    trace = windowed([(0.0, 1000, 300), (0.0, 1000, 400), (0.3, 300, 500), (0.9, 2100, 90)])
    scenario = Scenario(num_gpu_blocks=2500, costs="roofline", async_scheduling=depth, **fields)

    def seen(fast_forward, every):
        env = simpy.Environment()
        spec = ReplicaSpec.of(scenario, TraceWorkload(trace))
        feed, recorder = Feed(trace, spec.limits.block_size), Recorder()
        replica = Replica(env, spec, Arrivals(trace), feed, [recorder], fast_forward=fast_forward)
        used = []

        def look():
            while replica.process.is_alive:
                yield env.timeout(every)
                used.append(replica.used_blocks(int(env.now)))

        env.process(look())
        env.run()
        return used, recorder.requests()

    fast, requests = seen(True, 7_000_001)
    slow, _ = seen(False, 7_000_001)
    assert fast == slow[: len(fast)]
    assert len(set(fast)) > 5
    pd.testing.assert_frame_equal(requests, seen(True, 10**12)[1])


@pytest.mark.parametrize("index", ["events", "approximate"])
def test_a_router_goes_on_finding_prefixes_after_a_rollout(index):
    """Events name blocks of the new revision by its keys; an index of the router's own hears of none."""
    trace = read("chat", limit=400)
    fleet = fleet_of(2, "prefix-affinity", index=index)
    summaries = [
        replay_fleet(trace, Scenario(costs="roofline", rollout_at_s=at_s), fleet).summary
        for at_s in (None, 0.0, 15.0)
    ]
    plain, first, later = [
        (each["fleet"]["believed_tokens"], each["reused_prefix_tokens"]) for each in summaries
    ]
    assert first == plain
    assert 0 < later[1] < plain[1]
    stale = summaries[2]["fleet"]["stale_tokens"]
    assert stale == 0 if index == "events" else stale > 10_000


def test_a_handoff_after_a_rollout_is_as_before():
    chat = read("chat", limit=100)
    trace = Trace("later", chat.requests.assign(arrival_s=chat.requests["arrival_s"] + 1.0), chat.spans)
    groups = [{"replicas": 1, "role": "prefill"}, {"replicas": 1, "role": "decode"}]
    fleet = FleetSettings.make({"groups": groups, "disaggregation": {}})
    plain, revised = [
        replay_fleet(trace, Scenario(costs="roofline", rollout_at_s=at_s), fleet) for at_s in (None, 0.5)
    ]
    pd.testing.assert_frame_equal(plain.requests, revised.requests)
    assert plain.summary["fleet"]["handoff"] == revised.summary["fleet"]["handoff"]


def test_a_prompt_that_is_found_whole_is_not_stale():
    count = 20
    table = pd.DataFrame({"arrival_s": range(count), "input_tokens": 64, "output_tokens": 2})
    same = np.zeros(count, np.int64)
    trace = Trace("again", table, Spans(np.arange(count + 1), same, same, np.full(count, 64)))
    figures = replay_fleet(trace, Scenario(costs="roofline"), fleet_of(1, "prefix-affinity", index="events"))
    assert figures.summary["reused_prefix_tokens"] == 19 * 48
    assert figures.summary["fleet"]["believed_tokens"] == 19 * 64
    assert figures.summary["fleet"]["stale_tokens"] == 0


PARTS = {
    "partial_reuse": {"partial_reuse": "copy", "block_size": 128, "num_gpu_blocks": 375},
    "offloading": {"kv_offloading_size": 8.0, "num_gpu_blocks": 1500},
    "isolation": {"isolation": "tenant", "isolation_price": True},
    "rollout": {"rollout_at_s": 20.0, "num_gpu_blocks": 1500},
    "peak": {"rollout_at_s": 20.0, "num_gpu_blocks": 1500},
    "eviction": {"eviction": "cost", "num_gpu_blocks": 900},
    "swap": {"preemption": "swap", "num_gpu_blocks": 900},
}


@pytest.mark.parametrize("part", sorted(PARTS))
def test_a_fleet_has_the_figures_of_one_replica(part, tmp_path):
    trace = read("chat", limit=300)
    trace = Trace(trace.name, trace.requests.assign(tenant=np.arange(300).astype(str)), trace.spans)
    scenario = Scenario(costs="roofline", **PARTS[part])
    alone = replay(trace, scenario).summary
    one = replay_fleet(trace, scenario, fleet_of(1), kept=Kept(folder=tmp_path / "run")).summary
    assert one[part] == alone[part]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())[part] == one[part]
    assert one["fleet"]["by_replica"][0]["token_hit_rate"] == alone["token_hit_rate"]
    two = replay_fleet(trace, scenario, fleet_of(2)).summary
    assert two[part].keys() == one[part].keys()
    assert two[part] != one[part]


def test_a_fleet_admits_at_its_peak_what_its_replicas_do_together():
    trace = read("chat", limit=300)
    scenario = Scenario(costs="roofline", rollout_at_s=20.0)
    summary = replay_fleet(trace, scenario, fleet_of(3)).summary
    each = [row["peak"] for row in summary["fleet"]["by_replica"]]
    together = sum(peak["uncached_tokens_per_s_at_peak"] for peak in each)
    assert summary["peak"]["uncached_tokens_per_s_at_peak"] == pytest.approx(together)
    asked = [peak["uncached_tokens_per_s_asked"] for peak in each]
    assert max(asked) < summary["peak"]["uncached_tokens_per_s_asked"] <= sum(asked)


def test_a_replica_counts_at_the_peak_for_the_time_in_which_it_takes_requests():
    arrivals = np.linspace(0.0, 9.9, 100)
    table = pd.DataFrame({"arrival_s": arrivals, "input_tokens": 64, "output_tokens": 2})
    scenario = Scenario(costs="roofline", rollout_at_s=5.0)
    incidents = [{"at_s": 4.0, "replica": "replica-1", "kind": "drain"}]
    fleet = FleetSettings.make({"groups": [{"replicas": 2}], "incidents": incidents})
    summary = replay_fleet(Trace("short", table), scenario, fleet).summary
    stayed, left = (row["peak"]["uncached_tokens_per_s_at_peak"] for row in summary["fleet"]["by_replica"])
    assert summary["peak"]["uncached_tokens_per_s_at_peak"] == pytest.approx(stayed + 0.4 * left)


def test_a_disaggregated_fleet_admits_at_its_peak_what_its_prefill_replicas_do():
    groups = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
    scenario = Scenario(costs="roofline", rollout_at_s=20.0)
    fleet = FleetSettings.make({"groups": groups, "disaggregation": {}})
    summary = replay_fleet(read("chat", limit=100), scenario, fleet).summary
    prefill, decode = summary["fleet"]["by_replica"]
    assert summary["peak"]["uncached_tokens_per_s_at_peak"] == pytest.approx(
        prefill["peak"]["uncached_tokens_per_s_at_peak"]
    )
    assert "peak" not in decode


@pytest.mark.parametrize("fields", [{}, {"tenants": "*:weight=1"}], ids=["alone", "tenants"])
@pytest.mark.parametrize("order", ["priority", "cost"])
def test_a_fleet_adds_up_what_its_replicas_evicted(order, fields):
    trace = read("chat", limit=200)
    trace = Trace(trace.name, trace.requests.assign(tenant=np.arange(200) % 2), trace.spans)
    rules = {"priority": {"retention": "decode:10"}, "cost": {}}[order]
    scenario = Scenario(costs="roofline", num_gpu_blocks=400, eviction=order, **rules, **fields)
    summary = replay_fleet(trace, scenario, fleet_of(2)).summary
    total = summary["eviction"]
    each = [row["eviction"] for row in summary["fleet"]["by_replica"]]
    if fields:
        total, each = total["tenants"]["0"], [one["tenants"]["0"] for one in each]
    if order == "priority":
        evicted = [one["evicted_by_priority"]["10"] for one in each]
        assert total["evicted_by_priority"]["10"] == sum(evicted) > 0
        assert total["reverted_blocks"] == sum(one["reverted_blocks"] for one in each)
    else:
        first = [one["reuse_probability"][0] for one in each]
        assert min(first) <= total["reuse_probability"][0] <= max(first)
        assert total["learned_blocks"][0] == sum(one["learned_blocks"][0] for one in each)


def test_a_rollout_counts_the_old_blocks_of_all_replicas():
    trace = read("chat", limit=300)
    scenario = Scenario(costs="roofline", rollout_at_s=20.0)
    incidents = [{"at_s": 30.0, "replica": name, "back_after_s": 0.0} for name in ("replica-0", "replica-1")]
    fields = {"groups": [{"replicas": 2}], "startup": {"engine_s": 0.0}}
    kept = replay_fleet(trace, scenario, FleetSettings.make(fields)).summary["rollout"]
    lost = replay_fleet(trace, scenario, FleetSettings.make({**fields, "incidents": incidents})).summary
    alone = replay(trace, scenario).summary["rollout"]
    assert kept["old_blocks_at_rollout"] > 0.9 * alone["old_blocks_at_rollout"]
    assert kept["old_blocks_at_end"] >= kept["old_blocks_at_rollout"]
    assert kept["old_blocks_gone_after_s"] is None
    assert lost["rollout"]["old_blocks_at_rollout"] == kept["old_blocks_at_rollout"]
    assert lost["rollout"]["old_blocks_at_end"] < kept["old_blocks_at_end"]


@pytest.mark.parametrize("name", ["isolation", "retention", "rollout_at_s"])
def test_a_group_can_not_change_what_requests_are_made_by(name):
    value = {"isolation": "tenant", "retention": "decode:10", "rollout_at_s": 3.0}[name]
    groups = [{"replicas": 1, "scenario": {name: value}}]
    with pytest.raises(BadInput, match=f"group replica: {name} is for all replicas"):
        replay_fleet(read("chat", limit=5), Scenario(), FleetSettings.make({"groups": groups}))


def test_windows_of_which_the_mean_is_modelled_are_told_whichever_group_they_are_in():
    windowed = {"scenario": {"model": "google/gemma-3-27b-it", "tensor_parallel_size": 2}}
    scenario = Scenario(engine="nano-vllm", costs="roofline")
    for groups in ([{}, windowed], [windowed, {}], [{"replicas": 2}, windowed], [{}]):
        fleet = FleetSettings.make({"groups": groups})
        told = [note.code for note in replay_fleet(read("chat", limit=30), scenario, fleet).notes]
        assert told.count("sliding_windows") == groups.count(windowed)


def test_notes_are_on_every_kind_of_replica():
    tight = {"gpu_memory_utilization": 0.999, "swap_gb_per_s": 3.0}
    groups = (ReplicaGroup(name="a", replicas=2), ReplicaGroup(name="b", scenario=tight))
    result = replay_fleet(read("chat", limit=20), Scenario(costs="roofline"), FleetSettings(groups=groups))
    text = " ".join(sentences(result.notes))
    assert "Does not start: with gpu_memory_utilization 0.999" in text
    assert "swap_gb_per_s has no effect" in text


@pytest.mark.parametrize("fields", [{"block_size": 32}, {"engine": "sglang"}])
def test_a_mode_that_needs_events_says_what_to_do_without_them(fields):
    router = RouterSettings(policy="production-stack", options={"mode": "kvaware"})
    groups = (ReplicaGroup(name="a"), ReplicaGroup(name="b", scenario=fields))
    settings = FleetSettings(groups=groups, router=router)
    with pytest.raises(BadInput, match="choose another mode than kvaware"):
        replay_fleet(read("chat", limit=5), Scenario(costs="roofline"), settings)
