"""Prefill and decode apart: nothing is lost, blocks come back, and links carry what is missing."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.handoff import Ports
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.schema import Trace

NVLINK = {"bytes_per_s": 450e9}


def apart(prefill=1, decode=1, policy="prefix-affinity", scenario=None, **fields):
    groups = [
        {"name": "p", "role": "prefill", "replicas": prefill, "scenario": scenario or {}},
        {"name": "d", "role": "decode", "replicas": decode},
    ]
    return FleetSettings.make({"groups": groups, "router": {"policy": policy}, "disaggregation": fields})


def one(tokens=4096, output=50):
    table = pd.DataFrame({"arrival_s": [0.0], "input_tokens": [tokens], "output_tokens": [output]})
    return Trace("one", table)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["round-robin", "prefix-affinity", "dynamo", "cost", "llm-d"]),
    st.sampled_from([0, 500]),
    st.sampled_from(["missing", "full"]),
    st.sampled_from(["decode", "prefill"]),
    st.sampled_from([1e8, 450e9]),
    st.integers(700, 1500),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_request_ends_once_and_every_block_comes_back(
    prefill, decode, policy, remote, transfer, first, rate, blocks, depth, after
):
    trace = read("chat", limit=60)
    trace.requests["cancel_after_s"] = np.where(np.arange(60) % 7 == 3, 0.4, np.nan)
    scenario = Scenario(num_gpu_blocks=blocks, costs="roofline", gpu="L4", async_scheduling=depth)
    fields = {"remote_tokens": remote, "transfer": transfer, "first_token": first, "bytes_per_s": rate}
    fields["after_step"] = after
    if remote:
        fields["decode_router"] = "prefix-affinity"
    fleet = apart(prefill, decode, policy, **fields)
    result = replay_fleet(trace, scenario, fleet)
    slow = replay_fleet(trace, scenario, fleet, fast_forward=False)
    pd.testing.assert_frame_equal(result.requests, slow.requests, check_exact=True)
    s = result.summary
    assert result.requests["row"].tolist() == list(range(60))
    assert s["completed"] + s["rejected"] + s["cancelled"] == s["requests"] == 60
    done = result.requests[result.requests["state"] == "completed"]
    assert done["replica"].str.startswith("d-").all()
    assert (done["ttft_s"] > 0).all() and (done["finished_s"] >= done["first_token_s"]).all()
    assert s["fleet"]["handoff"]["remote"] + s["fleet"]["handoff"]["local"] >= len(done)
    if not remote:
        assert s["fleet"]["handoff"]["local"] == 0


def test_a_handoff_takes_what_its_bytes_take():
    """One prompt of 4,096 tokens: prefill alone, 604 MB over the link, then decode alone."""
    alone = replay(one(), Scenario()).requests.iloc[0]
    slow = replay_fleet(one(), Scenario(), apart(bytes_per_s=1e9, latency_s=0.01))
    handoff = slow.summary["fleet"]["handoff"]
    assert handoff["moved_bytes"] == 4096 * 2 * 36 * 8 * 128 * 2
    assert handoff["transfer_s"]["max"] == pytest.approx(0.01 + handoff["moved_bytes"] / 1e9)
    row = slow.requests.iloc[0]
    assert row["ttft_s"] == pytest.approx(alone["ttft_s"] + handoff["transfer_s"]["max"], rel=0.05)
    early = replay_fleet(one(), Scenario(), apart(bytes_per_s=1e9, latency_s=0.01, first_token="prefill"))
    assert early.requests.iloc[0]["ttft_s"] == pytest.approx(alone["ttft_s"], rel=1e-6)
    assert early.requests.iloc[0]["e2e_s"] == pytest.approx(row["e2e_s"])


@pytest.mark.parametrize("gpu", ["H200", "H100"])
def test_the_first_token_of_a_prefill_replica_is_split_into_its_times_there(gpu):
    """Queue, lookup and prefill are those of the replica that computed the prompt, by its own costs."""
    arrival = np.arange(40) * 0.01
    table = pd.DataFrame(
        {"arrival_s": arrival, "input_tokens": 1000 + 50 * np.arange(40), "output_tokens": 20}
    )
    fleet = apart(bytes_per_s=1e9, first_token="prefill", scenario={"gpu": gpu})
    split = replay_fleet(Trace("made", table), Scenario(), fleet).requests
    alone = replay(Trace("prompts", table.assign(output_tokens=1)), Scenario(gpu=gpu)).requests
    parts = split[["queue_s", "prefix_lookup_s", "prefill_s", "decode_s"]].sum(axis=1)
    np.testing.assert_allclose(parts, split["e2e_s"], rtol=0, atol=1e-8)
    first = ["queue_s", "prefix_lookup_s", "prefill_s"]
    pd.testing.assert_frame_equal(split[first], alone[first])
    assert (split["prefill_s"] > 0).all() and split["queue_s"].max() > 0.05


@pytest.mark.parametrize("depth", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_busy_decode_replica_handles_prompts_between_its_steps(depth, after):
    """It reserves blocks when it plans a step, and finds that the prompt has come when it plans a later one.
    A transfer that follows the step in flight begins when that ends."""
    table = {"arrival_s": [0.0, 1.0], "input_tokens": [2048, 4096], "output_tokens": [2000, 2]}
    scenario = Scenario(gpu="L4", num_gpu_blocks=4000, costs="roofline", async_scheduling=depth)
    fleet = apart(after_step=after, bytes_per_s=1e9, latency_s=0.0, first_token="prefill")
    result = replay_fleet(Trace("two", pd.DataFrame(table)), scenario, fleet, fast_forward=False)
    handoff = result.summary["fleet"]["handoff"]
    steps = result.steps[result.steps["replica"] == "d-0"]
    row = result.requests.iloc[1]
    ready_s = row["first_token_s"]
    begin_s = ready_s + handoff["wait_s"]["max"]
    landed_s = begin_s + handoff["transfer_s"]["max"] + handoff["landing_s"]["max"]
    planned = steps["start_ns"].to_numpy() / 1e9
    ended = steps["end_ns"].to_numpy() / 1e9
    assert np.abs((ended if after else planned) - begin_s).min() < 1e-6
    assert np.abs(planned - landed_s).min() < 0.001  # the host looks up its prefix before it plans
    assert ((planned > ready_s) & (planned < begin_s - 1e-6)).sum() <= int(after)
    assert ((planned > begin_s + handoff["transfer_s"]["max"]) & (planned < landed_s - 1e-6)).sum() == 0


def test_only_what_is_missing_is_carried():
    trace = read("chat", limit=300)
    moved = {
        mode: replay_fleet(trace, Scenario(), apart(1, 1, transfer=mode, **NVLINK)).summary["fleet"][
            "handoff"
        ]
        for mode in ("missing", "full")
    }
    assert moved["missing"]["remote"] == moved["full"]["remote"] == 300
    assert moved["missing"]["moved_bytes"] < 0.4 * moved["full"]["moved_bytes"]


def test_short_prompts_stay_where_they_decode():
    trace = read("chat", limit=300)
    far = replay_fleet(trace, Scenario(), apart(1, 2, **NVLINK)).summary["fleet"]["handoff"]
    near = apart(1, 2, remote_tokens=1000, decode_router="prefix-affinity", **NVLINK)
    mixed = replay_fleet(trace, Scenario(), near).summary["fleet"]["handoff"]
    assert far["local"] == 0
    assert mixed["local"] > 100 and mixed["remote"] > 0


def test_decode_apart_is_not_held_up_by_prompts():
    """The longest gaps of decoding replicas vanish where prompts are computed elsewhere."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "arrival_s": np.sort(rng.uniform(0, 30, 200)),
            "input_tokens": 6000,
            "output_tokens": 150,
        }
    )
    trace = Trace("long prompts", table)
    together = FleetSettings.make({"groups": [{"replicas": 2}], "router": {"policy": "least-loaded"}})
    mixed = replay_fleet(trace, Scenario(), together).summary
    split = replay_fleet(trace, Scenario(), apart(1, 1, "least-loaded", **NVLINK)).summary
    assert split["completed"] == mixed["completed"] == 200
    assert split["tpot_s"]["p99"] < 0.7 * mixed["tpot_s"]["p99"]


