"""Recordings of what is served: their replay makes the same decisions, and a kill loses a second."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pagecast.planner_app.server.generation import Bell, Generation, Sampling
from pagecast.sim.core.engines.registry import profile
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import replay
from pagecast.sim.runs.engine_rules import rules_of_run
from pagecast.sim.runs.journal import JournalWriter, segments
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.transfers import DISK
from pagecast.sim.runs.validate import compare_decisions
from pagecast.sim.scenario import Scenario

from .conftest import make_replica

SERVED = Path(__file__).parent / "recorded" / "h200-qwen3-0.6b-departures"


def test_a_run_of_the_engine_behind_http_with_departures_is_replayed() -> None:
    run = RecordedRun.load(SERVED)
    report = compare_decisions(run, rules_of_run(run.meta))
    assert report.ok, report.first_mismatch
    assert (report.steps_matched, report.requests) == (1671, 120)
    assert run.requests["cancelled_s"].notna().sum() == 34
    assert (run.requests["cached_tokens"] > 0).sum() == 108


async def converse(backend: Any, seed: int, count: int, until_done: bool = True) -> list[Generation]:
    """Conversations whose turns quote one another, with equal prompts, adapters and clients that leave."""
    rng = np.random.default_rng(seed)
    await backend.start()
    generations: list[Generation] = []
    for number in range(count):
        done = [one for one in generations if one.finish_reason == "length"]
        draw = rng.random()
        if done and draw < 0.4:
            earlier = done[int(rng.integers(len(done)))]
            prompt = [*earlier.prompt, *earlier.tokens, *rng.integers(1 << 20, size=int(rng.integers(40)))]
        elif done and draw < 0.6:
            prompt = [*done[int(rng.integers(len(done)))].prompt]
        else:
            prompt = rng.integers(1 << 20, size=int(rng.integers(1, 300))).tolist()
        generation = Generation(
            number,
            [int(id) for id in prompt][:2000],
            Sampling(max_tokens=int(rng.integers(1, 80)), seed=[None, 1][int(rng.integers(2))]),
            Bell(),
            priority=int(rng.integers(3)),
            adapter=["", "", "sql"][int(rng.integers(3))],
        )
        generations.append(generation)
        backend.submit(generation)
        if number % 20 == 7:
            backend.cancel(generation)
        elif rng.random() < 0.2:
            asyncio.get_running_loop().call_later(rng.random() * 0.02, backend.cancel, generation)
        await asyncio.sleep(rng.random() * 0.006)
    while until_done and not all(generation.done for generation in generations):
        await asyncio.sleep(0.005)
    return generations


@pytest.mark.parametrize(
    ("seed", "fields"),
    [
        (0, {}),
        (1, {"max_num_seqs": 4, "max_num_batched_tokens": 128}),
        (2, {"num_gpu_blocks": 150, "max_num_batched_tokens": 256}),
        (3, {"num_gpu_blocks": 150, "scheduling_policy": "priority"}),
        (4, {"num_gpu_blocks": 150, "async_scheduling": False}),
        (5, {"num_gpu_blocks": 150, "costs": "roofline", "engine": "nano-vllm"}),
    ],
)
def test_a_recorded_run_makes_the_same_decisions(seed: int, fields: dict[str, Any], tmp_path: Path) -> None:
    replica = make_replica(fields, {"time_scale": 20.0}, record=tmp_path / "run")

    async def serve() -> list[Generation]:
        generations = await converse(replica.backend, seed, 120)
        await replica.backend.stop()
        return generations

    generations = asyncio.run(serve())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *("inputs.jsonl.gz", "meta.json", "requests.csv.gz", "steps.jsonl.gz")
    ]
    run = RecordedRun.load(tmp_path / "run")
    report = compare_decisions(run, profile(run.meta["profile"]))
    assert report.ok, report.first_mismatch
    assert report.requests == 120
    assert run.requests["cached_tokens"].sum() > 1000
    assert run.requests["cancelled_s"].notna().sum() > 3
    assert run.requests["tokens_out"].tolist() == [generation.count for generation in generations]
    # The arrivals replayed with the same costs take as long.
    again = replay(run.trace(), Scenario(**{"num_gpu_blocks": 4000, **fields})).requests
    served = run.requests["finish_s"].notna()
    for ours, theirs in (("first_token_s", "first_token_s"), ("finished_s", "finish_s")):
        means = [
            (table[name] - table["arrival_s"])[served].mean()
            for table, name in ((again, ours), (run.requests, theirs))
        ]
        # At 20 times the speed a millisecond of simulated time is 50 us of the wall clock, which sleeping
        # tasks can't keep to; 2% of a short TTFT would be finer still.
        assert means[0] == pytest.approx(means[1], rel=0.02, abs=1e-3), ours


RARELY_MISSED = pytest.mark.xfail(
    strict=False,
    reason="3 of 170 runs on a busy machine: a request finds blocks in the host, its replay does not",
)
OLD = {
    "engine": "vllm@0.24"
}  # with newer rules a few steps differ where requests speculate (docs/serving.md)


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_offloading_size": 4.0},
        {"kv_offloading_size": 0.5, "async_scheduling": False, "kv_offloading_eviction_policy": "arc"},
        {"kv_offloading_size": 4.0, "failing_transfers": 0.2},
        {"kv_offloading_size": 0.25, "secondary_tiers": "fs"},
        {"kv_offloading_size": 0.25, "secondary_tiers": "fs", "async_scheduling": False},
        pytest.param(
            {"kv_offloading_size": 0.25, "secondary_tiers": "fs", "failing_transfers": 0.3},
            marks=RARELY_MISSED,
        ),
        {**OLD, "kv_offloading_size": 0.25, "secondary_tiers": "fs", "speculative_config": "eagle:3:0.7"},
        {**OLD, "speculative_config": "eagle:3:0.7"},
        {
            **OLD,
            "speculative_config": "ngram:3:0.5",
            "async_scheduling": False,
            "kv_offloading_size": 4.0,
        },
    ],
)
def test_a_recorded_run_with_a_host_tier_and_drafts_makes_the_same_decisions(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    replica = make_replica(
        {"num_gpu_blocks": 150, "max_num_seqs": 16, **fields}, {"time_scale": 20.0}, record=tmp_path / "run"
    )

    async def serve() -> list[Generation]:
        generations = await converse(replica.backend, 7, 120)
        await replica.backend.stop()
        return generations

    generations = asyncio.run(serve())
    run = RecordedRun.load(tmp_path / "run")
    report = compare_decisions(run, rules_of_run(run.meta))
    assert report.ok, report.first_mismatch
    assert run.requests["tokens_out"].tolist() == [generation.count for generation in generations]
    if "kv_offloading_size" in fields:
        assert run.transfers
        use = replica.backend.host_tier()
        assert use.store_bytes > 0
    if "secondary_tiers" in fields:
        on_disk = [transfer for transfer in run.transfers if transfer.kind == DISK]
        assert any(transfer.lost for transfer in on_disk) == ("failing_transfers" in fields)
        assert replica.backend.scheduler.offloading.disk.promoted_blocks > 0
    if "speculative_config" in fields:
        drafts = replica.backend.speculation()
        assert 0 < drafts.accepted_tokens < drafts.draft_tokens
        assert run.requests["tokens_out"].sum() > len(run.steps)


def test_a_run_that_goes_on_is_read_as_far_as_it_went(tmp_path: Path) -> None:
    replica = make_replica({"num_gpu_blocks": 150}, record=tmp_path / "run", record_segment_bytes=2000)

    async def serve() -> RecordedRun:
        await converse(replica.backend, 3, 60, until_done=False)
        replica.backend.history.flush()
        run = RecordedRun.load(tmp_path / "run")
        await replica.backend.stop()
        return run

    run = asyncio.run(serve())
    report = compare_decisions(run, rules_of_run(run.meta))
    assert report.ok, report.first_mismatch
    assert run.requests["finish_s"].isna().sum() > 0
    again = RecordedRun.load(tmp_path / "run")
    assert compare_decisions(again, rules_of_run(again.meta)).ok


def test_a_journal_is_rotated_and_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    meta = {"usable_blocks": 10, "config": {"block_size": 16}}
    writer = JournalWriter(tmp_path / "run", meta, segment_bytes=300)
    for i in range(20):
        writer.add(["s", i * 1000, i * 1000 + 1, 5, 2, 0, "", "", [], i])
        writer.add(["t", i * 1000 + 2, i * 1000 + 500, 0, 0, 0, 1, 0, 1, [[5, 0]], [[i, 0]]])
        writer.flush()
    deadline = time.monotonic() + 5
    while len(list((tmp_path / "run").glob("*.gz"))) < 9 and time.monotonic() < deadline:
        time.sleep(0.01)
    last = segments(tmp_path / "run")[-1]
    with last.open("a") as out:
        out.write('["t", 99999')
    assert len(RecordedRun.load(tmp_path / "run").steps) == 20
    with pytest.raises(BadInput, match="is not empty"):
        JournalWriter(tmp_path / "run", meta)


def test_a_killed_server_leaves_a_run_that_lacks_less_than_a_second(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--simulate", "--gpu", "H200", "--port", "0", "--record", str(folder)]
    command = [sys.executable, "-m", "pagecast", "serve", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        body = {"prompt": "x " * 50, "max_tokens": 1000, "stream": True}
        started = time.monotonic()
        with httpx.Client() as http, http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            for _ in answer.iter_lines():
                if time.monotonic() - started > 1.5:
                    break
            process.send_signal(signal.SIGKILL)
            lasted = time.monotonic() - started
        process.wait(10)
    finally:
        process.kill()
    run = RecordedRun.load(folder)
    assert compare_decisions(run, rules_of_run(run.meta)).ok
    seconds = float(run.steps.end_ns[-1] - run.steps.start_ns[0]) / 1e9
    assert lasted - 1 < seconds <= lasted
    assert len(run.requests) == 1 and np.isnan(run.requests["finish_s"][0])


def test_a_journal_that_cannot_be_read_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(json.dumps({"usable_blocks": 10, "config": {"block_size": 16}}))
    with gzip.open(tmp_path / "journal-000001.jsonl.gz", "wt") as out:
        out.write('["s", 1]\n["x", 2]\n')
    with pytest.raises(BadInput, match=r"journal-000001.jsonl.gz line 2: can't be read"):
        RecordedRun.load(tmp_path)
