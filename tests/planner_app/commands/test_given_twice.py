"""An option with two values under two names is an error that names both."""

import pytest
from pagecast.planner_app.cli import run

REPLAY = ("replay", "chat", "--limit", "3")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--num-gpu-blocks", "100", "--num-gpu-blocks-override=200"),
            "--num-gpu-blocks 100 and --num-gpu-blocks-override 200 set the same option",
        ),
        (("--engine", "sglang", "--profile", "vllm"), "--engine sglang and --profile vllm set the same"),
        (("--no-async-scheduling", "--async-scheduling"), "--no-async-scheduling and --async-scheduling set"),
    ],
)
def test_two_values_of_one_option_are_refused(options, words, capsys):
    assert run([*REPLAY, *options]) == 2
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1 and not out


def test_equal_values_one_name_and_options_of_several_values_pass(capsys):
    assert run([*REPLAY, "--gpu", "H200", "--gpu", "H100"]) == 0
    assert "1 x H100" in capsys.readouterr().out
    assert (
        run([*REPLAY, "--num-gpu-blocks", "900", "--num-gpu-blocks-override", "900", "--sort", "--sort"]) == 0
    )
    assert run(["sweep", *REPLAY[1:], "--set", "max_num_seqs=8,9", "--set", "block_size=16,32"]) == 0
    assert run([*REPLAY, "--launch", "vllm serve Qwen/Qwen3-8B --num-gpu-blocks-override 901"]) == 0


def test_options_beside_a_start_that_says_otherwise_are_told(capsys):
    start = "vllm serve Qwen/Qwen3-8B --max-num-seqs 64 --block-size 32"
    assert run([*REPLAY, "--launch", start, "--max-num-seqs", "128", "--block-size", "32"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "note: --launch line 1: not as it is started: --max-num-seqs 64 (here 128)" in out


def test_a_start_that_gives_an_option_twice_is_read_as_the_engine_reads_it_and_says_so(capsys):
    start = "vllm serve Qwen/Qwen3-8B -tp 2 --tensor-parallel-size 1"
    assert run([*REPLAY, "--launch", start]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "on 1 x H200" in out
    assert "--tensor-parallel-size 2 is given before --tensor-parallel-size 1, which replaces it" in out
