"""`pagecast check`: what fails a build and what does not, its files, and one line for bad input."""

import json
import socket
import threading
import xml.etree.ElementTree as ET
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pagecast.planner_app.cli import run
from pagecast.planner_app.planner.gate.baseline import digest
from pagecast.planner_app.planner.gate.check_file import Check, CheckFile
from pagecast.planner_app.planner.gate.judge import paired, regressions
from pagecast.planner_app.planner.gate.judge import verdict as judged
from pagecast.sim.costs.calibration.file import load as load_calibration
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.write import write

COSTS = "vllm-0.24-h200-qwen3-8b"
CHECK = {
    "trace": "chat",
    "limit": 150,
    "speedup": 4,
    "draws": 8,
    "regression": {"ttft_s.p99": 5, "tpot_s.p50": 5, "output_tokens_per_s": 5},
}


def scenario(folder: Path, name: str = "check.yaml", check: dict | None = None, **fields: object) -> str:
    path = folder / name
    body = {"model": "Qwen/Qwen3-8B", "gpu": "H200", "costs": COSTS, **fields, "check": check or CHECK}
    path.write_text(yaml.safe_dump(body))
    return str(path)


def slower(folder: Path, factor: float) -> str:
    """The same costs with every time `factor` as long, as a calibration of slower hardware would be."""
    made = load_calibration(COSTS)
    times = {
        "curve_ns": tuple(value * factor for value in made.curve_ns),
        "terms_ns": {name: value * factor for name, value in made.terms_ns.items()},
        "replicates": tuple(tuple(value * factor for value in row) for row in made.replicates),
    }
    return str(replace(made, **times).save(folder / "slower.json"))