def test_transfers_of_one_replica_wait_for_each_other():
    ports = Ports(1e9, 1000)
    assert ports.carry(0, 1, 1_000_000, 0) == (0, 1_001_000)
    assert ports.carry(0, 2, 1_000_000, 0) == (1_001_000, 2_002_000)
    assert ports.carry(3, 2, 1_000_000, 0) == (2_002_000, 3_003_000)
    assert ports.carry(3, 4, 1_000_000, 9_000_000) == (9_000_000, 10_001_000)


@pytest.mark.parametrize(
    ("fleet", "words"),
    [
        ({"groups": [{"role": "prefill"}], "disaggregation": {}}, "roles prefill and decode"),
        ({"groups": [{"role": "prefill", "name": "a"}, {"role": "decode", "name": "b"}]}, "disaggregation"),
        (
            {
                "groups": [{"role": "prefill", "name": "a"}, {"role": "decode", "name": "b"}],
                "disaggregation": {},
                "scaling": {"target": 1.0, "most": 3},
            },
            "without disaggregation",
        ),
    ],
)
def test_roles_that_make_no_fleet_are_refused(fleet, words):
    with pytest.raises(BadInput, match=words):
        replay_fleet(read("chat", limit=5), Scenario(), FleetSettings.make(fleet))


@pytest.mark.parametrize(
    ("base", "differs", "words"),
    [
        ({}, {"model": "Qwen/Qwen3-0.6B"}, r"p-0 has model Qwen/Qwen3-0.6B, d-0 Qwen/Qwen3-8B"),
        ({}, {"kv_cache_dtype": "fp8"}, r"p-0 has kv_cache_dtype fp8, d-0 auto"),
        (
            {"model": "google/gemma-3-4b-it"},
            {"disable_hybrid_kv_cache_manager": True},
            r"p-0 has disable_hybrid_kv_cache_manager True, d-0 False",
        ),
    ],
)
def test_replicas_that_cannot_read_the_kv_of_others_are_refused(base, differs, words):
    with pytest.raises(BadInput, match=words):
        replay_fleet(one(), Scenario(**base), apart(scenario=differs))


