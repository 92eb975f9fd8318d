"""Promises of a replay: exact fast-forward, an end for every request, figures that add up."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagecast.planner_app.wording.note_sentences import sentences
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.decode_line import DecodeLine
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay import Kept, replay
from pagecast.sim.replay.rejections import at_any_load
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.schema import Spans, Trace


class Plain:
    """Round costs, so that expected times can be worked out by hand: a step takes 10 ms and 1 ms of host."""

    name = "plain"

    def __init__(self, decode_ns=10_000_000, per_ctx=0, host=1_000_000, arrival=0):
        self.decode, self.per_ctx, self.host, self.arrival = decode_ns, per_ctx, host, arrival

    def device_ns(self, batch):
        return self.decode + 1000 * sum(tokens for tokens, _ in batch.prefill)

    def launch_ns(self, batch):
        return 0

    def decode_line(self, n):
        return DecodeLine(n, self.decode * 10**6, self.per_ctx * 10**6, 0)

    def host_ns(self, requests):
        return self.host

    def warm_ns(self, after):
        return 300 * after if self.per_ctx else 0

    def shared_ns(self, tokens, requests):
        return tokens * self.per_ctx // 2

    def arrival_ns(self, tokens):
        return self.arrival

    def expected_error(self):
        return "none: made up"

    def outside(self, *largest):
        return None


def trace_of(rows, spans=None):
    table = pd.DataFrame(rows)
    packed = None
    if spans is not None:
        flat = [piece for row in spans for piece in row]
        start = np.cumsum([0, *(len(row) for row in spans)])
        packed = Spans(start, *(np.array([piece[i] for piece in flat], np.int64) for i in range(3)))
    return Trace("made", table, packed)


def small(**fields):
    return Scenario(**{"num_gpu_blocks": 100, "async_scheduling": False, **fields})


# ---- times by hand


@pytest.mark.parametrize(
    ("launch_ms", "ahead", "firsts_s"),
    [
        (30, False, (0.031, 0.084)),  # a step of 1 + 30 ms, decode steps of 11 ms, and 1 + 30 ms again
        (5, False, (0.01101, 0.06602)),  # the device takes longer
        (30, True, (0.032, 0.084)),  # launched from 53 to 83 ms, then 1 ms for the next plan
        (5, True, (0.01101, 0.07102)),  # launched while the device computes up to 61.01 ms
    ],
)
def test_launches_bound_a_step_with_prompts_and_hide_behind_the_step_before(launch_ms, ahead, firsts_s):
    early = {"arrival_s": 0.0, "input_tokens": 10, "output_tokens": 12}
    late = {"arrival_s": 0.045, "input_tokens": 10, "output_tokens": 1}
    costs = Plain()
    costs.launch_ns = lambda batch: launch_ms * 1_000_000
    table = replay(trace_of([early, late]), small(async_scheduling=ahead), costs=costs).requests
    assert table["first_token_s"].tolist() == pytest.approx(firsts_s, abs=1e-9)


def test_one_request_alone_takes_what_its_steps_take():
    trace = trace_of([{"arrival_s": 1.0, "input_tokens": 100, "output_tokens": 5}])
    result = replay(trace, small(), costs=Plain())
    row = result.requests.iloc[0]
    assert row.ttft_s == pytest.approx(0.0111, abs=1e-9)  # host 1 ms + 10 ms + 100 tokens of 1 us
    assert row.e2e_s == pytest.approx(0.0111 + 4 * 0.011, abs=1e-9)
    assert row.tpot_s == pytest.approx(0.011, abs=1e-9)
    assert result.summary["steps"] == 5
    assert result.summary["makespan_s"] == pytest.approx(row.e2e_s)


def test_pipelining_hides_the_host():
    trace = trace_of([{"arrival_s": 0.0, "input_tokens": 100, "output_tokens": 101}])
    apart = replay(trace, small(), costs=Plain(host=4_000_000)).requests.iloc[0]
    hidden = replay(trace, small(async_scheduling=True), costs=Plain(host=4_000_000)).requests.iloc[0]
    assert apart.tpot_s == pytest.approx(0.014)
    assert hidden.tpot_s == pytest.approx(0.010)


def test_an_arrival_joins_the_first_step_planned_after_it():
    rows = [
        {"arrival_s": 0.0, "input_tokens": 10, "output_tokens": 50},
        {"arrival_s": 0.1, "input_tokens": 10, "output_tokens": 2},
    ]
    late = replay(trace_of(rows), small(), costs=Plain()).requests.iloc[1]
    # Steps begin at 0, 11.01 ms, 22.01 ms ... : the tenth begins at 99.01, the next at 110.01 ms.
    assert late.admitted_s == pytest.approx(0.11001, abs=1e-9)


def test_a_follower_comes_a_think_time_after_the_end():
    rows = [
        {"arrival_s": 0.0, "input_tokens": 10, "output_tokens": 3, "after": -1, "gap_s": 0.0},
        {"arrival_s": np.nan, "input_tokens": 10, "output_tokens": 3, "after": 0, "gap_s": 2.5},
    ]
    table = replay(trace_of(rows), small(), costs=Plain()).requests
    assert table.arrival_s[1] == pytest.approx(table.finished_s[0] + 2.5)


def test_a_later_turn_reuses_prompt_and_answer():
    rows = [
        {"arrival_s": 0.0, "input_tokens": 160, "output_tokens": 33, "output_content": 5},
        {"arrival_s": 9.0, "input_tokens": 240, "output_tokens": 5, "output_content": -1},
    ]
    spans = [[(1, 0, 160)], [(1, 0, 160), (5, 0, 32), (2, 0, 48)]]
    table = replay(trace_of(rows, spans), small(), costs=Plain()).requests
    assert table.cached_tokens.tolist() == [0, 192]


def test_a_client_that_gives_up_frees_its_blocks():
    rows = [
        {"arrival_s": 0.0, "input_tokens": 800, "output_tokens": 700, "cancel_after_s": 1.0},
        {"arrival_s": 0.1, "input_tokens": 1000, "output_tokens": 20, "cancel_after_s": np.nan},
    ]
    result = replay(trace_of(rows), small(), costs=Plain(), check_every=1)
    assert result.requests.state.tolist() == ["cancelled", "completed"]
    assert result.requests.finished_s[0] == pytest.approx(1.0, abs=0.012)
    # The first token after 11.8 ms, then one every 11 ms; the step under way at 1 s still counts.
    assert result.requests.output_tokens[0] == 91
    assert result.summary["output_tokens"] == 91 + 20
    assert result.requests.admitted_s[1] >= 1.0


def test_tokens_are_summed_over_all_requests_but_rejected_ones():
    """A fleet's summary counts the same, over replicas of different kinds."""
    rows = {"arrival_s": 0.0, "input_tokens": [100, 200, 10_000], "output_tokens": [4, 500, 4]}
    trace = trace_of({**rows, "cancel_after_s": [np.nan, 0.1, np.nan]})
    scenario = Scenario(num_gpu_blocks=100)
    groups = [{"name": "a"}, {"name": "b", "scenario": {"max_num_seqs": 8}}]
    fleet = replay_fleet(trace, scenario, FleetSettings.make({"groups": groups}))
    for result in (replay(trace, scenario), fleet):
        s, table = result.summary, result.requests
        assert (s["completed"], s["cancelled"], s["rejected"]) == (1, 1, 1)
        assert s["input_tokens"] == 300
        assert s["output_tokens"] == table["output_tokens"][:2].sum() > 4


