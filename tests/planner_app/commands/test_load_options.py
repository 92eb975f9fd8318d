"""Loads on the command line: made requests, closed loops, curves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pagecast.planner_app.cli import run

SERVER = ("--gpu", "H100", "--num-gpu-blocks", 2000)
MADE = ("--input-len", 200, "--output-len", 20, "--num-prompts", 40)


@pytest.fixture
def body(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs a command that succeeds: its JSON."""

    def call(*arguments: object) -> dict[str, Any]:
        code = run([*map(str, arguments), "--json"])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        answer: dict[str, Any] = json.loads(printed.out)
        return answer

    return call


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that is refused: what it prints."""

    def call(*arguments: object) -> str:
        assert run([*map(str, arguments)]) == 2
        return " ".join(capsys.readouterr().err.split())

    return call


def test_a_closed_loop_needs_no_trace(body):
    few, many = (body("replay", *MADE, *SERVER, "--max-concurrency", users) for users in (2, 10))
    assert few["requests"] == many["requests"] == 40
    assert few["ttft_s"]["p99"] < many["ttft_s"]["p99"]
    assert few["makespan_s"] > many["makespan_s"]


def test_a_trace_is_sent_as_the_load_says(body):
    own, at_once = (
        body("replay", "chat", "--limit", 40, *SERVER, *more) for more in ((), ("--concurrency", 4))
    )
    assert own["requests"] == at_once["requests"] == 40
    assert at_once["makespan_s"] != own["makespan_s"]


@pytest.mark.parametrize("more", [(), ("--replicas", 2)], ids=["replica", "fleet"])
def test_a_curve_has_a_point_for_each_concurrency(more: tuple[object, ...], tmp_path: Path, body):
    pytest.importorskip("plotly")
    report = tmp_path / "curve.html"
    points = body("replay", *MADE, *SERVER, *more, "--sweep-concurrency", "1,8", "--report", report)["points"]
    assert [point["concurrency"] for point in points] == [1, 8]
    assert points[0]["output_tokens_per_s"] < points[1]["output_tokens_per_s"]
    assert points[0]["ttft_s"]["p99"] < points[1]["ttft_s"]["p99"]
    assert points[0]["output_tokens_per_s_per_user"] == pytest.approx(1 / points[0]["tpot_s"]["p50"])
    assert "Throughput against latency" in report.read_text()
    alone = body("replay", *MADE, *SERVER, *more, "--concurrency", 8)
    assert points[1]["ttft_s"] == alone["ttft_s"]


def test_a_curve_tells_of_a_concurrency_that_its_requests_never_reach(capsys):
    ask = ["replay", "--gpu", "H100", "--input-len", "64", "--output-len", "8", "--num-prompts", "20"]
    assert run([*ask, "--sweep-concurrency", "4,32"]) == 0
    out = capsys.readouterr().out
    assert "20 requests never reach a concurrency of 32: take 160 or more" in out
    assert "at concurrency 32, the highest tried" in out
    assert run([*ask, "--sweep-concurrency", "2,20"]) == 0
    assert "never reach" not in capsys.readouterr().out


def test_a_check_may_make_its_requests(tmp_path: Path, body, refusal):
    file = tmp_path / "check.yaml"
    load = "{input_len: 200, output_len: 20, num_prompts: 40, concurrency: 8}"
    file.write_text(f"gpu: H100\ncheck:\n  load: {load}\n  limits: {{completed: {{min: 40, max: 40}}}}\n")
    assert body("check", "--scenario", file)["ok"]
    file.write_text("gpu: H100\ncheck:\n  load: {concurency: 8}\n  slo: ttft_p99<1s\n")
    assert "check.load: field 'concurency' is not known; did you mean concurrency?" in refusal(
        "check", "--scenario", file
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("replay",), "give a trace (a file, or a sample's name), or requests to make"),
        (("replay", "chat", "--input-len", 9), "leave input_len or the trace out"),
        (("replay", *MADE, "--sort"), "--sort is for a trace that is read"),
        (("replay", *MADE, "--sweep-concurrency", "1,x"), "give whole numbers with commas"),
        (("replay", *MADE, "--rate", 5), "--request-rate says how often made requests come"),
        (
            ("replay", "--input-len", "abc"),
            "input_len: lengths 'abc': not understood; write a number, or one of",
        ),
        (
            ("replay", "--input-len", "uniform:500-100"),
            "input_len: lengths 'uniform:500-100': 500 is more than",
        ),
        (("replay", *MADE, "--concurrency", 0), "concurrency is 0: it must be at least 1"),
        (("replay", *MADE, "--request-rate", 0), "request_rate is 0.0: it must be above 0"),
        (("replay", *MADE, "--concurrency", "1,2"), "give a whole number; --sweep-concurrency takes several"),
        (("replay", *MADE, "--request-rate", "x"), "--request-rate is x: give a number"),
        (
            ("replay", *MADE, "--dataset-name", "random"),
            "--dataset-name, which load tools have: leave it out",
        ),
        (("replay", "--dataset-path", "a.json"), "--dataset-path; give the file as the trace"),
        (("plan", "chat", "--slo", "ttft_p99<1s", "--concurrency", 5), "which plan looks for: leave it out"),
    ],
)
def test_what_contradicts_a_load_is_refused(arguments: tuple[object, ...], problem: str, refusal):
    assert problem in refusal(*arguments)


def test_a_sweep_varies_the_load(body):
    made = ("--input-len", 200, "--num-prompts", 40)
    found = body("sweep", *made, *SERVER, "--set", "concurrency=1,10", "--set", "output-len=5,uniform:10-20")
    rows = {(row["concurrency"], row["output_len"]): row for row in found["trials"]}
    assert len(rows) == 4 and all(row["completed"] == 40 for row in rows.values())
    assert rows[1, "5"]["output_tokens"] == 200 < rows[10, "uniform:10-20"]["output_tokens"]
    assert rows[1, "5"]["ttft_p99_s"] < rows[10, "5"]["ttft_p99_s"]
    # It is the load, not the scenario, that varies: the most that the replica gives is told.
    assert found["cheapest"]["concurrency"] == 10
    served = body("replay", *made, *SERVER, "--concurrency", 10, "--output-len", 5)
    assert rows[10, "5"]["ttft_p99_s"] == served["ttft_s"]["p99"]


def test_a_load_in_a_sweep_is_checked(refusal):
    swept = ("sweep", *MADE, *SERVER)
    assert "concurrency=0,2: concurrency is 0" in refusal(*swept, "--set", "concurrency=0,2")
    assert "did you mean concurrency?" in refusal(*swept, "--set", "concurency=1,2")
    both = refusal(*swept, "--concurrency", 4, "--set", "concurrency=1,2")
    assert "--concurrency is what --set concurrency=1,2 varies" in both
    trace = refusal("sweep", "chat", *SERVER, "--set", "input_len=10,20")
    assert "input_len makes requests, and a trace has its own" in trace


def test_a_max_tokens_below_the_output_is_told(body):
    notes = body("replay", *MADE, *SERVER, "--max-tokens", 5)["notes"]
    assert "max_tokens is less than the output of 40 requests, and counted as their output" in notes
    assert body("replay", *MADE, *SERVER, "--max-tokens", "2X")["requests"] == 40


def test_rates_may_be_infinite(body):
    at_once = body("replay", *MADE, *SERVER, "--request-rate", "inf")
    assert at_once["makespan_s"] == body("replay", *MADE, *SERVER)["makespan_s"]
    even = body("replay", *MADE, *SERVER, "--request-rate", 4, "--burstiness", "inf")
    assert even["makespan_s"] >= 39 / 4
