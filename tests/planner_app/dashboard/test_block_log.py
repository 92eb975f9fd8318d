"""The log of blocks is of the same run as a replay's figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pagecast.planner_app.dashboard.blocks.log import CODES, NOBODY, WITHDRAWN, BlockLog, record
from pagecast.sim.core.events import EventKind, run_length
from pagecast.sim.replay import Kept, replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

# Rules of tests/sim/replay/test_cache_policies.py, and what else takes time.
RULES: list[dict[str, Any]] = [
    *({"eviction": order} for order in ("lru", "slru", "lfu", "fifo", "cost")),
    {"eviction": "priority", "retention": "decode:40:2.1"},
    {"eviction": "priority", "retention": "decode:40:2.1", "async_scheduling": False},
    {"admission": "completion"},
    {"admission": "expected"},
    {"admission": "maximum"},
    {"watermarks": "0.5:0.8"},
    {"preemption_victim": "least-progress"},
    {"shed_ttft_s": 0.5},
    {"preemption": "swap"},
    {"preemption": "swap", "swap_gb_per_s": 2.0},
    {"partial_reuse": "copy"},
    {"partial_reuse": "copy", "engine": "trtllm-guaranteed-no-evict"},
    {"rollout_at_s": 10.0},
    {"isolation": "tenant", "tenants": "a:weight=2,blocks=700 b:blocks=500"},
    {"isolation": "tenant", "tenants": "*:weight=1", "scrub_private_blocks": True},
    {"kv_offloading_size": 1.0},
    {"speculative_config": "eagle3:3:0.7"},
    {"model": "openai/gpt-oss-20b", "eviction": "slru"},
    {"engine": "nano-vllm"},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_block_log_and_the_replay_are_one_run(rules: dict[str, Any], tmp_path: Path) -> None:
    """Every event is in both, with its step, request and blocks; every step was planned at the same time."""
    trace = read("chat", limit=150)
    trace = replace(trace, requests=trace.requests.assign(tenant=["ab"[i % 3 == 0] for i in range(150)]))
    scenario = Scenario(**{"num_gpu_blocks": 900, "costs": "roofline", **rules})
    result = replay(trace, scenario, kept=Kept(folder=tmp_path / "run", comparisons=False))
    log = record(trace, scenario)
    events = pd.read_parquet(tmp_path / "run" / "events.parquet")
    assert list(_events(log)) == list(events[["step", "kind", "request", "blocks"]].itertuples(False, None))
    assert log.time_s is not None
    steps = result.steps
    begun = np.isin(log.step, steps["step"])
    start_s = steps.set_index("step")["start_ns"][log.step[begun]].to_numpy() / 1e9
    assert begun.any() and np.array_equal(log.time_s[begun], start_s)


def _events(log: BlockLog) -> Iterator[tuple[int, str, str, str]]:
    """The log's events as a replay writes them, without its own kind."""
    names = {code: kind for kind, code in CODES.items()}
    for index in range(len(log)):
        if log.kind[index] == WITHDRAWN:
            continue
        kind: EventKind = names[int(log.kind[index])]
        request = int(log.request[index])
        blocks = run_length(tuple(log.of(index).tolist()))
        yield int(log.step[index]), kind.value, "" if request == NOBODY else str(request), blocks