def check(*arguments: object, capsys) -> tuple[int, str, str]:
    code = run(["check", "--workers", "1", *map(str, arguments)])
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def baseline(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("baseline")
    file = scenario(folder)
    assert run(["check", "--workers", "1", "--scenario", file, "--write-baseline", str(folder / "base")]) == 0
    return folder / "base"


def test_an_identical_scenario_passes(baseline, tmp_path, capsys):
    code, out, _ = check("--scenario", scenario(tmp_path), "--baseline", baseline, capsys=capsys)
    assert code == 0
    assert "all 3 checks hold" in " ".join(out.split())
    assert "+0.0% (+0.0 to +0.0)" in out


def test_json_has_numbers_and_tells_draws_from_the_replay(baseline, tmp_path, capsys):
    asked = {**CHECK, "limits": {"ttft_s.p99": {"max": 10}}, "slo": "ttft_p99<10s"}
    files = ("--junit", tmp_path / "j.xml", "--markdown", tmp_path / "m.md")
    file = scenario(tmp_path, check=asked, costs=slower(tmp_path, 1.2))
    code, out, _ = check("--scenario", file, "--baseline", baseline, "--json", *files, capsys=capsys)
    body = json.loads(out)
    assert (code, body["ok"], body["requests"], body["costs"]) == (1, False, 150, COSTS)
    assert "Step costs fitted to" in body["expected_error"]
    assert body["expected_error"] in body["notes"]
    level, limit, _, _, _ = body["checks"]
    drawn = next(finding for finding in body["checks"][2:] if finding["name"] == "ttft_s.p99")
    assert [finding["of"] for finding in (level, limit, drawn)] == ["1 replay", "1 replay", "8 draws"]
    one = limit["numbers"]["value"]
    assert level["numbers"] == {"value": pytest.approx(one, rel=1e-9), "max": 10.0}
    assert limit["numbers"] == {"value": one, "min": None, "max": 10.0}
    numbers = drawn["numbers"]
    assert (drawn["holds"], numbers["allowed_percent"], numbers["draws"]) == (False, 5.0, 8)
    assert numbers["change_percent"] == pytest.approx(100 * (numbers["value"] / numbers["baseline"] - 1))
    assert 5 < numbers["low_percent"] <= numbers["change_percent"] <= numbers["high_percent"]
    cases = ET.parse(tmp_path / "j.xml").getroot().findall("testsuite/testcase")
    names = [case.get("name").split(" (")[0] for case in cases if "(mean of 8 draws)" in case.get("name")]
    assert sorted(names) == ["output_tokens_per_s", "tpot_s.p50", "ttft_s.p99"]
    assert "ttft\\_s.p99 | 8 draws |" in (tmp_path / "m.md").read_text()
    assert f"costs {COSTS}" in (tmp_path / "m.md").read_text()


def test_json_against_a_replays_folder_is_plain_too(tmp_path, capsys):
    options = ["--costs", COSTS, "--limit", "150", "--speedup", "4", "--out", str(tmp_path / "was")]
    assert run(["replay", "chat", *options, "--json"]) == 0
    capsys.readouterr()
    was = ("--baseline", tmp_path / "was", "--json")
    code, out, _ = check("--scenario", scenario(tmp_path), *was, capsys=capsys)
    assert code == 0
    assert [finding["holds"] for finding in json.loads(out)["checks"]] == [True] * 3


def test_a_scenario_made_20_percent_slower_fails(baseline, tmp_path, capsys):
    file = scenario(tmp_path, costs=slower(tmp_path, 1.2))
    junit, markdown = tmp_path / "junit.xml", tmp_path / "check.md"
    code, out, _ = check(
        "--scenario", file, "--baseline", baseline, "--junit", junit, "--markdown", markdown, capsys=capsys
    )
    assert code == 1
    broken = [line.split()[1] for line in out.splitlines() if line.startswith("FAILED")]
    assert {"ttft_s.p99", "tpot_s.p50"} <= set(broken)
    suite = ET.parse(junit).getroot().find("testsuite")
    assert suite.get("tests") == "3"
    assert int(suite.get("failures")) == len(suite.findall("testcase/failure")) == len(broken)
    text = markdown.read_text()
    assert text.startswith(f"### pagecast check {file}".replace("_", "\\_"))
    assert text.count("| **failed** |") == len(broken)


def test_one_percent_slower_lies_within_what_is_allowed(baseline, tmp_path, capsys):
    allowed = {**CHECK, "regression": {"tpot_s.p50": 5, "e2e_s.mean": 5}}
    file = scenario(tmp_path, check=allowed, costs=slower(tmp_path, 1.01))
    assert check("--scenario", file, "--baseline", baseline, capsys=capsys)[0] == 0


def test_better_is_no_regression(baseline, tmp_path, capsys):
    file = scenario(tmp_path, costs=slower(tmp_path, 0.7))
    assert check("--scenario", file, "--baseline", baseline, capsys=capsys)[0] == 0


def test_a_baseline_of_another_version_is_compared_with_a_warning(baseline, tmp_path, capsys):
    folder = tmp_path / "old"
    folder.mkdir()
    document = json.loads((baseline / "baseline.json").read_text())
    (folder / "baseline.json").write_text(json.dumps({**document, "made_with": "0.0.1"}))
    code, out, _ = check("--scenario", scenario(tmp_path), "--baseline", folder, capsys=capsys)
    assert code == 0
    assert "made by pagecast 0.0.1" in out


def test_a_replays_folder_is_a_baseline_too(tmp_path, capsys):
    options = ["--costs", COSTS, "--limit", "150", "--speedup", "4", "--out", str(tmp_path / "was")]
    assert run(["replay", "chat", *options]) == 0
    capsys.readouterr()
    code, out, _ = check("--scenario", scenario(tmp_path), "--baseline", tmp_path / "was", capsys=capsys)
    assert code == 0
    assert "replayed anew" in out
    file = scenario(tmp_path, max_num_seqs=4)
    code, out, _ = check("--scenario", file, "--baseline", tmp_path / "was", capsys=capsys)
    assert code == 1
    assert "max_num_seqs: 1024 -> 4" in out


def test_costs_that_auto_chose_are_no_change(tmp_path, capsys):
    options = ["--limit", "150", "--speedup", "4", "--out", str(tmp_path / "was")]
    assert run(["replay", "chat", *options]) == 0
    few = {**CHECK, "draws": 5}
    file = scenario(tmp_path, check=few, costs="auto")
    assert check("--scenario", file, "--write-baseline", tmp_path / "base", capsys=capsys)[0] == 0
    for name, now in (("was", "auto"), ("base", "auto"), ("base", COSTS)):
        file = scenario(tmp_path, check=few, costs=now)
        code, out, _ = check("--scenario", file, "--baseline", tmp_path / name, capsys=capsys)
        assert code == 0
        assert "changed since the baseline" not in out
    file = scenario(tmp_path, check=few, costs="roofline")
    _, out, _ = check("--scenario", file, "--baseline", tmp_path / "was", capsys=capsys)
    assert f"changed since the baseline: costs: {COSTS} -> roofline" in out


@pytest.mark.parametrize(
    ("changes", "of_replay", "of_baseline"),
    [
        (
            {"speedup": 8},
            "was replayed at 4 times the trace's own speed, not at check.speedup (8)",
            "was made with check.speedup 4 (now 8)",
        ),
        (
            {"limit": 100},
            "was replayed with 150 requests, not 100 as check.limit (100)",
            "was made with check.limit 150 (now 100)",
        ),
        (
            {"trace": "code"},
            "was made of another trace than code is now",
            "was made of another trace than code is now",
        ),
    ],
)
def test_what_was_read_otherwise_is_named(changes, of_replay, of_baseline, baseline, tmp_path, capsys):
    options = ["--limit", "150", "--speedup", "4", "--out", str(tmp_path / "was")]
    assert run(["replay", "chat", *options]) == 0
    capsys.readouterr()
    file = scenario(tmp_path, check={**CHECK, **changes})
    for folder, words in ((tmp_path / "was", of_replay), (baseline, of_baseline)):
        code, out, err = check("--scenario", file, "--baseline", folder, capsys=capsys)
        assert (code, out) == (2, "")
        assert words in err and err.count("\n") == 1


def test_bounds_and_service_levels(tmp_path, capsys):
    asked = {
        **CHECK,
        "slo": "ttft_p99<10s, tpot_p50<1us",
        "limits": {"ttft_s.p99": {"max": 10}, "token_hit_rate": {"min": 0.999}, "num_gpu_blocks": {"min": 1}},
    }
    file = scenario(tmp_path, check=asked)
    code, out, _ = check("--scenario", file, "--skip-regression", "--json", capsys=capsys)
    assert code == 1
    body = json.loads(out)
    assert not body["ok"] and body["regressions_not_compared"] == len(CHECK["regression"])
    assert [(finding["kind"], finding["holds"]) for finding in body["checks"]] == [
        ("slo", True),
        ("slo", False),
        ("limit", True),
        ("limit", False),
        ("limit", True),
    ]


def test_a_figure_that_a_replay_lacks_does_not_pass(tmp_path, capsys):
    write(replace_output(1), tmp_path / "one.jsonl")
    asked = {"trace": "one.jsonl", "limits": {"tpot_s.p99": {"max": 1}}}
    code, out, _ = check("--scenario", scenario(tmp_path, check=asked), capsys=capsys)
    assert code == 1
    assert "no such figure" in out


def replace_output(tokens: int):
    trace = read("chat", limit=5)
    return replace(trace, requests=trace.requests.assign(output_tokens=tokens))


def test_the_file_serves_replay_as_well(tmp_path, capsys):
    assert run(["replay", "chat", "--limit", "5", "--scenario", scenario(tmp_path), "--json"]) == 0


def test_the_example_holds(capsys):
    example = Path(__file__).parents[3] / "examples" / "check.yaml"
    code, out, _ = check("--scenario", example, "--skip-regression", capsys=capsys)
    assert code == 0, out
    assert "3 regression checks not compared" in out


def test_a_gate_does_not_pass_on_less_than_it_asks_for(tmp_path, capsys):
    """Without a baseline a file's regressions can't be judged: only where that is said does it pass."""
    file = scenario(tmp_path, check={**CHECK, "slo": "ttft_p99<10s"})
    code, out, err = check("--scenario", file, capsys=capsys)
    assert (code, out) == (2, "")
    assert "needs a baseline" in err and "--skip-regression judges the SLO and the limits alone" in err
    code, _, err = check("--scenario", file, "--skip-regression", "--baseline", tmp_path, capsys=capsys)
    assert code == 2 and "--skip-regression leaves out" in err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"limits": {"ttft_p99": {"max": 1}}}, "did you mean ttft_s.p99?"),
        ({"regression": {"speed": 1}}, "no figure is called 'speed'"),
        ({"limits": {"ttft_s.p99": {"most": 1}}}, "check.limits.ttft_s.p99.most"),
        ({"limits": {"ttft_s.p99": {}}}, "give min, max or both"),
        ({"limits": {"ttft_s.p99": {"max": "1 s"}}}, "check.limits.ttft_s.p99.max is '1 s'"),
        ({"regression": {"ttft_s.p99": -1}}, "give a percent of at least 0"),
        ({"regression": {}}, "asks nothing"),
        ({"slo": "ttft_p99<fast"}, "ttft_p99<fast"),
        ({"draws": 2}, "check.draws is 2"),
        ({"rate": 8}, "check.rate and check.speedup both set the load"),
        ({"trace": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"colour": 1}, "field 'check.colour' is not known"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_and_exit_2(changes, words, tmp_path, capsys):
    file = scenario(tmp_path, check={**CHECK, **changes})
    into = tmp_path / "base"
    code, out, err = check("--scenario", file, "--write-baseline", into, capsys=capsys)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_regressions_alone_without_a_baseline_check_nothing_and_end_with_2(tmp_path, capsys):
    code, out, err = check("--scenario", scenario(tmp_path), capsys=capsys)
    assert (code, out) == (2, "")
    assert "check.regression needs a baseline to compare with; give --baseline" in err


def test_writing_a_baseline_says_that_nothing_was_checked(tmp_path, capsys):
    into = tmp_path / "base"
    code, out, _ = check("--scenario", scenario(tmp_path), "--write-baseline", into, capsys=capsys)
    assert code == 0
    assert "nothing was checked" in " ".join(out.split()) and "hold" not in out


def test_undecided_regressions_are_counted_and_fail_where_the_file_says_so():
    change = [10.0, 9.0, 13.0, 8.0, 14.0]
    findings = {}
    for verdict in ("pass", "fail"):
        asked = Check(trace="chat", regression={"ttft_s.p99": 5, "tpot_s.p50": 5}, undecided=verdict)
        before = {"ttft_s.p99": [10.0] * 5, "tpot_s.p50": [1.0] * 5}
        after = {"ttft_s.p99": change, "tpot_s.p50": [1.0] * 5}
        findings[verdict] = regressions(CheckFile("check.yaml", Scenario(), asked, None), before, after)
    assert judged(findings["pass"]) == "all 2 checks hold, 1 undecided"
    assert judged(findings["fail"]) == "1 of 2 checks failed, 1 undecided"
    assert [finding.undecided for finding in findings["fail"]] == [True, False]


def test_a_default_that_is_written_out_is_no_change(baseline, tmp_path, capsys):
    file = scenario(tmp_path, gpu_memory_utilization=0.92)
    _, out, _ = check("--scenario", file, "--baseline", baseline, capsys=capsys)
    assert "changed since the baseline" not in out
    file = scenario(tmp_path, gpu_memory_utilization=0.8)
    _, out, _ = check("--scenario", file, "--baseline", baseline, capsys=capsys)
    assert "changed since the baseline: gpu_memory_utilization: 0.92 -> 0.8" in out


def test_a_file_without_the_section_is_told_so(tmp_path, capsys):
    path = tmp_path / "plain.yaml"
    path.write_text("gpu: H200\n")
    code, _, err = check("--scenario", path, capsys=capsys)
    assert code == 2
    assert "has no section `check:`" in err


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (None, "has no baseline.json"),
        ("", "is corrupt"),
        ("{not json", "is corrupt"),
        ('{"version": 1}', "is corrupt"),
        ("cut", "is corrupt"),
        ("other trace", "another trace"),
        ("ragged", "not as many each"),
        ("lacks", "has no figure 'ttft_s.p99'"),
        ("version", "has version 2"),
    ],
)
def test_a_corrupt_baseline_is_one_line_and_exit_2(body, words, baseline, tmp_path, capsys):
    folder = tmp_path / "base"
    folder.mkdir()
    good = (baseline / "baseline.json").read_text()
    document = json.loads(good)
    if body == "cut":
        body = good[: len(good) // 2]
    elif body == "other trace":
        body = json.dumps({**document, "trace_digest": "0" * 32})
    elif body == "ragged":
        document["figures"]["ttft_s.p50"].pop()
        body = json.dumps(document)
    elif body == "lacks":
        del document["figures"]["ttft_s.p99"]
        body = json.dumps(document)
    elif body == "version":
        body = json.dumps({**document, "version": 2})
    if body is not None:
        (folder / "baseline.json").write_text(body)
    code, out, err = check("--scenario", scenario(tmp_path), "--baseline", folder, capsys=capsys)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_an_unreachable_dask_scheduler_is_one_line_and_no_success(baseline, tmp_path, capsys):
    pytest.importorskip("distributed")
    code = run(
        [
            "check",
            "--scenario",
            scenario(tmp_path),
            "--baseline",
            str(baseline),
            "--cluster",
            "tcp://127.0.0.1:9",
        ]
    )
    err = capsys.readouterr().err
    assert code == 2
    assert err.count("\n") == 1
    assert "tcp://127.0.0.1:9" in err


def test_a_web_server_in_place_of_a_scheduler_is_told(baseline, tmp_path, capsys):
    pytest.importorskip("distributed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer, args=(server,), daemon=True).start()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        code = run(
            ["check", "--scenario", scenario(tmp_path), "--baseline", str(baseline), "--cluster", address]
        )
    err = capsys.readouterr().err
    assert code == 2
    assert err.count("\n") == 1
    assert "no Dask scheduler answers there (what does speaks another protocol)" in err


def _answer(server):
    with suppress(OSError):
        while True:
            client, _ = server.accept()
            client.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + b" " * 64)


