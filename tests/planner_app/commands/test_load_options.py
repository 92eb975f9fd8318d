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
        (("plan", "chat", "--slo", "ttft_p99<1s", "--concurrency", 5), "which plan looks for: leave it out"),
    ],
)
def test_what_contradicts_a_load_is_refused(arguments: tuple[object, ...], problem: str, refusal):
    assert problem in refusal(*arguments)
