"""Traces for Perfetto: what the Trace Event Format asks for, and times that are the replay's own."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.planner_app.reports.charts import kv_over_time
from pagecast.planner_app.reports.perfetto import REPLICA, REQUESTS, events, write_perfetto
from pagecast.planner_app.reports.style import caption_of
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import scale
from pagecast.traces.read import read

CHAT = read("chat", limit=120)


def tight(speedup: float = 30.0, **fields: object):
    """A replay with a queue and preemptions."""
    return replay(scale(CHAT, speedup), Scenario.make({"max_num_seqs": 12, "num_gpu_blocks": 700, **fields}))


@settings(max_examples=8, deadline=None)
@given(
    speedup=st.sampled_from([1.0, 10.0, 100.0]), pipelined=st.booleans(), blocks=st.sampled_from([520, 2000])
)
def test_slices_of_a_track_never_overlap(speedup, pipelined, blocks):
    result = tight(speedup, async_scheduling=pipelined, num_gpu_blocks=blocks)
    tracks = defaultdict(list)
    for event in events(result):
        assert event["ph"] in "XCMi"
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        slices.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(slices))


def test_slices_are_the_replays_steps_and_latencies():
    result = tight()
    made = list(events(result))
    steps = [event for event in made if event["ph"] == "X" and event["pid"] == REPLICA]
    assert sum(event["args"]["steps"] for event in steps) == result.summary["steps"]
    last_us = max(event["ts"] + event["dur"] for event in steps)
    assert last_us == pytest.approx(result.steps["end_ns"].max() / 1000, abs=1e-3)
    spent = defaultdict(float)
    for event in made:
        if event["ph"] == "X" and event["pid"] == REQUESTS:
            spent[event["args"]["request"], event["cat"]] += event["dur"] / 1e6
    table = result.requests
    waits = table["admitted_s"] - table["arrival_s"]
    for row in range(len(table)):
        assert spent[row, "queue"] == pytest.approx(waits[row], abs=1e-8)
        assert spent[row, "prefill"] == pytest.approx(table["prefill_s"][row], abs=1e-8)
        assert spent[row, "decode"] == pytest.approx(table["decode_s"][row], abs=1e-8)


@pytest.mark.parametrize("profile", ["vllm", "sglang"])
def test_kv_in_use_is_of_what_sequences_may_hold_of_a_model_with_windows_too(profile):
    scenario = Scenario(model="google/gemma-3-27b-it", engine=profile, costs="roofline", num_gpu_blocks=8000)
    result = replay(scale(CHAT, 30.0), scenario)
    counters = [event for event in events(result) if event["ph"] == "C" and event["name"].startswith("KV")]
    used = max(event["args"]["used"] for event in counters)
    assert used == pytest.approx(100 * result.summary["peak_kv_usage"], abs=0.001)
    title = caption_of(kv_over_time(result.steps, result.pool_blocks))
    assert title.startswith(f"At its peak {used:.0f}%")


def test_counters_follow_the_batch_and_end_at_nothing():
    result = tight()
    counters = [event for event in events(result) if event["ph"] == "C"]
    running = [event["args"]["running"] for event in counters if event["name"] == "requests"]
    assert max(running) == result.steps["running"].max() == 12
    assert running[-1] == 0
    used = [event["args"]["used"] for event in counters if event["name"].startswith("KV")]
    assert max(used) == pytest.approx(100 * result.summary["peak_kv_usage"], abs=0.001)


def test_no_more_slots_than_requests_at_once():
    result = tight()
    slots = {event["tid"] for event in events(result) if event["pid"] == REQUESTS and event["ph"] == "X"}
    come, gone = result.requests["arrival_s"], result.requests["finished_s"]
    times = sorted([(time, 1) for time in come] + [(time, -1) for time in gone])
    most = now = 0
    for _, change in times:
        now += change
        most = max(most, now)
    assert slots == set(range(1, most + 1))


def test_rejected_requests_are_marks_with_their_reason():
    result = tight(max_model_len=600)
    marks = [event for event in events(result) if event["ph"] == "i"]
    assert len(marks) == result.summary["rejected"] > 0
    assert all(mark["s"] == "p" and "max_model_len" in mark["name"] for mark in marks)


def test_files_are_json_packed_where_the_name_says_so(tmp_path):
    result = tight()
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    count = write_perfetto(result, plain)
    assert write_perfetto(result, packed) == count
    body = json.loads(plain.read_text())
    assert len(body["traceEvents"]) == count
    assert body["displayTimeUnit"] in ("ms", "ns")
    assert json.loads(gzip.decompress(packed.read_bytes())) == body
    with pytest.raises(BadInput, match="can't be written"):
        write_perfetto(result, tmp_path / "no" / "t.json")
