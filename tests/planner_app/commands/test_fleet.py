"""`pagecast replay` with replicas behind a router, as a user meets it."""

import json

import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.commands.fleet_options import ROUTERS
from pagecast.sim.fleet.routers.registry import KINDS
from pagecast.sim.fleet.settings import FleetSettings

REPLAY = ["replay", "chat", "--limit", "200", "--costs", "roofline", "--explain"]


def test_replicas_share_a_trace(capsys):
    assert run([*REPLAY, "--replicas", "3", "--router", "least-loaded"]) == 0
    printed = capsys.readouterr().out
    assert "200 completed" in printed
    assert "3 replicas on 3 GPUs behind least-loaded" in printed
    assert "chat: 200 requests on Qwen/Qwen3-8B, 3 replicas, 3 GPUs, vLLM 0.33" in printed
    assert "replica-2 (1 x H200)" in printed


def test_one_replica_is_in_the_singular(capsys):
    assert run([*REPLAY, "--router", "session"]) == 0
    assert "fleet: 1 replica on 1 GPU behind session" in capsys.readouterr().out


def test_a_fleet_whose_replicas_come_and_go_tells_how_many_replicas_there_were_at_once(capsys, tmp_path):
    """Not only how many there ever were; KV figures say what is of all replicas and what of one."""
    file = tmp_path / "fleet.yaml"
    lost = "{at_s: 20, replica: replica-1, back_after_s: 5}"
    file.write_text(f"groups: [{{replicas: 3}}]\nstartup: {{engine_s: 1}}\nincidents: [{lost}]\n")
    options = ["--gpu", "L4", "--max-model-len", "16384", "--fleet", str(file)]
    options += ["--report", str(tmp_path / "fleet.html")]
    assert run([*REPLAY, *options, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    fleet = summary["fleet"]
    names = ("least_replicas", "peak_replicas", "peak_gpus", "replicas")
    assert [fleet[name] for name in names] == [2, 3, 3, 4]
    assert run([*REPLAY, *options]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    there = "2 to 3 replicas (4 started)"
    assert f"on Qwen/Qwen3-8B, {there}, at most 3 GPUs" in printed
    assert f"fleet: {there} on at most 3 GPUs" in printed
    assert "blocks on 4 replicas together" in printed
    assert f"{summary['peak_kv_usage']:.1%} held by requests at peak on the fullest" in printed
    page = (tmp_path / "fleet.html").read_text()
    assert f"{there} behind" in page and "of the blocks of the fullest replica" in page


def test_json_has_the_fleet(capsys):
    assert run([*REPLAY, "--replicas", "2", "--router", "prefix-affinity", "--json"]) == 0
    fleet = json.loads(capsys.readouterr().out)["fleet"]
    assert fleet["router"] == "prefix-affinity"
    assert sum(row["requests"] for row in fleet["by_replica"]) == 200
    assert 0 <= fleet["herding"] <= 1 <= fleet["imbalance"]


def test_a_fleet_tells_what_it_admits_at_its_peak_and_what_its_eviction_order_learned(capsys):
    assert run([*REPLAY, "--replicas", "2", "--rollout-at-s", "10", "--eviction", "cost"]) == 0
    printed = capsys.readouterr().out
    assert "uncached tokens/s can be admitted" in printed
    assert "probability of reuse after 0, 1, 2... reuses: " in printed


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
        (["--router-option", "a=1", "--router-option", "a=2"], "'a' is given twice"),
        (["--replicas", "2", "--index", "guess"], "router.index is 'guess'"),
        (["--replicas", "2", "--index-delay", "1"], "uses no prefix index; leave --index-delay out"),
    ):
        assert run([*REPLAY, *options]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("number", ["1e-1", "0.1", "1.0e-1", ".1e0"])
def test_a_number_may_have_an_exponent_in_an_option_and_in_a_file(capsys, tmp_path, number):
    option = ["--router", "sglang", "--router-option", f"cache_threshold={number}"]
    assert run([*REPLAY, "--replicas", "2", *option, "--out", str(tmp_path / "option")]) == 0
    file = tmp_path / "fleet.yaml"
    router = f"{{policy: sglang, options: {{cache_threshold: {number}}}}}"
    file.write_text(f"groups: [{{replicas: 2}}]\nrouter: {router}\nstartup: {{disk_bytes_per_s: 2e9}}\n")
    assert run([*REPLAY, "--fleet", str(file), "--out", str(tmp_path / "file")]) == 0
    for folder in ("option", "file"):
        fleet = FleetSettings.load(tmp_path / folder / "fleet.yaml")
        assert fleet.router.options == {"cache_threshold": 0.1}
        assert fleet.startup.disk_bytes_per_s == 2e9


def test_help_lists_every_router():
    assert ROUTERS.split(", ") == list(KINDS)


def test_a_fleet_has_a_report_a_trace_of_its_steps_and_intervals(capsys, tmp_path):
    report, trace = tmp_path / "fleet.html", tmp_path / "fleet.json"
    options = ["--limit", "60", "--replicas", "2", "--replicates", "2", "--json"]
    files = ["--report", str(report), "--perfetto", str(trace)]
    assert run(["replay", "chat", "--costs", "roofline", *options, *files]) == 0
    summary = json.loads(capsys.readouterr().out)
    ttft = summary["ttft_s"]
    assert ttft["low"]["p90"] <= ttft["p90"] <= ttft["high"]["p90"]
    assert "2 replicas behind round-robin" in report.read_text()
    assert "Requests per replica" in report.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert len(processes) == 3
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 1 and event["pid"] > 2]
    assert {event["pid"] for event in steps} == set(processes.values()) - {2}
    assert sum(event["args"]["steps"] for event in steps) == summary["steps"]
    assert sum(event["ph"] == "i" and event["name"] == "ready" for event in events) == 2


def test_handoffs_and_the_costs_of_each_gpu_are_told(capsys, tmp_path):
    file = tmp_path / "fleet.yaml"
    groups = "groups:\n- {name: p, role: prefill}\n- {name: d, role: decode, scenario: {gpu: B200}}\n"
    file.write_text(groups + "disaggregation: {bytes_per_s: 50.0e+9}\n")
    assert run(["replay", "chat", "--limit", "50", "--explain", "--fleet", str(file)]) == 0
    out = capsys.readouterr().out
    assert "handoffs: 50 requests prefilled on one replica and decoded on another (counted at both)" in out
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert any("on NVIDIA H200" in note for note in notes)
    assert any("measured with vllm 0.24.0 on B200" in note for note in notes)
    assert "costs vllm-0.24-h200-qwen3-8b and measured" in out.splitlines()[0]
