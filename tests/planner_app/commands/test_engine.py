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