def test_equal_requests_have_equal_digests_whatever_their_file(tmp_path):
    trace = read("chat", limit=50)
    write(trace, tmp_path / "t.parquet")
    write(trace, tmp_path / "t.jsonl")
    assert digest(read(tmp_path / "t.parquet")) == digest(read(tmp_path / "t.jsonl")) == digest(trace)
    longer = replace(trace, requests=trace.requests.assign(output_tokens=trace.requests["output_tokens"] + 1))
    assert digest(longer) != digest(trace)


@given(
    st.lists(st.floats(1, 100), min_size=5, max_size=20),
    st.floats(0.5, 2.0),
)
def test_pairs_that_all_change_alike_leave_no_doubt(values, factor):
    """However much draws differ from each other, a constant factor on each is seen as that factor."""
    change = paired(values, [value * factor for value in values])
    assert change.percent == pytest.approx(100 * (factor - 1), abs=1e-6)
    assert change.draws == len(values)
    assert change.low - 1e-6 <= change.percent <= change.high + 1e-6


def test_draws_without_the_figure_are_left_out_in_pairs():
    change = paired([1.0, None, 3.0, 5.0], [2.0, 9.0, None, 6.0])
    assert (change.before, change.after) == (3.0, 4.0)
    assert paired([1.0, None], [1.0, 2.0]) is None
    assert paired([0.0, 0.0], [1.0, 1.0]).low == float("inf")
    assert paired([0.0, 0.0], [0.0, 0.0]).high == 0.0
