"""Replicas over time: nothing is lost with a replica, and the autoscaler follows the load."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.lifecycle import startup_ns
from pagecast.sim.fleet.settings import FleetSettings, Startup
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.schema import Trace

QUICK = {"engine_s": 0.2, "disk_bytes_per_s": 1e12}


def fleet_of(replicas, policy="least-loaded", **fields):
    base = {"groups": [{"replicas": replicas}], "router": {"policy": policy}, "startup": QUICK}
    return FleetSettings.make({**base, **fields})


def poisson(rates, output=100, seed=0):
    """A trace whose rate changes: `rates` are (requests per second, seconds)."""
    rng = np.random.default_rng(seed)
    times, begun = [], 0.0
    for rate, length in rates:
        times.append(begun + np.sort(rng.uniform(0, length, rng.poisson(rate * length))))
        begun += length
    arrival = np.concatenate(times)
    table = pd.DataFrame({"arrival_s": arrival, "input_tokens": 500, "output_tokens": output})
    return Trace("poisson", table)


INCIDENTS = st.lists(
    st.fixed_dictionaries(
        {
            "at_s": st.floats(0, 3),
            "replica": st.sampled_from(["replica-0", "replica-1", "replica-2"]),
            "kind": st.sampled_from(["loss", "drain"]),
            "back_after_s": st.sampled_from([None, 0.0, 0.5]),
        }
    ),
    max_size=4,
)


@given(
    INCIDENTS,
    st.sampled_from(["round-robin", "session", "prefix-affinity", "cost", "llm-d", "dynamo", "aibrix"]),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.01]),
)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_request_ends_once_whatever_happens(incidents, policy, retries, scaling, rollout, hop_s):
    trace = read("chat", limit=60)
    trace.requests["cancel_after_s"] = np.where(np.arange(60) % 7 == 3, 0.5, np.nan)
    fields = {"incidents": incidents, "retries": {"most": retries, "after_s": 0.1}}
    fields["router"] = {"policy": policy, "hop_s": hop_s}
    if scaling:
        fields["scaling"] = {"target": 1.0, "least": 0, "most": 5, "every_s": 0.3, "down_after_s": 1.0}
    if rollout:
        fields["rollout"] = {"at_s": 1.0, "scenario": {"max_num_seqs": 8}}
    scenario = Scenario(num_gpu_blocks=1200, costs="roofline", gpu="L4")
    result = replay_fleet(trace, scenario, fleet_of(3, **fields))
    requests = result.requests
    assert requests["row"].tolist() == list(range(60))
    rejected = requests[requests["state"] == "rejected"]
    assert (rejected["reason"] != "").all()
    s = result.summary
    assert s["completed"] + s["rejected"] + s["cancelled"] == s["requests"] == 60
    done = requests[requests["state"] == "completed"]
    assert (done["finished_s"] >= done["first_token_s"]).all() and (done["ttft_s"] > 0).all()
    if not incidents and not retries:
        assert s["fleet"]["retries"] == 0


def test_a_lost_replica_delays_its_requests_and_they_are_served_elsewhere():
    trace = poisson([(20, 10)], output=200)
    calm = replay_fleet(trace, Scenario(), fleet_of(2))
    lost = replay_fleet(trace, Scenario(), fleet_of(2, incidents=[{"at_s": 5.0, "replica": "replica-1"}]))
    assert lost.summary["completed"] == calm.summary["completed"] == len(trace)
    assert lost.summary["fleet"]["retries"] > 5
    moved = calm.requests["replica"].eq("replica-1") & lost.requests["replica"].eq("replica-0")
    assert moved.sum() >= lost.summary["fleet"]["retries"]
    assert lost.summary["e2e_s"]["p99"] > calm.summary["e2e_s"]["p99"] + 1
    assert lost.timeline["event"].tolist() == ["ready", "ready", "lost"]


def test_without_retries_or_replicas_requests_are_rejected_with_the_reason():
    trace = poisson([(20, 10)])
    gone = [{"at_s": 5.0, "replica": "replica-0"}]
    result = replay_fleet(trace, Scenario(), fleet_of(1, incidents=gone, retries={"most": 0}))
    reasons = result.requests["reason"].value_counts()
    assert set(reasons.index) == {"", "its replica was lost, 0 retries", "no replica was left"}
    assert (result.requests.loc[result.requests["reason"] != "", "replica"] == "").all()
    assert result.summary["fleet"]["retries"] == 0
    back = [{"at_s": 5.0, "replica": "replica-0", "back_after_s": 1.0}]
    result = replay_fleet(trace, Scenario(), fleet_of(1, incidents=back))
    assert result.summary["completed"] == len(trace)
    assert result.summary["ttft_s"]["max"] > 1.2


def test_requests_that_wait_in_vain_were_not_sent_again():
    """Two are lost with the only replica: one is given up meanwhile, and nobody is left for the other."""
    table = pd.DataFrame({"arrival_s": [0.0, 0.0], "input_tokens": 500, "output_tokens": 200})
    table["cancel_after_s"] = [0.8, np.nan]
    gone = [{"at_s": 0.5, "replica": "replica-0"}]
    result = replay_fleet(Trace("two", table), Scenario(), fleet_of(1, incidents=gone))
    assert result.requests["state"].tolist() == ["cancelled", "rejected"]
    assert result.summary["fleet"]["retries"] == 0
    back = [{"at_s": 0.5, "replica": "replica-0", "back_after_s": 0.0}]
    result = replay_fleet(Trace("two", table), Scenario(), fleet_of(1, incidents=back))
    assert result.requests["state"].tolist() == ["cancelled", "completed"]
    assert result.summary["fleet"]["retries"] == 1


def test_a_drained_replica_ends_its_requests_and_gets_no_more():
    trace = poisson([(20, 10)], output=300)
    drain = [{"at_s": 5.0, "replica": "replica-0", "kind": "drain"}]
    result = replay_fleet(trace, Scenario(), fleet_of(2, incidents=drain))
    own = result.requests[result.requests["replica"] == "replica-0"]
    assert result.summary["completed"] == len(trace)
    assert result.summary["fleet"]["retries"] == 0
    assert own["arrival_s"].max() <= 5.0 < own["finished_s"].max()
    gone = result.timeline[result.timeline["event"] == "gone"]
    assert gone["time_s"].tolist() == [pytest.approx(own["finished_s"].max())]


@pytest.mark.parametrize(("metric", "target"), [("queue", 4.0), ("kv", 0.5), ("ttft", 2.0)])
def test_an_autoscaled_fleet_grows_with_the_load_and_shrinks_again(metric, target):
    trace = poisson([(1, 60), (40, 60), (1, 240)], output=150)
    scaling = {
        "metric": metric,
        "target": target,
        "least": 1,
        "most": 6,
        "every_s": 5.0,
        "down_after_s": 30.0,
    }
    scenario = Scenario(gpu="L4", num_gpu_blocks=2000, max_num_seqs=32)
    fleet = fleet_of(1, scaling=scaling, price_per_gpu_hour=2.0)
    result = replay_fleet(trace, scenario, fleet)
    alone = replay_fleet(trace, scenario, fleet_of(1))
    events = result.timeline["event"].value_counts()
    assert result.summary["completed"] == len(trace)
    assert events["ready"] >= 3
    assert events["gone"] >= 2
    assert result.summary["ttft_s"]["p99"] < alone.summary["ttft_s"]["p99"]
    figures = result.summary["fleet"]
    assert figures["gpu_hours"] < 6 * result.summary["makespan_s"] / 3600
    assert figures["cost"] == pytest.approx(2.0 * figures["gpu_hours"])


def test_gpu_hours_count_from_the_first_arrival_as_the_makespan_does():
    """A slice of a day costs the same whenever it begins, and what was gone before it costs nothing."""
    steps = [
        {"at_s": 3601.0, "replica": "replica-0", "back_after_s": 1.0},
        {"at_s": 100.0, "replica": "replica-2"},
    ]
    settings = fleet_of(3, incidents=steps, price_per_gpu_hour=2.0)
    early = poisson([(20, 10)])
    late = Trace("late", early.requests.assign(arrival_s=early.requests["arrival_s"] + 3600))
    s = replay_fleet(late, Scenario(), settings).summary
    fleet, span_s = s["fleet"], s["makespan_s"]
    assert 1.7 * span_s < fleet["gpu_hours"] * 3600 < 2 * span_s
    assert fleet["cost"] == pytest.approx(2.0 * fleet["gpu_hours"])
    assert fleet["peak_gpus"] == fleet["peak_replicas"] == 2
    assert fleet["least_replicas"] == 1
    assert sum(fleet["mean_gpus"].values()) == pytest.approx(fleet["gpu_hours"] * 3600 / span_s)
    alone = [replay_fleet(trace, Scenario(), fleet_of(2)).summary["fleet"] for trace in (early, late)]
    assert alone[0]["gpu_hours"] == pytest.approx(alone[1]["gpu_hours"])


def test_a_rollout_replaces_every_replica_without_a_gap():
    trace = poisson([(20, 20)])
    rollout = {"at_s": 5.0, "scenario": {"max_num_seqs": 64}}
    result = replay_fleet(trace, Scenario(), fleet_of(3, rollout=rollout))
    assert result.summary["completed"] == len(trace)
    assert [name for name in result.replicas["replica"] if "next" in name] == [
        "replica-next-0",
        "replica-next-1",
        "replica-next-2",
    ]
    late = result.requests[result.requests["arrival_s"] > 8]
    assert late["replica"].str.startswith("replica-next").all()


def steady(every_s, until_s, output=100):
    """A trace of one request every so often."""
    arrival = np.arange(0, until_s, every_s)
    return Trace("steady", pd.DataFrame({"arrival_s": arrival, "input_tokens": 500, "output_tokens": output}))


def test_an_autoscaler_leaves_a_rollout_alone_and_starts_the_new_revision():
    """Its looks at 5 and 10 s fall into the swap, which is no surplus: nobody waits for a replica."""
    trace = Trace(
        "burst",
        pd.concat([steady(0.5, 20).requests, steady(0.01, 10).requests.assign(arrival_s=20.0)]),
    )
    scaling = {"metric": "queue", "target": 4.0, "most": 3, "every_s": 5.0, "down_after_s": 0.0}
    rollout = {"at_s": 4.0, "scenario": {"gpu": "H100"}}
    startup = {**QUICK, "engine_s": 8.0}
    fleet = fleet_of(1, scaling=scaling, rollout=rollout, startup=startup)
    result = replay_fleet(trace, Scenario(costs="roofline", max_num_seqs=16), fleet)
    swap = result.timeline[result.timeline["time_s"] < 15]
    assert list(zip(swap["replica"], swap["event"], strict=True))[:4] == [
        ("replica-0", "ready"),
        ("replica-next-0", "started"),
        ("replica-next-0", "ready"),
        ("replica-0", "draining"),
    ]
    assert result.requests.loc[result.requests["arrival_s"] < 20, "ttft_s"].max() < 0.2
    gpus = result.replicas.set_index("replica")["gpu"]
    assert gpus.to_dict() == {
        "replica-0": "1 x H200",
        "replica-next-0": "1 x H100",
        "replica-next-1": "1 x H100",
        "replica-next-2": "1 x H100",
    }


@pytest.mark.parametrize(("down_after_s", "first_s"), [(0.0, 5.0), (12.0, 15.0), (60.0, 65.0)])
def test_the_replicas_of_the_start_are_drained_after_the_time_of_less_need_too(down_after_s, first_s):
    scaling = {"target": 4.0, "most": 4, "every_s": 5.0, "down_after_s": down_after_s}
    result = replay_fleet(steady(1, 90), Scenario(costs="roofline"), fleet_of(4, scaling=scaling))
    drained = result.timeline[result.timeline["event"] == "draining"]
    assert drained["time_s"].tolist() == [first_s] * 3


def test_an_autoscaler_goes_by_its_own_group_and_leaves_others_alone():
    """The first group alone is too small, idle and scaled; the replicas of the other one stay."""
    groups = [{"name": "a", "replicas": 1}, {"name": "b", "replicas": 3, "scenario": {"gpu": "H100"}}]
    scaling = {"target": 4.0, "least": 2, "most": 4, "every_s": 5.0, "down_after_s": 0.0}
    result = replay_fleet(
        steady(0.5, 30), Scenario(costs="roofline"), fleet_of(1, groups=groups, scaling=scaling)
    )
    assert result.timeline["event"].tolist() == ["ready"] * 4 + ["started", "ready"]
    assert result.timeline["replica"].tolist()[-2:] == ["a-1", "a-1"]
    down = {**scaling, "least": 1}
    groups = [{"name": "a", "replicas": 3}, {"name": "b", "replicas": 2, "scenario": {"gpu": "H100"}}]
    result = replay_fleet(
        steady(0.5, 30), Scenario(costs="roofline"), fleet_of(1, groups=groups, scaling=down)
    )
    drained = result.timeline[result.timeline["event"] == "draining"]
    assert drained["replica"].str[0].tolist() == ["a", "a"]


def test_replicas_beyond_the_most_are_drained_at_the_first_look():
    scaling = {"target": 4.0, "least": 2, "most": 2, "every_s": 5.0, "down_after_s": 60.0}
    result = replay_fleet(steady(1, 20), Scenario(costs="roofline"), fleet_of(4, scaling=scaling))
    drained = result.timeline[result.timeline["event"] == "draining"]
    assert drained["time_s"].tolist() == [5.0, 5.0]


def test_a_replacement_that_starts_after_a_rollout_is_of_the_new_revision():
    lost = [{"at_s": 4.0, "replica": "replica-0", "back_after_s": 6.0}]
    rollout = {"at_s": 5.0, "scenario": {"gpu": "H100"}}
    fleet = fleet_of(2, incidents=lost, rollout=rollout)
    result = replay_fleet(steady(0.5, 20), Scenario(costs="roofline"), fleet)
    started = result.timeline[result.timeline["event"] == "started"]
    assert started["replica"].tolist() == ["replica-next-0", "replica-next-1"]
    assert started["time_s"].tolist() == [5.0, 10.0]
    assert result.replicas["gpu"].tolist() == ["1 x H200", "1 x H200", "1 x H100", "1 x H100"]


def test_starting_takes_what_reading_the_weights_takes():
    scenario = Scenario()
    disk = startup_ns(Startup.model_validate({}), scenario) / 1e9
    peer = startup_ns(Startup(source="peer"), scenario) / 1e9
    assert disk == pytest.approx(40 + 16.4e9 / 2e9, rel=0.02)
    assert peer == pytest.approx(40 + 16.4e9 / 25e9, rel=0.02)


def test_an_incident_at_nobody_is_refused():
    fleet = fleet_of(2, incidents=[{"at_s": 1.0, "replica": "replica-7"}])
    with pytest.raises(BadInput, match="no replica 'replica-7'"):
        replay_fleet(read("chat", limit=5), Scenario(), fleet)


# ---- clients that leave and come back


def with_retries(requests=8):
    """Requests of two tenants; every second is given up, and each is sent again where it was not served."""
    ids = np.arange(requests)
    firsts = pd.DataFrame({"arrival_s": ids / 4, "after": -1, "retry": 0, "output_tokens": 200})
    firsts["cancel_after_s"] = np.where(ids % 2 == 1, 0.1, np.nan)
    again = pd.DataFrame({"arrival_s": np.nan, "after": ids, "retry": 1, "output_tokens": 20, "gap_s": 0.5})
    table = pd.concat([firsts, again], ignore_index=True).assign(input_tokens=400)
    table["gap_s"] = table["gap_s"].fillna(0.0)
    table["tenant"] = np.where(np.arange(2 * requests) % 4 < 2, "a", "b")
    return Trace("retries", table)


@pytest.mark.parametrize("apart", [False, True], ids=["both", "disaggregated"])
def test_a_fleet_sends_a_retry_only_where_it_is_needed(apart):
    settings = fleet_of(2)
    if apart:
        groups = [{"replicas": 1, "role": "prefill"}, {"replicas": 1, "role": "decode"}]
        settings = FleetSettings.make({"groups": groups, "disaggregation": {}})
    result = replay_fleet(with_retries(), Scenario(num_gpu_blocks=500, costs="roofline"), settings)
    table = result.requests.set_index("row")
    assert table.index.tolist() == [*range(8), 9, 11, 13, 15]
    assert table["state"].loc[range(8)].tolist() == ["completed", "cancelled"] * 4
    assert (table["state"].loc[[9, 11, 13, 15]] == "completed").all()
    assert table["arrival_s"][9] == pytest.approx(table["finished_s"][1] + 0.5)


def test_retries_of_clients_follow_a_lost_fleet_too():
    settings = fleet_of(1, incidents=[{"at_s": 0.05, "replica": "replica-0", "kind": "loss"}])
    trace = with_retries(1)
    result = replay_fleet(trace, Scenario(num_gpu_blocks=500, costs="roofline"), settings)
    assert result.requests["row"].tolist() == [0, 1], "the first was rejected, so it is sent again"


@pytest.mark.parametrize("hop_s", [0.0, 0.015], ids=["told", "on its way"])
def test_a_client_that_left_is_not_served_after_its_replica_is_lost(hop_s):
    """It leaves at 0.01 s, in the first step of its replica, which is lost at 0.02 s."""
    table = pd.DataFrame({"arrival_s": [0.0, 0.0], "input_tokens": 8000, "output_tokens": 50})
    table["cancel_after_s"] = [0.01, np.nan]
    lost = [{"at_s": 0.02, "replica": f"replica-{number}", "back_after_s": 0.0} for number in (0, 1)]
    fleet = fleet_of(2, incidents=lost, router={"policy": "round-robin", "hop_s": hop_s})
    result = replay_fleet(Trace("left", table), Scenario(costs="roofline"), fleet)
    assert result.requests["state"].tolist() == ["cancelled", "completed"]
    assert result.requests["finished_s"][0] == 0.02
    assert result.requests["output_tokens"].tolist() == [0, 50]


def test_a_fleet_keeps_the_accounts_of_tenants():
    trace = with_retries(40)
    scenario = Scenario(num_gpu_blocks=60, costs="roofline", tenants="a:blocks=50 *:weight=1")
    result = replay_fleet(trace, scenario, fleet_of(2))
    tenants = result.summary["tenants"]
    assert set(tenants) == {"a", "b"}
    assert sum(each["requests"] for each in tenants.values()) == len(result.requests)
    evicted = sum(each["evicted_blocks"] for each in tenants.values())
    assert 0 < evicted == result.summary["evicted_blocks"]
    assert all(sum(each["evicted_by"].values()) == each["evicted_blocks"] for each in tenants.values())


def test_rules_of_a_replica_hold_in_a_fleet():
    """Swapping takes its time there too, and admission by expected output knows the trace's."""
    trace = poisson([(30, 3)], output=200)
    fields = {"num_gpu_blocks": 300, "costs": "roofline", "swap_space_gib": 1.0, "preemption": "swap"}
    slow, fast = (
        replay_fleet(trace, Scenario(**fields, swap_gb_per_s=rate), fleet_of(1)).summary
        for rate in (0.05, 50.0)
    )
    assert slow["preemptions"]
    assert slow["makespan_s"] > 1.2 * fast["makespan_s"]
    expected = Scenario(num_gpu_blocks=300, costs="roofline", admission="expected")
    assert replay_fleet(trace, expected, fleet_of(2)).summary["completed"] == len(trace)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_steps_of_a_lost_replica_count_until_its_loss(ahead):
    trace = poisson([(1, 1)], output=500)
    trace.requests["arrival_s"] = 0.0
    fleet = fleet_of(1, incidents=[{"at_s": 1.0, "replica": "replica-0"}], retries={"most": 0})
    scenario = Scenario(costs="roofline", num_gpu_blocks=400, async_scheduling=ahead)
    fast, slow = (replay_fleet(trace, scenario, fleet, fast_forward=each) for each in (True, False))
    assert fast.summary["steps"] == slow.summary["steps"] > 100
    assert fast.summary["peak_kv_usage"] == slow.summary["peak_kv_usage"]
    assert (fast.steps["end_ns"] <= 10**9).all()
