"""The file of KV events that a replay writes: an index that follows it knows what can be found."""

import json
from collections import Counter
from pathlib import Path

import pandas as pd
from pagecast.sim.replay.result import Kept
from pagecast.sim.replay.simulation import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read


def test_an_index_that_follows_the_events_ends_with_what_the_pool_can_find(tmp_path: Path) -> None:
    trace = read("chat", limit=150)
    result = replay(trace, Scenario(num_gpu_blocks=1200), kept=Kept(folder=tmp_path / "out", kv_events=True))
    lines = (tmp_path / "out" / "kv_events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    findable: Counter[str] = Counter()
    removed = 0
    for event in events:
        sign = 1 if event["type"] == "BlockStored" else -1
        for name in event["block_hashes"]:
            findable[name] += sign
            assert findable[name] >= 0
        removed += len(event["block_hashes"]) if sign < 0 else 0
    assert removed == result.summary["evicted_blocks"] > 0
    assert sum(findable.values()) <= 1200
    steps = [event["step"] for event in events]
    assert steps == sorted(steps)
    rows = pd.read_parquet(tmp_path / "out" / "steps.parquet")
    assert steps[-1] < (rows["step"] + rows["steps"]).max()
    chained = [event for event in events if "parent_block_hash" in event]
    assert all(event["parent_block_hash"] in findable for event in chained)


def test_without_the_option_there_is_no_such_file(tmp_path: Path) -> None:
    trace = read("chat", limit=2)
    replay(trace, Scenario(num_gpu_blocks=1200), kept=Kept(folder=tmp_path / "out"))
    assert not (tmp_path / "out" / "kv_events.jsonl").exists()
