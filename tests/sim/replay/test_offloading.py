"""KV offloading in a replay: what is found in host memory, what transfers cost, and what fails."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.machine.host_link import LinkSpec
from pagecast.sim.replay import Kept, replay
from pagecast.sim.replica.links import Link, Makespan
from pagecast.sim.replica.replica import UNREADABLE
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.schema import Spans, Trace

TIGHT = {"num_gpu_blocks": 500, "block_size": 16, "max_num_seqs": 16}


def conversations(turns: int = 6, users: int = 12, tokens: int = 600, gap_s: float = 30.0) -> Trace:
    """Users who come back with all that was said before: more than the device has room for."""
    rows, spans, start = [], [], [0]
    for turn in range(turns):
        for user in range(users):
            length = tokens * (turn + 1)
            rows.append((turn * gap_s + user * 1.5, length, 20))
            spans.append((user, 0, length))
            start.append(len(spans))
    table = pd.DataFrame(rows, columns=["arrival_s", "input_tokens", "output_tokens"])
    columns = pd.DataFrame(spans).to_numpy().T
    return Trace("conversations", table, Spans(pd.Series(start).to_numpy(), *columns))


def figures(trace: Trace, **fields: object) -> dict[str, object]:
    return replay(trace, Scenario(**{**TIGHT, **fields}), kept=Kept(steps=False)).summary


def test_a_link_is_busy_for_a_share_of_the_makespan_whatever_it_carries_later():
    trace = Trace("one", pd.DataFrame({"arrival_s": [3.0], "input_tokens": [2000], "output_tokens": [20]}))
    slow = {"host_store_gb_per_s": 0.5, "secondary_tiers": "fs", "disk_store_gb_per_s": 0.1}
    scenario = Scenario(costs="roofline", num_gpu_blocks=200, kv_offloading_size=10.0, **slow)
    for result in (replay(trace, scenario), replay_fleet(trace, scenario, FleetSettings())):
        s = result.summary
        tiers = s["offloading"]
        assert tiers["store_bytes"] / 0.5e9 > 2 * s["makespan_s"]  # most is carried after the last token
        first_token_s = s["ttft_s"]["max"]
        share = 1 - first_token_s / s["makespan_s"]  # from the end of the prompt's step on
        assert tiers["store_busy"] == pytest.approx(share, abs=0.05) and share > 0.5
        assert tiers["disk_store_busy"] == 0


def test_a_link_counts_pauses_between_transfers_as_idle():
    link = Link(LinkSpec(1e9), "store")
    for number, now in enumerate((100, 150, 400)):
        link.submit(now, 100, number)
    assert link.busy_share(Makespan(0, 1000)) == 0.3
    assert link.busy_share(Makespan(0, 450)) == pytest.approx(250 / 450)
    assert link.busy_share(Makespan(100, 300)) == 1.0
    assert link.busy_share(Makespan(0, 0)) == 0


def test_what_the_device_has_no_room_for_is_found_in_host_memory():
    trace = conversations()
    without, offloaded = figures(trace), figures(trace, kv_offloading_size=40.0)
    assert "offloading" not in without
    tiers = offloaded["offloading"]
    assert tiers["host_hit_tokens"] > 5 * tiers["device_hit_tokens"]
    assert tiers["host_hit_tokens"] + tiers["device_hit_tokens"] == offloaded["reused_prefix_tokens"]
    assert offloaded["reused_prefix_tokens"] > 3 * without["reused_prefix_tokens"]
    assert offloaded["ttft_s"]["mean"] < 0.8 * without["ttft_s"]["mean"]


def test_a_slow_link_makes_offloading_hurt():
    trace = conversations()
    slow = figures(trace, kv_offloading_size=40.0, host_load_gb_per_s=0.2)
    assert slow["ttft_s"]["mean"] > 1.5 * figures(trace)["ttft_s"]["mean"]
    assert slow["offloading"]["load_busy"] > 0.1


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_fast_forward_changes_nothing(async_scheduling, policy):
    trace = conversations(turns=4)
    scenario = Scenario(
        **TIGHT,
        kv_offloading_size=2.0,
        kv_offloading_eviction_policy=policy,
        async_scheduling=async_scheduling,
        host_load_gb_per_s=3.0,
        host_store_gb_per_s=1.0,
    )
    fast, slow = (replay(trace, scenario, fast_forward=fast, check_every=5) for fast in (True, False))
    pd.testing.assert_frame_equal(fast.requests, slow.requests)
    assert fast.summary["offloading"] == slow.summary["offloading"]


def test_failing_loads_are_computed_and_every_request_is_served():
    trace = conversations(turns=4)
    fields = {"kv_offloading_size": 40.0, "kv_load_failure_policy": "recompute"}
    failing = figures(trace, **fields, failing_transfers=0.3)
    assert failing["completed"] == len(trace)
    assert failing["offloading"]["lost_loads"] > 0
    sound = figures(trace, **fields)
    assert failing["offloading"]["host_hit_tokens"] < sound["offloading"]["host_hit_tokens"]
    assert sound["offloading"]["lost_loads"] == 0


def test_a_failing_load_ends_its_request_where_asked_for():
    trace = conversations(turns=4)
    result = replay(trace, Scenario(**TIGHT, kv_offloading_size=40.0, failing_transfers=0.3))
    lost = result.summary["offloading"]["lost_loads"]
    ended = result.requests[result.requests["state"] == "cancelled"]
    assert len(ended) == lost > 0
    assert set(ended["reason"]) == {"a load from host memory failed"}
    assert result.summary["completed"] == len(trace) - lost


def test_faults_are_those_of_a_link():
    trace = conversations(turns=4)
    fields = {"kv_offloading_size": 1.0, "secondary_tiers": "fs"}
    sound, slow, failing = (
        figures(trace, **fields, link_faults=faults)["offloading"]
        for faults in (None, "disk-load:slow=1,factor=4", "disk-store:failing=1")
    )
    assert slow["disk_load_busy"] == pytest.approx(4 * sound["disk_load_busy"], rel=0.05)
    assert slow["disk_store_busy"] == pytest.approx(sound["disk_store_busy"], rel=0.05)
    assert failing["disk_hit_tokens"] == failing["lost_loads"] == 0
    assert failing["disk_blocks"] == 0


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ("link:failing=0.1", "is no link; name one of host-load"),
        ("host-load:fails=0.1", "has 'fails'"),
        ("host-load:failing=2", "must be a share from 0 to 1"),
        ("disk-load:factor=0.5", "must be at least 1"),
        ("disk-load:slow=x", "must be a number"),
    ],
)
def test_faults_that_cannot_be_are_refused(faults, message):
    with pytest.raises(BadInput, match=message):
        Scenario.make({"kv_offloading_size": 4.0, "link_faults": faults})


def test_slow_transfers_take_longer():
    trace = conversations(turns=4)
    sound, slow = (figures(trace, kv_offloading_size=40.0, slow_transfers=share) for share in (0.0, 1.0))
    assert slow["offloading"]["load_busy"] > 4 * sound["offloading"]["load_busy"]


def test_a_disk_finds_what_the_host_had_to_give_up():
    trace = conversations()
    small, with_disk = (
        figures(trace, kv_offloading_size=1.0, secondary_tiers=tiers, disk_load_gb_per_s=20.0)
        for tiers in (None, "fs")
    )
    tiers = with_disk["offloading"]
    assert small["offloading"]["host_hit_tokens"] == 0
    assert tiers["disk_hit_tokens"] == tiers["host_hit_tokens"] > 50_000
    assert tiers["promoted_blocks"] == tiers["loaded_blocks"]
    assert tiers["disk_blocks"] == tiers["cascaded_blocks"] == 2700  # each block is written once
    assert with_disk["prompt_tokens_by_source"]["disk"] == tiers["disk_hit_tokens"]
    assert with_disk["prompt_tokens_by_source"]["host"] == 0
    assert with_disk["ttft_s"]["mean"] < small["ttft_s"]["mean"]


def test_a_slow_disk_hurts_and_a_full_one_does_not_exist():
    trace = conversations()
    slow = figures(trace, kv_offloading_size=1.0, secondary_tiers="fs", disk_load_gb_per_s=0.5)
    assert slow["ttft_s"]["mean"] > 2 * figures(trace, kv_offloading_size=1.0)["ttft_s"]["mean"]
    assert slow["offloading"]["disk_load_busy"] > 0.1


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_fast_forward_changes_nothing_with_a_disk(async_scheduling):
    trace = conversations(turns=4)
    scenario = Scenario(
        **TIGHT,
        kv_offloading_size=1.0,
        secondary_tiers="fs",
        async_scheduling=async_scheduling,
        disk_load_gb_per_s=2.0,
        disk_store_gb_per_s=0.5,
    )
    fast, slow = (replay(trace, scenario, fast_forward=fast, check_every=5) for fast in (True, False))
    pd.testing.assert_frame_equal(fast.requests, slow.requests)
    assert fast.summary["offloading"] == slow.summary["offloading"]
    assert fast.summary["offloading"]["promoted_blocks"] > 0


def test_a_replay_ends_where_the_end_of_the_last_store_to_disk_comes_after_its_last_step(tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text(
        '{"arrival_s": 4.591787, "spans": [[0, 0, 16], [1, 0, 15]], "input_tokens": 31, '
        '"output_tokens": 147}\n'
        '{"arrival_s": 29.407115, "spans": [[0, 0, 64], [2, 0, 16]], "input_tokens": 80, "output_tokens": 1, '
        '"n": 3}\n'
    )
    summary = figures(
        read(path),
        max_num_seqs=1,
        kv_offloading_size=0.5,
        secondary_tiers="fs",
        async_scheduling=False,
        enable_prefix_caching=False,
    )
    assert summary["completed"] == 4


def test_stores_to_disk_that_fail_are_not_found_there():
    trace = conversations(turns=4)
    fields = {"kv_offloading_size": 1.0, "secondary_tiers": "fs"}
    failing, sound = (
        figures(trace, **fields, link_faults=f"disk-store:failing={share}") for share in (0.3, 0.0)
    )
    assert failing["completed"] == len(trace)
    assert failing["offloading"]["lost_disk_stores"] > 0
    assert failing["offloading"]["disk_hit_tokens"] < sound["offloading"]["disk_hit_tokens"]


def test_a_request_whose_blocks_the_disk_cannot_read_asks_for_ever_and_is_ended_with_a_reason():
    trace = conversations(turns=3)
    result = replay(
        trace,
        Scenario(
            **TIGHT,
            engine="vllm@0.24",
            kv_offloading_size=1.0,
            secondary_tiers="fs",
            link_faults="disk-load:failing=0.3",
        ),
        check_every=50,
    )
    cancelled = result.requests["state"] == "cancelled"
    assert 0 < cancelled.sum() < len(trace)
    assert set(result.requests["reason"][cancelled]) == {UNREADABLE}
    assert set(result.requests["state"][~cancelled]) == {"completed"}
    tiers = result.summary["offloading"]
    assert tiers["lost_disk_loads"] > cancelled.sum()  # each asks again and again
    assert tiers["disk_hit_tokens"] > 0


def test_a_prompt_whose_blocks_do_not_fit_in_the_host_together_is_refused():
    trace = conversations(users=2, turns=8, tokens=900)
    with pytest.raises(BadInput, match="raise kv_offloading_size"):
        figures(trace, kv_offloading_size=0.5, secondary_tiers="fs")


def test_a_threshold_stores_only_what_was_looked_up_often():
    trace = conversations(turns=4)
    often = figures(trace, kv_offloading_size=40.0, kv_offloading_store_threshold=2)
    assert (
        often["offloading"]["stored_blocks"]
        < figures(trace, kv_offloading_size=40.0)["offloading"]["stored_blocks"]
    )


def test_generated_tokens_are_stored_where_asked_for():
    trace = conversations(turns=2)
    all_of_it = figures(trace, kv_offloading_size=40.0, offload_prompt_only=False)
    prompts = figures(trace, kv_offloading_size=40.0)
    assert all_of_it["offloading"]["stored_blocks"] > prompts["offloading"]["stored_blocks"]


def test_a_link_carries_one_transfer_after_another():
    link = Link(LinkSpec(1e9, latency_ns=10), "load")
    assert link.submit(100, 1_000, 0) == (1_110, False)
    assert link.submit(200, 1_000, 1) == (2_120, False)
    assert link.waited_ns == 910
    assert link.submit(9_000, 500, 2) == (9_510, False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 2_000)), max_size=30), st.floats(0, 0.5))
def test_a_link_ends_its_transfers_as_a_simpy_resource_with_one_place(jobs, slow):
    spec = LinkSpec(1e9, latency_ns=7, slow=slow, slowness=3.0)
    env = simpy.Environment()
    place = simpy.Resource(env, capacity=1)
    alone = Link(spec, "load", seed=4)  # a fresh transfer each time: what it takes by itself
    ended: dict[int, int] = {}

    def transfer(number: int, begin: int, size: int) -> Iterator[simpy.Event]:
        yield env.timeout(begin)
        with place.request() as turn:
            yield turn
            alone.free_ns = int(env.now)
            yield env.timeout(alone.submit(int(env.now), size, number)[0] - int(env.now))
        ended[number] = int(env.now)

    jobs = sorted(jobs)
    for number, (begin, size) in enumerate(jobs):
        env.process(transfer(number, begin, size))
    env.run()
    link = Link(spec, "load", seed=4)
    assert {number: link.submit(*job, number)[0] for number, job in enumerate(jobs)} == ended


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_offloading_block_size": 24}, "no multiple of block_size 16"),
        ({"kv_offloading_size": 1e-6}, "no room for a single block"),
        ({"engine": "nano-vllm"}, "has no KV offloading"),
        ({"secondary_tiers": "fs", "kv_offloading_size": None}, "needs a host tier in front"),
        ({"secondary_tiers": "fs", "kv_offloading_store_threshold": 2}, "takes no store threshold"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(BadInput, match=message):
        figures(conversations(turns=1), **{"kv_offloading_size": 4.0, **fields})


def test_a_last_block_from_the_host_is_no_more_than_all_of_a_prompt():
    """The device leaves out the block of a prompt's last token; a load leaves out the token only."""
    count = 40
    table = pd.DataFrame({"arrival_s": range(count), "input_tokens": 64, "output_tokens": 2})
    table["tenant"] = "a"
    texts = np.arange(count) % 4
    spans = Spans(np.arange(count + 1), texts, np.zeros(count, np.int64), np.full(count, 64))
    summary = figures(Trace("again", table, spans), num_gpu_blocks=6, max_num_seqs=1, kv_offloading_size=1.0)
    assert summary["reused_prefix_tokens"] == 36 * 63
    assert summary["token_hit_rate"] == pytest.approx(36 * 63 / (36 * 63 + 4 * 48))
    assert summary["tenants"]["a"]["token_hit_rate"] == summary["token_hit_rate"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"tenants": "a:blocks=200"},
            "a ceiling in `tenants` held back .*; raise the ceilings",
        ),
        ({"tenants": "a:weight=20 b:weight=1"}, "weights in `tenants` .*; give more blocks"),
        ({"scheduling_policy": "priority"}, r"\(as in vLLM 0.24\); give more blocks, or use fcfs"),
    ],
    ids=["ceilings", "weights", "priority"],
)
def test_requests_that_wait_for_one_another_for_ever_are_told_why(fields, words):
    trace = read("chat", limit=200)
    tenants = np.where(np.arange(len(trace)) % 3 == 0, "a", "b")
    priorities = np.random.default_rng(1).integers(0, 9, len(trace))
    rows = trace.requests.assign(tenant=tenants, priority=priorities)
    trace = Trace(trace.name, rows, trace.spans)
    scenario = Scenario(num_gpu_blocks=350, kv_offloading_size=4.0, costs="roofline", **fields)
    newer = replay(trace, scenario, check_every=20)
    assert set(newer.requests["state"]) == {"completed", "rejected"}  # those that loaded come first
    scenario = scenario.changed(engine="vllm@0.24")
    with pytest.raises(BadInput, match=words):
        replay(trace, scenario)
    with pytest.raises(BadInput, match=words):
        replay_fleet(trace, scenario, FleetSettings())


def test_a_refused_store_of_a_request_that_speculates_is_tried_again():
    """Its draft tokens reach beyond its last token, and content ends there."""
    table = pd.DataFrame({"arrival_s": [0.0, 0.0], "input_tokens": [267, 77], "output_tokens": [1, 2]})
    scenario = Scenario(
        model="Qwen/Qwen3-0.6B",
        costs="roofline",
        num_gpu_blocks=37,
        max_num_seqs=32,
        max_num_batched_tokens=200,
        speculative_config='{"method":"draft_model","num_speculative_tokens":3,"acceptance":0,"draft_cost":0.1}',
    )
    ten_blocks = scenario.layout().block_bytes * 10.01 / 2**30
    ids = [np.arange(267), 1000 + np.arange(77)]
    scenario = scenario.changed(kv_offloading_size=ten_blocks)
    result = replay(Trace("drafts", table, None, ids), scenario)
    assert result.summary["completed"] == 2
    assert result.summary["offloading"]["refused_stores"] > 0
