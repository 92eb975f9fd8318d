"""Runs that can't be calibrated from: each is answered in one line that names the file and what is wrong."""

import gzip
import json
from pathlib import Path

import pytest
from pagecast.planner_app.cli import run

META = {
    "name": "made",
    "engine": "vllm",
    "engine_version": "1",
    "gpu": "NVIDIA H200",
    "usable_blocks": 1000,
    "model": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "dtype": "bfloat16",
    },
    "config": {"max_num_seqs": 256, "cuda_graphs": "full", "attention": "FlashAttention 3"},
}
HEADER = (
    "index,arrival_s,submitted_s,input_tokens,output_tokens,first_token_s,finish_s,cached_tokens,tokens_out"
)


def sound(count: int = 400) -> list[dict]:
    """Decode steps of 1 to 16 requests, 10 ms each, end to end."""
    return [
        {
            "start_s": i / 100,
            "sched_s": 1e-4,
            "end_s": i / 100 + 0.009,
            "decode_n": 1 + i % 16,
            "decode_ctx": 100 * (1 + i % 16),
            "decode_max": 120 + i % 7,
            "prefill": [],
            "running": 16,
            "waiting": 0,
            "kv_usage": 0.1,
        }
        for i in range(count)
    ]


def lay(folder: Path, steps: list[dict], meta: dict | None = None) -> Path:
    folder.mkdir()
    (folder / "meta.json").write_text(json.dumps(meta or META))
    with gzip.open(folder / "steps.jsonl.gz", "wt") as out:
        out.write("".join(json.dumps(step) + "\n" for step in steps))
    return folder


def calibrated(folder: Path) -> int:
    return run(["calibrate", "--from-run", str(folder), "--out", str(folder / "x.json"), "--replicates", "1"])


def test_a_sound_run_is_taken(tmp_path):
    assert calibrated(lay(tmp_path / "run", sound())) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start_s": 0.495}, "steps.jsonl.gz line 51: overlaps the step 1 before it"),
        ({"end_s": float("nan")}, "steps.jsonl.gz line 51: 'end_s' is nan, must be a finite number"),
        ({"sched_s": float("inf")}, "steps.jsonl.gz line 51: 'sched_s' is inf"),
        ({"end_s": 0.4}, "steps.jsonl.gz line 51: negative duration: 'end_s - start_s'"),
        ({"sched_s": -0.001}, "steps.jsonl.gz line 51: negative duration: 'sched_s'"),
        ({"prefill": [[8]]}, "steps.jsonl.gz line 51: 'prefill' must be a list of"),
        ({"decode_ctx": None}, "steps.jsonl.gz line 51: 'decode_ctx' is None"),
        ({"decode_ctx": "?"}, "steps.jsonl.gz line 51: 'decode_ctx' is '?'"),
        ({"decode_ctx": 10**30}, "line 51: 'decode_ctx' is 1000000000000000000000000000000, must be"),
        ({"end_s": 1e300}, "steps.jsonl.gz line 51: 'end_s' is 1e+300, must be a finite number"),
    ],
)
def test_a_step_that_can_not_be_is_named_by_its_line(tmp_path, capsys, change, words):
    steps = sound()
    steps[50] |= change
    refused(lay(tmp_path / "run", steps), words, capsys)


def test_a_step_that_lacks_a_column_is_named(tmp_path, capsys):
    steps = sound()
    del steps[7]["decode_max"]
    refused(lay(tmp_path / "run", steps), "steps.jsonl.gz line 8: no 'decode_max'", capsys)


