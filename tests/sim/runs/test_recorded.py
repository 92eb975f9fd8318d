"""Recorded runs: what is read is what was written, and what is wrong is said in one line."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.traces.read import read

OWN = Path(__file__).parents[2] / "engine" / "recorded"

STEP = {
    "start_s": 0.0,
    "sched_s": 0.0001,
    "end_s": 0.01,
    "decode_n": 0,
    "decode_ctx": 0,
    "decode_max": 0,
    "prefill": [[40, 0]],
    "running": 1,
    "waiting": 0,
    "kv_usage": 0.01,
}
AT_END = {"start_s": 0.011, "end_s": 0.016}
DECODE = {**STEP, **AT_END, "decode_n": 1, "decode_ctx": 40, "decode_max": 40, "prefill": []}
HEADER = (
    "index,arrival_s,submitted_s,input_tokens,output_tokens,first_token_s,finish_s,cached_tokens,tokens_out"
)
INPUT = {"arrival_s": 0.0, "input_tokens": 40, "output_tokens": 2}
ROW = "0,0.0,0.000001,40,2,0.01,0.016,0,2"


def lay(folder: Path, steps=(STEP, DECODE), rows=(ROW,), inputs=None, meta=None) -> Path:
    """Writes a run of one request, with the parts given instead of the sound ones."""
    folder.mkdir(exist_ok=True)
    inputs = inputs or [INPUT]
    (folder / "meta.json").write_text(json.dumps(meta or {"name": "one", "usable_blocks": 10}))
    for name, lines in (("steps", steps), ("inputs", inputs)):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt") as out:
            out.write("".join(json.dumps(line) + "\n" for line in lines))
    with gzip.open(folder / "requests.csv.gz", "wt") as out:
        out.write("\n".join([HEADER, *rows]) + "\n")
    return folder


def test_steps_become_columns_and_batches(tmp_path):
    run = RecordedRun.load(lay(tmp_path / "run"))
    assert run.steps.start_ns.tolist() == [0, 11_000_000]
    assert run.steps.batch(0) == Batch(0, 0, 0, ((40, 0),))
    assert run.steps.batch(1) == Batch(1, 40, 40, (), after=40)
    assert run.pipeline_depth == 0


def test_prompts_that_share_blocks_become_spans_cut_to_their_length(tmp_path):
    inputs = [
        {
            "arrival_s": 0.0,
            "input_tokens": 40,
            "output_tokens": 2,
            "block_ids": [7, 3, 9],
            "block_ids_tokens": 16,
            "priority": 2,
        }
    ]
    trace = RecordedRun.load(lay(tmp_path / "run", inputs=inputs)).trace()
    assert trace.spans.row(0) == [(7, 0, 16), (3, 0, 16), (9, 0, 8)]
    assert trace.requests["priority"].tolist() == [2]


def test_a_trace_arrives_when_clients_sent_it_or_when_the_engine_got_it(tmp_path):
    run = RecordedRun.load(lay(tmp_path / "run"))
    assert run.trace("arrival").requests["arrival_s"].tolist() == [0.0]
    assert run.trace("submitted").requests["arrival_s"].tolist() == [0.000001]
    with pytest.raises(BadInput, match="arrival must be"):
        run.trace("finished")


def test_written_and_read_again_a_run_is_the_same(tmp_path):
    inputs = [{"arrival_s": 0.0, "input_tokens": 40, "output_tokens": 2, "spans": [[5, 3, 30], [6, 0, 10]]}]
    run = RecordedRun.load(lay(tmp_path / "run", inputs=inputs))
    again = RecordedRun.load(run.write(tmp_path / "again"))
    assert again.trace().spans.row(0) == [(5, 3, 30), (6, 0, 10)]
    assert again.steps.start_ns.tolist() == run.steps.start_ns.tolist()
    assert again.requests.equals(run.requests)
    first, second = (tmp_path / "again" / "steps.jsonl.gz").read_bytes(), None
    again.write(tmp_path / "third")
    second = (tmp_path / "third" / "steps.jsonl.gz").read_bytes()
    assert first == second


def test_an_asynchronous_run_may_have_one_step_in_flight_but_not_two(tmp_path):
    meta = {"name": "a", "usable_blocks": 10, "config": {"async_scheduling": True}}
    early = {**DECODE, "start_s": 0.005}
    assert RecordedRun.load(lay(tmp_path / "run", steps=(STEP, early), meta=meta)).pipeline_depth == 1
    third = {**DECODE, "start_s": 0.006, "end_s": 0.02}
    with pytest.raises(BadInput, match=r"line 3: overlaps the step 2 before it"):
        RecordedRun.load(lay(tmp_path / "run", steps=(STEP, early, third), meta=meta))


NOTHING = {"prefill": [], "running": 0, "waiting": 1, "kv_usage": 0.0}
IDLE = {**STEP, "start_s": 0.0101, "end_s": 0.0101, **NOTHING}


def test_plans_that_computed_nothing_stand_apart_from_the_steps_and_survive_writing(tmp_path):
    run = RecordedRun.load(lay(tmp_path / "run", steps=(STEP, IDLE, DECODE)))
    assert run.steps.start_ns.tolist() == [0, 11_000_000]
    assert run.steps.prefill(0) == ((40, 0),)
    assert run.idle.start_ns.tolist() == [10_100_000]
    assert run.idle.waiting.tolist() == [1]
    again = RecordedRun.load(run.write(tmp_path / "again"))
    assert again.idle.start_ns.tolist() == run.idle.start_ns.tolist()
    assert again.steps.end_ns.tolist() == run.steps.end_ns.tolist()
    assert RecordedRun.load(lay(tmp_path / "plain")).idle is None


def test_whole_numbers_that_only_some_requests_have_are_filled_in(tmp_path):
    second = {**INPUT, "output_content": 7, "priority": 3}
    rows = (ROW, "1,0.0,0.000001,40,2,0.01,0.016,0,2")
    table = RecordedRun.load(lay(tmp_path / "run", inputs=[INPUT, second], rows=rows)).inputs
    assert table["output_content"].tolist() == [-1, 7]
    assert table["priority"].tolist() == [0, 3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": (STEP, {**DECODE, "start_s": 0.005})}, r"line 2: overlaps the step 1 before it"),
        ({"steps": (STEP, {**DECODE, "end_s": float("nan")})}, r"line 2: 'end_s' is nan"),
        ({"steps": ({**STEP, "end_s": -0.5, "start_s": 0.0},)}, r"line 1: negative duration"),
        ({"steps": ({**STEP, "sched_s": -1e-5},)}, r"line 1: negative duration: 'sched_s'"),
        ({"steps": ({k: v for k, v in STEP.items() if k != "running"},)}, r"line 1: no 'running'"),
        ({"steps": ({**STEP, "prefill": [[40]]},)}, r"line 1: 'prefill' must be a list of"),
        ({"steps": ({**STEP, "prefill": []},)}, r"no step computes anything"),
        ({"steps": ({**STEP, "decode_ctx": 3},)}, r"line 1: 'decode_ctx' is 3, but nothing decodes"),
        ({"steps": ()}, r"holds no steps"),
        ({"rows": ("0,0.0,0.000001,40",)}, r"line 2: columns are short: 4 of 9"),
        ({"rows": ()}, r"columns are short: 1 lines in inputs.jsonl.gz, 0 rows"),
        ({"rows": ("0,0.0,nan,40,2,0.01,0.016,0,2",)}, r"line 2: 'submitted_s' is 'nan'"),
        ({"rows": ("0,0.0,0.0,41,2,0.01,0.016,0,2",)}, r"line 2: 'input_tokens' differs"),
        ({"inputs": [{"arrival_s": 0, "input_tokens": 0}]}, r"line 1: 'input_tokens' is 0"),
        ({"steps": ({**STEP, "kv_usage": -3},)}, r"line 1: 'kv_usage' is -3, must be a share"),
        ({"steps": ({**STEP, "sched_s": True},)}, r"line 1: 'sched_s' is True, must be a finite number"),
        ({"rows": ("0,0.5,0.0,40,2,0.51,0.516,0,2",)}, r"line 2: negative duration: 'submitted_s' is before"),
        ({"rows": ("7,0.0,0.0,40,2,0.01,0.016,0,2",)}, r"line 2: 'index' must number the rows from 0"),
        ({"rows": ("0,0.0,0.0,40,2,,0.016,0,2",)}, r"line 2: 'first_token_s' is empty, but the request fin"),
        ({"inputs": [{**INPUT, "priority": "x"}]}, r"inputs.* line 1: 'priority' is 'x', must be a whole"),
        ({"inputs": [{**INPUT, "session": 5}]}, r"line 1: 'session' is 5, must be a text"),
        ({"inputs": [{**INPUT, "input_tokens": 40.5}]}, r"line 1: 'input_tokens' is 40\.5, must be a whole"),
        ({"inputs": [{**INPUT, "spans": [[1, 2]]}]}, r"line 1: 'spans' must be a list of \[content, offset"),
        ({"inputs": [{**INPUT, "block_ids": ["a"]}]}, r"line 1: 'block_ids' must be a list of whole numbers"),
        ({"meta": {"format": 9}}, r"run format 9, this pagecast reads 1"),
        ({"meta": {"config": 5}}, r"meta\.json: 'config' is 5, must be an object"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, change, words):
    with pytest.raises(BadInput, match=words) as caught:
        RecordedRun.load(lay(tmp_path / "run", **change))
    assert "\n" not in str(caught.value)


def test_a_truncated_file_and_a_missing_one_are_named(tmp_path):
    folder = lay(tmp_path / "run")
    whole = (folder / "steps.jsonl.gz").read_bytes()
    (folder / "steps.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(BadInput, match=r"steps\.jsonl\.gz line \d+: cannot be read"):
        RecordedRun.load(folder)
    (folder / "steps.jsonl.gz").unlink()
    with pytest.raises(BadInput, match=r"steps\.jsonl\.gz: missing"):
        RecordedRun.load(folder)
    with pytest.raises(BadInput, match=r"no meta\.json"):
        RecordedRun.load(tmp_path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"index", "Not a gzipped file"),
        (gzip.compress(b"\xff\xfe\x00index"), "can't decode byte 0xff"),
        (gzip.compress(f"{HEADER}\n{ROW}\n".encode())[:-12], "ended before the end-of-stream marker"),
    ],
    ids=["not gzip", "not text", "cut off"],
)
def test_a_request_table_that_is_no_text_is_named(tmp_path, body, words):
    folder = lay(tmp_path / "run")
    (folder / "requests.csv.gz").write_bytes(body)
    with pytest.raises(BadInput, match=r"requests\.csv\.gz line \d+: cannot be read") as caught:
        RecordedRun.load(folder)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_when_a_request_was_cancelled_is_a_time_or_empty(tmp_path):
    folder = lay(tmp_path / "run")

    def cancelled(when: str) -> RecordedRun:
        with gzip.open(folder / "requests.csv.gz", "wt") as out:
            out.write(f"{HEADER},cancelled_s\n{ROW},{when}\n")
        return RecordedRun.load(folder)

    assert np.isnan(cancelled("").requests["cancelled_s"][0])
    assert cancelled("0.012").trace().requests["cancel_after_s"].tolist() == [0.012]
    with pytest.raises(BadInput, match="line 2: 'cancelled_s' is 'soon', must be a number"):
        cancelled("soon")
    with pytest.raises(BadInput, match="line 2: negative duration: 'cancelled_s' is before 'submitted_s'"):
        cancelled("0.0")


def test_a_long_answer_fits_its_field(tmp_path):
    folder = lay(tmp_path / "run")
    with gzip.open(folder / "requests.csv.gz", "wt") as out:
        out.write(f"{HEADER},output_ids\n{ROW},{'123456 ' * 40_000}\n")
    assert len(RecordedRun.load(folder).requests["output_ids"][0]) == 280_000


@pytest.mark.parametrize(
    "name", ["azure_priority_tight", "azure_conv_async", pytest.param("*", marks=pytest.mark.slow)]
)
def test_a_shared_run_can_be_read_and_survives_writing(name, shared, tmp_path):
    found = sorted((shared / "groundtruth").glob(f"*/{name}/meta.json"))
    assert found
    for meta in found:
        run = RecordedRun.load(meta.parent)
        again = RecordedRun.load(run.write(tmp_path / meta.parent.name))
        assert np.array_equal(again.steps.end_ns, run.steps.end_ns)
        assert np.array_equal(again.steps.kv_usage, run.steps.kv_usage)
        assert len(again.requests) == len(run.requests)


def test_a_run_is_read_as_the_trace_that_was_recorded():
    """Its turns follow the turns before, and its block ids, spans and outputs name the same texts."""
    folder = OWN / "h200b-qwen3-8b-chat-async"
    trace, run = read(folder), RecordedRun.load(folder)
    assert [trace.spans.row(i) for i in range(len(trace))] == [run.spans.row(i) for i in range(len(trace))]
    follows = trace.requests["after"] >= 0
    assert follows.sum() == 167 and trace.requests["arrival_s"].isna().equals(follows)
