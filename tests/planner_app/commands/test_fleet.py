"""`pagecast replay` with replicas behind a router, as a user meets it."""

import json

from pagecast.planner_app.cli import run
from pagecast.planner_app.commands.fleet_options import ROUTERS
from pagecast.sim.fleet.routers.registry import KINDS

REPLAY = ["replay", "chat", "--limit", "200", "--costs", "roofline"]


def test_replicas_share_a_trace(capsys):
    assert run([*REPLAY, "--replicas", "3", "--router", "least-loaded"]) == 0
    printed = capsys.readouterr().out
    assert "200 completed" in printed
    assert "3 replicas on 3 GPUs behind least-loaded" in printed
    assert "chat: 200 requests on Qwen/Qwen3-8B, 3 replicas, 3 GPUs, profile vllm" in printed
    assert "replica-2 (1 x H200)" in printed


def test_one_replica_is_in_the_singular(capsys):
    assert run([*REPLAY, "--router", "session"]) == 0
    assert "fleet: 1 replica on 1 GPU behind session" in capsys.readouterr().out


def test_json_has_the_fleet(capsys):
    assert run([*REPLAY, "--replicas", "2", "--router", "prefix-affinity", "--json"]) == 0
    fleet = json.loads(capsys.readouterr().out)["fleet"]
    assert fleet["router"] == "prefix-affinity"
    assert sum(row["requests"] for row in fleet["by_replica"]) == 200
    assert 0 <= fleet["herding"] <= 1 <= fleet["imbalance"]


def test_a_file_describes_different_replicas(capsys, tmp_path):
    file = tmp_path / "fleet.yaml"
    file.write_text("groups:\n- {name: a, replicas: 1}\n- {name: b, scenario: {gpu: L40S}}\n")
    assert run([*REPLAY, "--fleet", str(file), "--router", "round-robin"]) == 0
    assert "b-0 (1 x L40S)" in capsys.readouterr().out
    assert run([*REPLAY, "--fleet", str(file), "--replicas", "2"]) == 2
    assert "several groups" in capsys.readouterr().err


def test_mistakes_are_one_line(capsys):
    for options, words in (
        (["--router", "nobody"], "router 'nobody' is not known"),
        (["--router-option", "a"], "give NAME=VALUE"),
        (["--replicas", "2", "--replicates", "3"], "--replicates is for one replica"),
        (["--replicas", "2", "--index", "guess"], "router.index is 'guess'"),
    ):
        assert run([*REPLAY, *options]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_help_lists_every_router():
    assert ROUTERS.split(", ") == list(KINDS)
