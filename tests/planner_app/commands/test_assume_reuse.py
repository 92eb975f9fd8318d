"""A trace of lengths alone: its reuse is unknown, never zero, and may be assumed."""

import json
from pathlib import Path

import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.dashboard.compare.table import table
from pagecast.planner_app.dashboard.fleet.charts import hits_per_router
from pagecast.planner_app.dashboard.fleet.study import study
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.planner.traffic import traffic
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.replay.simulation import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.shared_prefix import assume_reuse, without_reuse

ROWS = "".join(f"{at / 5},{800 + 100 * (at % 9)},{20 + at % 30}\n" for at in range(60))


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    (tmp_path / "len.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{ROWS}")
    return str(tmp_path / "len.csv")


@pytest.mark.parametrize(
    "command",
    [
        ("replay",),
        ("replay", "--explain"),
        ("replay", "--replicas", "2"),
        ("replay", "--replicas", "2", "--explain"),
        ("tune", "hbm-budget", "--static", "--values", "0.5,0.9"),
        ("sweep", "--set", "max_num_seqs=8,64"),
        ("trace", "describe"),
        ("plan", "--slo", "ttft_p99<9s", "--router", "cost", "--most-replicas", "2"),
    ],
)
def test_reuse_is_unknown_and_never_zero(command, lengths, capsys):
    at = 2 if command[0] in ("tune", "trace") else 1
    assert run([*command[:at], lengths, *command[at:]]) == 0
    out = capsys.readouterr().out
    assert "unknown" in out
    assert "0.0%" not in out and " 0 hit tokens" not in out


def test_an_unknown_hit_rate_is_null_and_not_a_number(lengths, capsys):
    for more in ((), ("--replicas", "2")):
        assert run(["replay", lengths, *more, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["token_hit_rate"] is None
    assert run(["sweep", lengths, "--set", "max_num_seqs=8,64", "--json"]) == 0
    assert [trial["token_hit_rate"] for trial in json.loads(capsys.readouterr().out)["trials"]] == [
        None,
        None,
    ]


def test_the_dashboards_pages_say_that_hits_are_unknown(lengths):
    trace, scenario = read(lengths), Scenario(model="Qwen/Qwen3-8B", gpu="H200")
    cells = table({"a": replay(trace, scenario)}, {"a": PageView()}, "a")
    assert cells.loc["Prefix reuse"].tolist() == ["–"]
    of_fleet = study(
        trace, scenario, FleetSettings.make({"groups": [{"replicas": 2}]}), ("round-robin", "cost"), None
    )
    assert "Hits are unknown" in hits_per_router(of_fleet.routers).to_json()


def test_a_replay_prints_both_ends_of_an_assumed_reuse(lengths, capsys):
    assert run(["replay", lengths, "--json"]) == 0
    none = json.loads(capsys.readouterr().out)
    assert run(["replay", lengths, "--assume-reuse", "0.5", "--json"]) == 0
    half = json.loads(capsys.readouterr().out)
    assert half["token_hit_rate"] == pytest.approx(0.5, abs=0.05)
    assert half["without_reuse"]["ttft_s"] == none["ttft_s"]
    assert half["ttft_s"]["mean"] < none["ttft_s"]["mean"]
    assert run(["replay", lengths, "--assume-reuse", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("no contents: 50% reuse assumed")
    assert any(line.startswith("without reuse: TTFT ") for line in lines)


@pytest.mark.slow
def test_a_plan_prints_both_ends_of_an_assumed_reuse(lengths, capsys):
    ask = ["plan", lengths, "--slo", "ttft_p99<1s", "--replicates", "0", "--most-requests", "200"]
    assert run([*ask, "--assume-reuse", "0.6", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["rate"]["value"] > body["without_reuse"]["rate"]["value"]


def test_reuse_is_assumed_of_lengths_alone_and_can_be_taken_back(lengths):
    trace = read(lengths)
    assumed = assume_reuse(trace, 0.3)
    assert not assumed.lengths_only and "30% of prompt tokens" in assumed.notes[-1]
    assert without_reuse(assumed).lengths_only and without_reuse(assumed).spans is None
    assert "reuse unknown" in traffic(trace)
    with pytest.raises(BadInput, match="has contents of prompts"):
        assume_reuse(read("chat", limit=5), 0.3)


def test_traffic_tells_its_pace_and_lengths():
    assert traffic(read("chat")).startswith(
        "chat: 2,000 requests at 16.6/s, mean prompt 2,194 tokens, output 202"
    )