def test_a_request_table_that_is_short_is_named(tmp_path, capsys):
    folder = lay(tmp_path / "run", sound())
    with gzip.open(folder / "inputs.jsonl.gz", "wt") as out:
        out.write(json.dumps({"arrival_s": 0.0, "input_tokens": 40, "output_tokens": 2}) + "\n")
    with gzip.open(folder / "requests.csv.gz", "wt") as out:
        out.write(f"{HEADER}\n0,0.0,0.0,40\n")
    refused(folder, "requests.csv.gz line 2: columns are short: 4 of 9", capsys)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("0,2.0,2.0,40,2,1.5,3.0,0,2", "line 2: negative duration: 'first_token_s' is before 'arrival_s'"),
        ("0,1.0,1.0,40,2,1.5,1.2,0,2", "line 2: negative duration: 'finish_s' is before 'first_token_s'"),
        ("0,1.0,1.0,40.5,2,1.5,3.0,0,2", "line 2: 'input_tokens' is '40.5', must be a whole number"),
        ("0,1.0,1.0,40,2,1.5,90.0,0,2", "steps end at 3.999 s, and 1 requests finish later, up to 90.000"),
    ],
)
def test_requests_that_can_not_be_are_named(tmp_path, capsys, row, words):
    folder = lay(tmp_path / "run", sound())
    with gzip.open(folder / "inputs.jsonl.gz", "wt") as out:
        out.write(json.dumps({"arrival_s": 0.0, "input_tokens": 40, "output_tokens": 2}) + "\n")
    with gzip.open(folder / "requests.csv.gz", "wt") as out:
        out.write(f"{HEADER}\n{row}\n")
    refused(folder, words, capsys)


@pytest.mark.parametrize(
    ("key", "value"),
    [("tensor_parallel_size", "two"), ("gpu_memory_utilization", 7), ("kv_cache_dtype", "int3")],
)
def test_options_that_can_not_be_are_named(tmp_path, capsys, key, value):
    meta = {**META, "config": {**META["config"], key: value}}
    refused(lay(tmp_path / "run", sound(), meta), key, capsys)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host", {}),
        ("noise", None),
        ("terms_ns", []),
        ("fitted", 3),
        ("regions", ["x"]),
        ("cross_validation", [3]),
        ("made_for", {"block_size": "x"}),
        ("knots", [float("inf")]),
    ],
)
def test_a_file_with_a_field_that_can_not_be_is_one_line(tmp_path, capsys, key, value):
    folder = lay(tmp_path / "run", sound())
    assert calibrated(folder) == 0
    capsys.readouterr()
    path = folder / "x.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert run(["replay", "chat", "--limit", "5", "--costs", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert error.count("\n") == 1


def test_fewer_steps_than_the_terms_need_are_counted(tmp_path, capsys):
    refused(lay(tmp_path / "run", sound(5)), "4 steps are too few for", capsys)


def test_a_step_in_which_no_time_passes_is_named(tmp_path, capsys):
    steps = sound()
    steps[50] |= {"start_s": 0.5, "end_s": 0.5}
    steps[51] |= {"start_s": 0.5}
    refused(lay(tmp_path / "run", steps), "steps.jsonl.gz line 51: no time passes until the next", capsys)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model", None, "meta.json: 'model' must hold the model's config.json"),
        ("gpu", "Abacus", "meta.json: unknown GPU 'Abacus'"),
        ("gpu", None, "meta.json: 'gpu' is None, must name the GPU"),
    ],
)
def test_a_run_that_does_not_say_what_it_ran_on_is_named(tmp_path, capsys, key, value, words):
    refused(lay(tmp_path / "run", sound(), {**META, key: value}), words, capsys)


def test_a_file_of_another_version_of_the_format_is_named_as_such(tmp_path, capsys):
    folder = lay(tmp_path / "run", sound())
    assert calibrated(folder) == 0
    capsys.readouterr()
    path = folder / "x.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 3}))
    assert run(["replay", "chat", "--limit", "5", "--costs", str(path)]) == 2
    error = capsys.readouterr().err
    assert "x.json: version 3 of the calibration format; this pagecast reads 2" in error
    assert error.count("\n") == 1


def refused(folder: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrated(folder) == 2
    error = capsys.readouterr().err
    assert words in error
    assert str(folder) in error
    assert error.count("\n") == 1
