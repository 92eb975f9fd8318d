"""Replays with rules of the cache that engines leave to choice."""

from __future__ import annotations

import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pandas.testing import assert_frame_equal


@pytest.mark.parametrize("order", ["slru", "lfu", "fifo", "cost"])
def test_an_eviction_order_changes_hits_and_not_what_fast_forward_shows(order: str) -> None:
    trace = read("chat", limit=150)
    scenario = Scenario(num_gpu_blocks=1200, eviction=order, costs="roofline")
    fast = replay(trace, scenario, check_every=50)
    slow = replay(trace, scenario, fast_forward=False)
    assert_frame_equal(fast.requests, slow.requests)
    plain = replay(trace, Scenario(num_gpu_blocks=1200, costs="roofline"))
    assert fast.summary["reused_prefix_tokens"] != plain.summary["reused_prefix_tokens"]


def test_models_with_windows_refuse_an_order() -> None:
    scenario = Scenario(model="google/gemma-3-27b-it", num_gpu_blocks=2000, eviction="lfu", costs="roofline")
    with pytest.raises(BadInput, match="leave eviction at lru"):
        replay(read("chat", limit=2), scenario)
