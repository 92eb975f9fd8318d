"""Which router serves a trace best: one hot prefix, and the Mooncake conversation trace."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pagecast.sim.fleet.settings import FleetSettings, ReplicaGroup, RouterSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay.result import Kept
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.schema import Spans, Trace

MOONCAKE = Path(__file__).resolve().parents[4] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.zst"


def one_hot_prefix(count, share, seed=0):
    """150 prompts per second, of 256 tokens after a prefix of 2,048 tokens: of a `share` the same one."""
    rng = np.random.default_rng(seed)
    prefix = np.where(rng.random(count) < share, 0, rng.integers(1, 40, count))
    own = np.arange(count) + 1000
    table = pd.DataFrame(
        {
            "arrival_s": np.cumsum(rng.exponential(1 / 150, count)),
            "input_tokens": 2048 + 256,
            "output_tokens": rng.integers(50, 150, count),
        }
    )
    content = np.stack([prefix, own], axis=1).ravel()
    length = np.tile([2048, 256], count)
    spans = Spans(np.arange(count + 1) * 2, content.astype(np.int64), np.zeros(2 * count, np.int64), length)
    return Trace("hot", table, spans)


def summary_of(trace, policy, scenario):
    fleet = FleetSettings(groups=(ReplicaGroup(replicas=4),), router=RouterSettings(policy=policy))
    return replay_fleet(trace, scenario, fleet, kept=Kept(steps=False)).summary


def test_cost_beats_affinity_in_p99_ttft_when_one_prefix_is_hot():
    trace = one_hot_prefix(1200, share=0.7)
    scenario = Scenario(num_gpu_blocks=6000, costs="roofline")
    cost = summary_of(trace, "cost", scenario)
    affinity = summary_of(trace, "prefix-affinity", scenario)
    assert cost["ttft_s"]["p99"] < affinity["ttft_s"]["p99"] / 2
    assert cost["fleet"]["imbalance"] < affinity["fleet"]["imbalance"]


@pytest.mark.slow
@pytest.mark.skipif(not MOONCAKE.exists(), reason="no ../shared beside the project")
def test_affinity_and_cost_reuse_more_of_mooncake_than_round_robin():
    trace = read(MOONCAKE)
    scenario = Scenario(num_gpu_blocks=30_000, async_scheduling=False, costs="roofline")
    reused = {
        policy: summary_of(trace, policy, scenario)["reused_prefix_tokens"]
        for policy in ("round-robin", "prefix-affinity", "cost")
    }
    assert reused["round-robin"] < min(reused["prefix-affinity"], reused["cost"])