@pytest.mark.parametrize(
    "differs", [{"model": "qwen3-8b"}, {"block_size": 32}, {"tensor_parallel_size": 2}, {"gpu": "H100"}]
)
def test_replicas_of_one_model_hand_over_whatever_else_differs(differs):
    scenario = Scenario(costs="roofline")
    summary = replay_fleet(one(), scenario, apart(scenario=differs)).summary
    assert summary["completed"] == summary["fleet"]["handoff"]["remote"] == 1


@pytest.mark.parametrize("remote_tokens", [0, 1000], ids=["handed over", "computed where they decode"])
def test_requests_that_the_decode_replica_rejects_are_not_counted_as_decoded_there(remote_tokens):
    table = {"arrival_s": [0.0, 1.0, 2.0], "input_tokens": [500, 600, 200], "output_tokens": [50, 900, 50]}
    groups = [
        {"name": "p", "role": "prefill"},
        {"name": "d", "role": "decode", "scenario": {"num_gpu_blocks": 40}},
    ]
    settings = {"groups": groups, "disaggregation": {"remote_tokens": remote_tokens}}
    trace = Trace("made", pd.DataFrame(table))
    summary = replay_fleet(trace, Scenario(), FleetSettings.make(settings)).summary
    assert (summary["completed"], summary["rejected"]) == (2, 1)
    handoff = summary["fleet"]["handoff"]
    assert (handoff["remote"], handoff["local"]) == ((0, 2) if remote_tokens else (2, 0))


def test_what_a_prompt_found_is_told_apart_where_it_was_computed():
    scenario = Scenario(costs="roofline", partial_reuse="copy", block_size=128, num_gpu_blocks=375)
    groups = [{"replicas": 1, "role": "prefill"}, {"replicas": 1, "role": "decode"}]
    fleet = FleetSettings.make({"groups": groups, "disaggregation": {}})
    summary = replay_fleet(read("chat", limit=200), scenario, fleet).summary
    sources = summary["prompt_tokens_by_source"]
    assert sources["partial"] > 1000
    assert sources["exact"] == summary["reused_prefix_tokens"]
    assert summary["fleet"]["by_replica"][0]["token_hit_rate"] == pytest.approx(summary["token_hit_rate"])


def test_a_prompt_of_a_model_with_windows_waits_until_all_its_blocks_are_free():
    """Blocks are reserved for every token of it, those that leave a window before the end, too."""
    table = pd.DataFrame({"arrival_s": [0.0, 0.1], "input_tokens": [800, 400], "output_tokens": [5, 5]})
    scenario = Scenario(
        engine="vllm@0.24",
        model="openai/gpt-oss-20b",
        costs="roofline",
        num_gpu_blocks=80,
        max_num_batched_tokens=256,
    )
    result = replay_fleet(Trace("windows", table), scenario, apart())
    assert result.summary["completed"] == 2
