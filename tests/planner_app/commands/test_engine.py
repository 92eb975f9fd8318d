"""The engine's commands are there, and say in one line what this machine lacks."""

import json
from pathlib import Path

import pytest
from pagecast.planner_app.cli import run

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "--device", "cuda"],
        ["generate", "hello", "--model", "Qwen/Qwen3-0.6B", "--random-weights", "--device", "cuda"],
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_a_command_that_needs_one_ends_with_3(arguments, capsys):
    assert run(arguments) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "GPU" in captured.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--requests", "0"], "--requests"),
        (["--requests", "-3"], "--requests"),
        (["--requests", "4000000000"], "--requests 4000000000 x --longest 1024"),
        (["--shortest", "0"], "--shortest"),
        (["--longest", "0"], "--longest"),
        (["--longest", "-1"], "--longest"),
        (["--longest", "50"], "--shortest 100 is more than --longest 50"),
        (["--longest", "100000"], "--max-model-len is 4096; the benchmark needs 200000"),
        (["--repeat", "0"], "--repeat"),
        (["--repeat", "99999999"], "--repeat"),
        (["--temperature", "-1"], "temperature is -1.0"),
    ],
)
def test_bench_checks_its_options_before_anything_is_loaded(options, words, capsys, monkeypatch):
    from pagecast.planner_app.commands import engine

    monkeypatch.setattr(engine, "open_engine", None)
    assert run(["bench", "--device", "cpu", *options]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert words in message


def test_generate_checks_how_it_draws_before_anything_is_loaded(capsys, monkeypatch):
    from pagecast.planner_app.commands import engine

    monkeypatch.setattr(engine, "open_engine", None)
    assert run(["generate", "a", "--model", "m", "--device", "cpu", "--top-p", "7"]) == 2
    assert "top_p is 7.0" in capsys.readouterr().err


TINY = ["--random-weights", "--device", "cpu", "--max-num-seqs", "8"]


@pytest.mark.parametrize("command", ["generate", "record", "serve"])
def test_a_number_of_blocks_is_refused_under_its_options_name(command, tiny_model, tmp_path, capsys):
    arguments = {"generate": ["hello"], "record": ["chat", "--out", str(tmp_path / "run")], "serve": []}
    given = [command, *arguments[command], "--model", str(tiny_model), "--device", "cpu"]
    assert run([*given, "--num-gpu-blocks", "0"]) == 2
    assert capsys.readouterr().err == "pagecast: --num-gpu-blocks is 0; it must be at least 1\n"


@pytest.mark.parametrize("policy", ["lpm", "foo"])
def test_an_order_that_the_engine_lacks_is_refused_with_those_it_has(policy, tiny_model, tmp_path, capsys):
    given = ["record", "chat", "--model", str(tiny_model), *TINY, "--out", str(tmp_path / "run")]
    assert run([*given, "--scheduling-policy", policy]) == 2
    assert capsys.readouterr().err == (
        f"pagecast: --scheduling-policy {policy!r} is not the engine's; choose fcfs or priority\n"
    )
    assert not (tmp_path / "run").exists()


def test_without_a_tokenizer_the_bytes_of_a_prompt_are_its_tokens(tiny_model, capsys):
    given = ["--model", str(tiny_model), *TINY, "--max-tokens", "5"]
    assert run(["generate", "hello", *given]) == 0
    streamed = capsys.readouterr()
    assert streamed.err == (
        "note: tiny has no tokenizer here: tokens are the bytes of the prompt, and texts are noise\n"
    )
    assert run(["generate", "hello", "world", *given, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["completions"]
    assert first["outputs"][0]["text"] == streamed.out.removesuffix("\n") != ""
    assert len(first["outputs"][0]["token_ids"]) == 5
    assert second["outputs"][0]["text"] != first["outputs"][0]["text"]


def test_record_tells_why_requests_did_not_finish(tiny_model, tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    lengths = [20, 30, 20, 40, 20]
    rows = [f"{number / 100},{length},8" for number, length in enumerate(lengths)]
    trace.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    given = ["record", str(trace), "--model", str(tiny_model), *TINY, "--num-gpu-blocks", "2"]
    assert run([*given, "--out", str(tmp_path / "run")]) == 0
    figures, *reasons = capsys.readouterr().out.splitlines()
    assert "5 requests, 3 finished" in figures
    assert reasons == ["2 requests not finished: needs 3 blocks of 16 tokens; the pool has 2"]
    assert run([*given, "--out", str(tmp_path / "again"), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["reasons"] == {"needs 3 blocks of 16 tokens; the pool has 2": 2}


def memory_of(path: Path, free_gib: float) -> Path:
    """A system's account of 64 GiB of memory."""
    path.write_text(f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {int(free_gib * (1 << 20))} kB\n")
    return path


@pytest.mark.parametrize(("dtype", "needed"), [("auto", "30.51"), ("bfloat16", "15.26")])
def test_a_model_that_a_cpus_memory_has_no_room_for_is_refused_before_it_is_made(
    dtype, needed, tmp_path, capsys, monkeypatch
):
    from pagecast.engine import loading, weights

    monkeypatch.setattr(loading, "_MEMINFO", memory_of(tmp_path / "meminfo", 14))
    monkeypatch.setattr(weights, "randomise", None)
    assert run(["bench", "--model", "Qwen/Qwen3-8B", "--device", "cpu", "--dtype", dtype]) == 3
    assert capsys.readouterr().err == (
        f"pagecast: the weights of Qwen/Qwen3-8B ({needed} GiB) don't fit: this process may use 64.00 GiB, "
        "and 14.00 of it were free; choose a smaller model or dtype, or a machine with more memory\n"
    )


def test_blocks_that_a_cpus_memory_has_no_room_for_are_refused(tiny_model, tmp_path, capsys, monkeypatch):
    from pagecast.engine import loading

    monkeypatch.setattr(loading, "_MEMINFO", memory_of(tmp_path / "meminfo", 1))
    given = ["bench", "--model", str(tiny_model), "--device", "cpu", "--num-gpu-blocks", "100000"]
    assert run(given) == 3
    assert capsys.readouterr().err == (
        "pagecast: 100000 KV blocks take 1.53 GiB, more than is free; lower num_blocks (--num-gpu-blocks)\n"
    )


def test_a_cpu_that_runs_out_of_memory_while_weights_are_made_is_named(
    tiny_model, tmp_path, capsys, monkeypatch
):
    from pagecast.engine import loading, weights

    def fail(*_):
        raise RuntimeError("[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(loading, "_MEMINFO", tmp_path / "nowhere")
    monkeypatch.setattr(weights, "randomise", fail)
    assert run(["bench", "--model", str(tiny_model), "--device", "cpu"]) == 3
    assert capsys.readouterr().err == (
        "pagecast: the weights of tiny (0.00 GiB) don't fit: this machine has too little memory; choose a "
        "smaller model or dtype, or a machine with more memory\n"
    )