def test_what_never_fits_is_rejected_with_its_reason():
    rows = [
        {"arrival_s": 0.0, "input_tokens": 1700, "output_tokens": 5},
        {"arrival_s": 0.0, "input_tokens": 100, "output_tokens": 5},
    ]
    result = replay(trace_of(rows), small(), costs=Plain())
    assert result.requests.state.tolist() == ["rejected", "completed"]
    assert "107 blocks" in result.requests.reason[0]
    assert "the pool has 100" in result.requests.reason[0]
    kind = "needs more than the pool's 100 blocks of 16 tokens"
    assert result.summary["rejected_reasons"] == {kind: 1}
    limited = replay(trace_of(rows), small(max_model_len=104), costs=Plain()).requests
    assert "max_model_len 104" in limited.reason[1]


# ---- fast-forward

REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "arrival_s": st.floats(0, 3, width=32),
            "input_tokens": st.integers(1, 260),
            "output_tokens": st.integers(1, 90),
            "priority": st.integers(0, 2),
            "text": st.integers(0, 3),
            "cancel_after_s": st.sampled_from([np.nan, np.nan, np.nan, 0.3]),
        }
    ),
    min_size=1,
    max_size=24,
)
SCENARIOS = st.fixed_dictionaries(
    {
        "num_gpu_blocks": st.integers(12, 60),
        "block_size": st.sampled_from([4, 8, 16]),
        "max_num_seqs": st.sampled_from([2, 5, 32]),
        "max_num_batched_tokens": st.sampled_from([32, 64, 2048]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "async_scheduling": st.booleans(),
        "enable_prefix_caching": st.booleans(),
    }
)


COSTS = st.tuples(st.sampled_from([0, 7_000, 900_000]), st.sampled_from([0, 250_000, 40_000_000]))


@pytest.mark.parametrize("profile", ["vllm", "nano-vllm"])
@given(REQUESTS, SCENARIOS, COSTS)
@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))
def test_fast_forward_changes_nothing(tmp_path_factory, profile, rows, fields, costs):
    """Every time and every event is the same, to the bit, whether steps are skipped or not."""
    compare_with_every_step(tmp_path_factory, profile, rows, fields, *costs)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["vllm", "nano-vllm"])
