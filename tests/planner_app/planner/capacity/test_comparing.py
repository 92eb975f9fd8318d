"""`plan --compare`: one table of several servers, the cheapest first."""

import json

import pytest
from pagecast.planner_app.cli import run

ASK = [
    "plan",
    "chat",
    "--limit",
    "30",
    "--most-requests",
    "30",
    "--slo",
    "ttft_p90<1s",
    "--max-num-seqs",
    "4",
]
HERE = ["--workers", "1"]
SERVERS = ["--compare", "gpu=H200,L4", "--compare", "model=Qwen/Qwen3-0.6B,Qwen/Qwen3-32B"]
PRICES = ["--price", "H200=3", "--price", "L4=0.5"]


def test_servers_stand_in_one_table_by_their_cost(capsys):
    assert run([*ASK, *SERVERS, *PRICES, *HERE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("chat: 30 requests at ")
    assert lines[1].startswith("cheapest of 4 servers for SLO ttft_p90<1s: gpu=L4 model=Qwen/Qwen3-0.6B, ")
    assert lines[2].split()[:3] == ["gpu", "model", "users"]
    assert lines[3].split()[:2] == ["L4", "Qwen/Qwen3-0.6B"]
    assert lines[6].startswith("gpu=L4 model=Qwen/Qwen3-32B: Qwen/Qwen3-32B leaves no room for a KV ")
    assert max(map(len, lines)) <= 100 and len(lines) <= 12


def test_a_row_is_the_plan_of_that_server_alone(capsys):
    assert (
        run([*ASK, "--compare", "gpu=H200,L4", *PRICES, "--model", "Qwen/Qwen3-0.6B", "--json", *HERE]) == 0
    )
    compared = json.loads(capsys.readouterr().out)
    alone = [*ASK, "--gpu", "L4", *PRICES, "--model", "Qwen/Qwen3-0.6B", "--replicates", "0", "--json"]
    assert run(alone) == 0
    plan = json.loads(capsys.readouterr().out)
    row = compared["servers"][1]
    assert row["at"] == {"gpu": "L4"}
    for kind in ("concurrency", "rate"):
        assert row["plan"][kind]["value"] == plan[kind]["value"]
    assert row["plan"]["cost"] == plan["cost"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--compare", "gpu=H200", "--gpu", "L4"], "--gpu is what --compare gpu=H200 varies"),
        (["--compare", "gpus=H200"], "gpus"),
        (["--compare", "gpu=H200", "--report", "a.html"], "--report is of one plan"),
        (["--compare", "gpu=H200", "--router", "random"], "--compare is for one replica"),
    ],
)
def test_what_can_not_be_compared_is_refused(options, words, capsys):
    assert run([*ASK, *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("draws", "values", "words"),
    [
        ([], "4,64", "the order may be chance"),
        (["--replicates", "5"], "60,64", "not decided: the 90% interval of max_num_seqs=6"),
        (["--replicates", "5"], "1,64", ""),
    ],
)
def test_a_comparison_says_whether_it_is_decided(draws, values, words, capsys):
    ask = ["plan", "chat", "--limit", "30", "--most-requests", "30", "--slo", "ttft_p90<1s"]
    assert run([*ask, "--compare", f"max_num_seqs={values}", *draws, *HERE]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert words in out and ("note: " in out) == bool(words)
    assumed = out.partition("assumed:")[2]
    assert "max_num_batched_tokens" in assumed and "max_num_seqs" not in assumed
