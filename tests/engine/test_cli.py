"""The engine's commands: text as it comes, a run that can be validated, and one line where it can't be."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from pagecast.engine.params import SamplingParams
from pagecast.engine.text import Growing
from pagecast.planner_app.commands.engine import bench_command, generate_command, record_command
from pagecast.sim.core.errors import BadInput, CannotRunHere
from pagecast.sim.runs.journal import segments
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import compare_decisions

SMALL = ["--device", "cpu", "--num-gpu-blocks", "64", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
app = typer.Typer()
for name, command in (("generate", generate_command), ("record", record_command), ("bench", bench_command)):
    app.command(name)(command)


def run(*arguments: Any) -> None:
    app(args=[str(argument) for argument in arguments], standalone_mode=False)


def small_trace_file(folder: Path, requests: int = 20, output: int = 12) -> Path:
    path = folder / "trace.jsonl"
    with path.open("w") as file:
        for i in range(requests):
            spans = [[0, 0, 30], [i + 1, 0, 10 + i]]
            line = {"arrival_s": i * 0.002, "input_tokens": 40 + i, "output_tokens": output, "spans": spans}
            file.write(json.dumps(line) + "\n")
    return path


def test_generate_streams_the_text_that_generate_returns(
    model_with_text: Any, engine_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_with_text.folder
    engine = engine_of(folder)
    (expected,) = engine.generate("Grüße, 世界", SamplingParams(max_tokens=60))
    assert len(expected.outputs[0].text) > 10
    pieces = list(engine.stream("Grüße, 世界", SamplingParams(max_tokens=60)))
    assert "".join(pieces) == expected.outputs[0].text
    assert len(pieces) > 10
    run("generate", "Grüße, 世界", "--model", folder, "--max-tokens", 60, *SMALL)
    assert capsys.readouterr().out == expected.outputs[0].text + "\n"


def test_generate_prints_every_text_as_json(model_with_text: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run("generate", "a", "b", "--model", model_with_text.folder, "-n", 2, "--max-tokens", 5, "--json", *SMALL)
    completions = json.loads(capsys.readouterr().out)["completions"]
    assert [len(completion["outputs"]) for completion in completions] == [2, 2]
    assert all(output["finish_reason"] == "length" for c in completions for output in c["outputs"])


def test_text_comes_in_whole_characters(model_with_text: Any, engine_of: Any) -> None:
    tokenizer = engine_of(model_with_text.folder).tokenizer
    growing = Growing(tokenizer)
    pieces = [growing.add(token) for token in tokenizer.encode("aß世!")]
    assert pieces == ["a", "", "ß", "", "", "世", "!"]
    assert growing.rest() == ""


def test_an_end_token_ends_the_text_and_is_not_part_of_it(model_with_text: Any, engine_of: Any) -> None:
    engine = engine_of(model_with_text.folder)
    (full,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=30))
    ids = full.outputs[0].token_ids
    end = ids[10]
    params = SamplingParams(max_tokens=30, stop_token_ids=(end,))
    (cut,) = engine.generate([[1, 2, 3]], params)
    assert cut.outputs[0].token_ids == ids[: ids.index(end) + 1]
    assert cut.outputs[0].finish_reason == "stop"
    assert cut.outputs[0].text == engine.tokenizer.decode(ids[: ids.index(end)])
    assert engine.loop.scheduler.memory.used_blocks == 0


def test_a_run_whose_folder_fails_at_the_end_is_kept_elsewhere(
    model_with_text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, out = RecordedRun.write, tmp_path / "run"

    def full(self: RecordedRun, folder: Path) -> Path:
        if folder.parent == out:
            raise OSError(28, "No space left on device")
        return write(self, folder)

    monkeypatch.setattr(RecordedRun, "write", full)
    with pytest.raises(BadInput, match="No space left on device") as caught:
        run("record", small_trace_file(tmp_path), "--model", model_with_text.folder, "--out", out, *SMALL)
    kept = Path(str(caught.value).split("the run is in ")[1])
    assert len(RecordedRun.load(kept).requests) == 20
    shutil.rmtree(kept)


@pytest.mark.parametrize("pipelining", ["--async-scheduling", "--no-async-scheduling"])
def test_record_writes_a_run_that_validates(
    pipelining: str, model_with_text: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    trace = small_trace_file(tmp_path)
    run("record", trace, "--model", model_with_text.folder, "--out", out, "--json", pipelining, *SMALL)
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["finished"], figures["output_tokens"]) == (20, 20, 240)
    recorded = RecordedRun.load(out)
    report = compare_decisions(recorded)
    assert report.ok, report.first_mismatch
    assert recorded.requests["cached_tokens"].max() == 16
    with pytest.raises(BadInput, match="not empty"):
        run("record", trace, "--model", model_with_text.folder, "--out", out, *SMALL)


def test_bench_reports_output_tokens_a_second(
    model_with_text: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--requests", 6, "--shortest", 5, "--longest", 20, "--max-model-len", 64]
    run("bench", "--model", model_with_text.folder, *lengths, "--json", *SMALL)
    (result,) = json.loads(capsys.readouterr().out)["runs"]
    assert result["requests"] == 6
    assert 30 <= result["output_tokens"] <= 120
    assert result["tokens_per_s"] == pytest.approx(result["output_tokens"] / result["seconds"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(model_with_text: Any) -> None:
    for arguments in (["generate", "a"], ["bench"], ["record", "chat", "--out", "/nowhere"]):
        with pytest.raises(CannotRunHere, match="no CUDA GPU here") as caught:
            run(*arguments, "--model", model_with_text.folder)
        assert caught.value.exit_code == 3
        assert "\n" not in str(caught.value)


def test_an_interrupted_run_ends_at_once_and_is_kept_as_far_as_it_went(
    model_with_text: Any, tmp_path: Path
) -> None:
    trace = small_trace_file(tmp_path, requests=900)
    arguments = [trace, "--model", model_with_text.folder, "--out", tmp_path / "run", *SMALL]
    process = subprocess.Popen(
        [sys.executable, "-m", "pagecast", "record", *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        # A shell leaves background jobs, such as these tests may be, deaf to interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stderr is not None
        while "KV blocks" not in process.stderr.readline():
            assert process.poll() is None
        deadline = time.monotonic() + 60
        while not any('"finished"' in path.read_text() for path in segments(tmp_path / "run")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    run = RecordedRun.load(tmp_path / "run")  # as far as it went
    assert 0 < run.requests["finish_s"].notna().sum() < 900
    report = compare_decisions(run)
    assert report.ok, report.first_mismatch
    assert (run.meta["engine"], run.meta["config"]["num_blocks"]) == ("pagecast", 64)