@given(REQUESTS, SCENARIOS, COSTS)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_fast_forward_changes_nothing_in_many_replays(tmp_path_factory, profile, rows, fields, costs):
    compare_with_every_step(tmp_path_factory, profile, rows, fields, *costs)


WINDOWED = st.fixed_dictionaries(
    {
        "model": st.just("openai/gpt-oss-20b"),
        "num_gpu_blocks": st.integers(60, 200),
        "block_size": st.just(16),
        "max_num_seqs": st.sampled_from([8, 32]),
        "max_num_batched_tokens": st.sampled_from([64, 256, 2048]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "async_scheduling": st.booleans(),
        "enable_prefix_caching": st.booleans(),
        "eviction": st.sampled_from(["lru", "slru"]),
        "kv_offloading_size": st.sampled_from([None, None, 0.01]),
    }
)
LONG_REQUESTS = REQUESTS.map(
    lambda rows: [{**row, "output_tokens": 3 * row["output_tokens"]} for row in rows for _ in range(2)]
)


@given(LONG_REQUESTS, WINDOWED)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_decisions_with_windows_do_not_depend_on_fast_forward(rows, fields):
    """Blocks that leave windows may make room for who waits: the same steps ask for it."""
    rows = sorted(rows, key=lambda row: row["arrival_s"])
    spans = [[(row["text"], 0, row["input_tokens"])] for row in rows]
    trace = trace_of([{k: v for k, v in row.items() if k != "text"} for row in rows], spans)
    fast, slow = (
        replay(trace, Scenario(**fields), costs=Plain(), kept=Kept(steps=False), fast_forward=each)
        for each in (True, False)
    )
    pd.testing.assert_frame_equal(fast.requests, slow.requests, check_exact=True)
    for key in ("steps", "evicted_blocks", "preemptions", "failed_allocations"):
        assert fast.summary[key] == slow.summary[key]


def test_steps_as_long_as_the_host_needs_end_at_the_same_time_without_fast_forward():
    """Their times are rounded: some are a nanosecond shorter than the host's."""

    class Rounded(Plain):
        def decode_line(self, n):
            return DecodeLine(n, 3_000_016_500_000, 7, 31)

    trace = trace_of([{"arrival_s": 0.0, "input_tokens": 200, "output_tokens": 126}])
    scenario = Scenario(num_gpu_blocks=93, costs="roofline")
    costs = Rounded(host=3_000_017)
    fast, slow = (replay(trace, scenario, costs=costs, fast_forward=each) for each in (True, False))
    pd.testing.assert_frame_equal(fast.requests, slow.requests, check_exact=True)


def test_blocks_beyond_the_cap_of_a_prefix_are_evicted_alone_however_many_are_taken_at_once():
    lengths = [310, 87, 1, 225, 73]
    table = {
        "arrival_s": [0, 0.3, 0.56, 1.1, 1.4],
        "input_tokens": lengths,
        "output_tokens": [1, 151, 69, 1, 1],
        "salt": ["x", "y", "y", None, "x"],
    }
    spans = [[(0, 0, 74), (50, 0, 236)], *[[(0, 0, length)] for length in lengths[1:]]]
    scenario = Scenario(
        model="Qwen/Qwen3-0.6B", costs="roofline", block_size=4, num_gpu_blocks=150, eviction="cost"
    )
    trace, costs = trace_of(table, spans), Plain(3_000_017, host=0)
    fast, slow = (replay(trace, scenario, costs=costs, fast_forward=each) for each in (True, False))
    pd.testing.assert_frame_equal(fast.requests, slow.requests, check_exact=True)
    assert fast.summary["evicted_blocks"] == slow.summary["evicted_blocks"] > 0


def test_failed_allocations_with_windows_do_not_depend_on_fast_forward():
    rows = [
        {"arrival_s": 0.05 * number, "input_tokens": 40 + 37 * number % 300, "output_tokens": 200}
        for number in range(30)
    ]
    scenario = Scenario(model="openai/gpt-oss-20b", num_gpu_blocks=150, async_scheduling=False)
    trace = trace_of(rows)
    fast, slow = (replay(trace, scenario, costs=Plain(), fast_forward=each) for each in (True, False))
    assert fast.summary["failed_allocations"] == slow.summary["failed_allocations"] > 0


def compare_with_every_step(tmp_path_factory, profile, rows, fields, per_ctx, host):
    """Replays requests with steps skipped and step by step, and compares all that comes of it."""
    rows = sorted(rows, key=lambda row: row["arrival_s"])
    spans = [[(row["text"], 0, row["input_tokens"])] for row in rows]
    trace = trace_of([{k: v for k, v in row.items() if k != "text"} for row in rows], spans)
    scenario = Scenario(**{**fields, "engine": profile})
    costs = Plain(decode_ns=3_000_017, per_ctx=per_ctx, host=host, arrival=120_000)
    folders = [tmp_path_factory.mktemp("run") for _ in range(2)]
    fast = replay(trace, scenario, costs=costs, kept=Kept(steps=False))
    slow = replay(
        trace,
        scenario,
        costs=costs,
        kept=Kept(steps=False, folder=folders[1]),
        fast_forward=False,
        check_every=5,
    )
    pd.testing.assert_frame_equal(fast.requests, slow.requests, check_exact=True)
    for key in ("steps", "evicted_blocks", "preemptions", "failed_allocations", "peak_kv_usage"):
        assert fast.summary[key] == slow.summary[key]
    replay(trace, scenario, costs=costs, kept=Kept(folder=folders[0]))
    logs = [pd.read_parquet(folder / "events.parquet") for folder in folders]
    pd.testing.assert_frame_equal(*logs)


def test_a_log_does_not_publish_blocks_before_their_commit(tmp_path):
    """nano-vLLM's rules with plans in flight: what is logged changes no decision."""
    sizes = [(1, 1, 0), (1, 1, 0), (128, 19, 1), (177, 18, 0), (48, 18, 0)]
    rows = [{"arrival_s": 0.0, "input_tokens": size, "output_tokens": out} for size, out, _ in sizes]
    spans = [[(text, 0, size)] for size, _, text in sizes]
    trace = trace_of(rows, spans)
    scenario = small(
        num_gpu_blocks=27,
        max_num_seqs=5,
        max_num_batched_tokens=2048,
        engine="nano-vllm",
        async_scheduling=True,
    )
    plain = replay(trace, scenario, costs=Plain())
    logged = replay(trace, scenario, costs=Plain(), kept=Kept(folder=tmp_path))
    pd.testing.assert_frame_equal(plain.requests, logged.requests, check_exact=True)
    assert plain.summary["failed_allocations"] == logged.summary["failed_allocations"]


# ---- pressure, on public traces


@pytest.mark.parametrize("depth", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("profile", ["vllm", "nano-vllm"])
def test_no_pressure_leaves_a_request_behind(shared, profile, depth):
    """Azure in 1,000 blocks at four times the load, Mooncake in 8,000: all end, and nothing is ever amiss."""
    azure = read(shared / "traces" / "AzureLLMInferenceTrace_conv_2023.csv.zst", limit=3000)
    azure.requests["arrival_s"] /= 4
    mooncake = read(shared / "traces" / "mooncake_conversation_trace.jsonl.zst", limit=500)
    for trace, blocks in ((azure, 1000), (mooncake, 8000)):
        scenario = Scenario(
            num_gpu_blocks=blocks,
            engine=profile,
            async_scheduling=depth,
            block_size=16,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=200_000,
        )
        result = replay(trace, scenario, kept=Kept(steps=False), check_every=1000)
        assert result.summary["completed"] + result.summary["rejected"] == len(trace)
        assert result.summary["preemptions"] > 0
        rejected = result.requests[result.requests.state == "rejected"]
        assert (rejected.get("reason", pd.Series(dtype=str)).str.len() > 0).all()


def test_full_checks_on_every_step_change_nothing(shared):
    trace = read(shared / "traces" / "mooncake_conversation_trace.jsonl.zst", limit=60)
    scenario = Scenario(num_gpu_blocks=8000)
    plain, checked = replay(trace, scenario), replay(trace, scenario, check_every=1)
    pd.testing.assert_frame_equal(plain.requests, checked.requests, check_exact=True)


# ---- what is left behind


def test_a_run_can_be_repeated_from_its_folder(tmp_path):
    first = replay(read("chat", limit=300), Scenario(num_gpu_blocks=2000), kept=Kept(folder=tmp_path))
    again = replay(read(tmp_path / "trace.parquet"), Scenario.load(tmp_path / "scenario.yaml"))
    pd.testing.assert_frame_equal(first.requests, again.requests, check_exact=True)
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert saved["ttft_s"] == first.summary["ttft_s"]
    steps = pd.read_parquet(tmp_path / "steps.parquet")
    assert steps.steps.sum() == first.summary["steps"]
    assert len(steps) < first.summary["steps"]  # fast-forwarded steps share a row
    events = pd.read_parquet(tmp_path / "events.parquet")
    assert (events.kind == "finished").sum() == 300
    assert len(pd.read_parquet(tmp_path / "requests.parquet")) == 300


def test_steps_are_written_once_whether_or_not_they_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("pagecast.sim.replay.recorder._FLUSH_ROWS", 50)
    for keep in (True, False):
        result = replay(
            read("chat", limit=200), Scenario(), kept=Kept(folder=tmp_path / str(keep), steps=keep)
        )
        steps = pd.read_parquet(tmp_path / str(keep) / "steps.parquet")
        assert steps.steps.sum() == result.summary["steps"]
        assert len(result.steps) == (len(steps) if keep else 0)


def test_a_replay_that_fails_leaves_the_folder_as_it_was(tmp_path):
    folder = tmp_path / "run"
    replay(read("chat", limit=20), Scenario(), kept=Kept(folder=folder))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    class Failing(Plain):
        def decode_line(self, n):
            raise BadInput("no such batch")

    with pytest.raises(BadInput):
        replay(read("chat", limit=30), Scenario(), costs=Failing(), kept=Kept(folder=folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_cannot_be_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "run" / "summary.json").mkdir(parents=True)
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "run", ""):
        with pytest.raises(BadInput, match=r"--out"):
            replay(read("chat", limit=5), Scenario(), kept=Kept(folder=out))


def test_windows_of_attention_leave_room_for_more(tmp_path):
    config = {
        "model_type": "mistral",
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 2048,
        "vocab_size": 1000,
        "max_position_embeddings": 100000,
    }
    trace = trace_of([{"arrival_s": 0.0, "input_tokens": 20_000, "output_tokens": 10}] * 6)
    peaks = {}
    for window in (None, 512):
        folder = tmp_path / str(window)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
        scenario = Scenario(model=str(folder), engine="vllm@0.24", num_gpu_blocks=8000, costs="roofline")
        peaks[window] = replay(trace, scenario, check_every=20)
    # A window of 512 tokens and the chunk of 8,192 that a step computes.
    assert peaks[512].summary["peak_kv_usage"] < 0.11 * peaks[None].summary["peak_kv_usage"]
    assert peaks[512].summary["bytes_per_sequence"] < 0.1 * peaks[None].summary["bytes_per_sequence"]
    # An engine that serves plain models only has the blocks that these sequences take in the mean.
    plain = replay(trace, scenario.changed(engine="nano-vllm"))
    assert any(note.code == "sliding_windows" for note in plain.notes)
    assert not any(note.code == "sliding_windows" for note in peaks[512].notes)


def test_a_model_with_recurrent_layers_is_served_without_prefix_caching_and_with_it():
    trace = trace_of([{"arrival_s": 0.0, "input_tokens": 1_000, "output_tokens": 200}] * 4)
    fields = {"model": "Qwen/Qwen3-Next-80B-A3B", "num_gpu_blocks": 40, "costs": "roofline"}
    plain = Scenario(**fields, engine="vllm@0.24")  # before 0.28 vLLM turns it off by itself
    result = replay(trace, plain, check_every=20)
    # Three states and three blocks of 544 tokens each: 24 of 40 blocks.
    assert result.summary["peak_kv_usage"] == 24 / 40
    assert result.summary["completed"] == 4
    with pytest.raises(BadInput, match="turn enable_prefix_caching off"):
        replay(trace, Scenario(**fields, engine="vllm@0.28"))
    rows = [{"arrival_s": 9.0 * i, "input_tokens": 1_200, "output_tokens": 20} for i in range(3)]
    again = trace_of(rows, spans=[[(1, 0, 1_200)]] * 3)
    for engine, tokens in (("vllm@0.33", 2 * 576), ("vllm@0.24", 0)):
        table = replay(again, Scenario(**fields, engine=engine), check_every=5).requests
        assert table["cached_tokens"].tolist() == [0, tokens, tokens]


def test_a_hybrid_model_reuses_prefixes_where_all_its_layers_have_them():
    rows = [{"arrival_s": 9.0 * i, "input_tokens": 3_000, "output_tokens": 50} for i in range(3)]
    spans = [[(1, 0, 3_000)], [(1, 0, 3_000)], [(1, 0, 2_000), (2, 0, 1_000)]]
    cached = {}
    for engine, hybrid in (("vllm@0.24", True), ("vllm@0.24", False), ("vllm@0.33", True)):
        scenario = Scenario(
            engine=engine,
            model="google/gemma-3-27b",
            num_gpu_blocks=4_000,
            costs="roofline",
            disable_hybrid_kv_cache_manager=not hybrid,
        )
        result = replay(trace_of(rows, spans=spans), scenario, check_every=20)
        cached[engine, hybrid] = result.requests["cached_tokens"].tolist()
    # With hybrid groups the whole prompt is found; so is a part of it, as long as its window is cached. Newer
    # versions cache windows at the ends of prompts alone.
    assert cached == {
        ("vllm@0.24", True): [0, 2_992, 2_000],
        ("vllm@0.24", False): [0, 2_992, 2_000],
        ("vllm@0.33", True): [0, 2_992, 0],
    }


def test_what_the_figures_leave_out_is_said():
    trace = trace_of([{"arrival_s": 0.0, "input_tokens": 50_000, "output_tokens": 10}])
    fields = {"num_gpu_blocks": 200_000, "kv_tokens": 5, "max_model_len": 60_000}
    notes = " ".join(sentences(replay(trace, Scenario(**fields)).notes))
    assert "was made for 40,960" in notes
    assert "kv_tokens is not used" in notes
    assert "fewer than the 200,000 given" in notes


def test_what_is_computed_twice_is_counted_once_lost():
    rows = [{"arrival_s": 0.0, "input_tokens": 400, "output_tokens": 500} for _ in range(3)]
    result = replay(trace_of(rows), small(num_gpu_blocks=100), costs=Plain(), check_every=1)
    assert result.summary["preemptions"] > 0
    assert 0 < result.summary["recomputed_tokens"] < result.summary["preemptions"] * 900


def test_latency_parts_add_up():
    table = replay(read("chat", limit=300), Scenario()).requests
    parts = table.queue_s + table.prefix_lookup_s + table.prefill_s + table.decode_s
    np.testing.assert_allclose(parts, table.e2e_s, atol=1e-9)
    assert (table.queue_s >= -1e-9).all()


def test_the_same_replay_gives_the_same_figures():
    runs = [replay(read("rag", limit=200), Scenario()).summary for _ in range(2)]
    for run in runs:
        run.pop("wall_s")
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"num_gpu_blocks": 0}, "num_gpu_blocks is 0"),
        ({"gpu": "H2000"}, "unknown GPU 'H2000'"),
        ({"model": "Qwen/Qwen9"}, "unknown model"),
        ({"engine": "sglung"}, "engine 'sglung'"),
        (
            {"max_num_batched_tokens": 100, "max_num_seqs": 256},
            "max_num_batched_tokens (100) is less than max_num_seqs (256)",
        ),
        ({"tensor_parallel_size": 3}, "3"),
    ],
)
def test_a_scenario_that_cannot_be_is_told_so(fields, words):
    with pytest.raises(BadInput) as caught:
        replay(read("chat", limit=5), Scenario.make(fields))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_checks_know_blocks_that_wait_for_a_step_or_a_load_of_a_model_with_windows():
    model = {"model": "openai/gpt-oss-20b", "costs": "roofline", "kv_offloading_size": 1.0}
    drafts = Scenario(**model, num_gpu_blocks=150, speculative_config="eagle3:5:1")
    short = trace_of([{"arrival_s": 0.0, "input_tokens": 1, "output_tokens": 3}])
    assert replay(short, drafts, costs=Plain(), check_every=1).summary["completed"] == 1
    lengths, leaves = (300, 600, 300, 5), (None, None, 0.3, None)
    rows = [
        {
            "arrival_s": i / 2,
            "input_tokens": length,
            "output_tokens": 40 if i == 3 else 1,
            "cancel_after_s": left,
        }
        for i, (length, left) in enumerate(zip(lengths, leaves, strict=True))
    ]
    trace = trace_of(
        rows, [[(content, 0, length)] for content, length in zip((0, 1, 0, 9), lengths, strict=True)]
    )
    slow_link = Scenario(**model, num_gpu_blocks=80, host_load_gb_per_s=0.001)
    states = replay(trace, slow_link, costs=Plain(), check_every=1).requests["state"]
    assert states.tolist() == ["completed", "completed", "cancelled", "completed"]


def test_a_request_that_is_never_admitted_is_in_the_table_and_the_others_go_on():
    """It misses one token of the 48 of the pool under SGLang's rules without a cache."""
    rows = [
        {"arrival_s": 0.0, "input_tokens": prompt, "output_tokens": output}
        for prompt, output in [(29, 7), (7, 10), (29, 7)]
    ]
    scenario = Scenario(
        engine="sglang",
        costs="roofline",
        block_size=8,
        num_gpu_blocks=6,
        enable_prefix_caching=False,
        ignore_eos=True,
    )
    table = replay(trace_of(rows), scenario, costs=Plain(), check_every=1).requests
    assert table["state"].tolist() == ["rejected", "completed", "rejected"]
    assert table["reason"][0] == table["reason"][2] == "is not admitted by SGLang's rules even alone"
    assert all(at_any_load(reason) for reason in table["reason"][::2])
