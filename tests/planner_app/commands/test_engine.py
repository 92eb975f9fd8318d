"""The engine's commands are there, and say in one line what this machine lacks."""

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
