"""`pagecast match` and `pagecast watch`: a measurement beside its forecast."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.commands.match import show, show_answer
from pagecast.planner_app.server.metrics import Histogram
from pagecast.sim.costs.measured.corrections import Corrections
from pagecast.sim.fitting.explain import Explained, Setup
from pagecast.sim.fitting.match import Match, MatchRow
from pagecast.sim.replay import replay
from pagecast.sim.runs.bench_results import read_results
from pagecast.sim.scenario import Scenario
from pagecast.traces.arrivals import ArrivalProcess
from pagecast.traces.generate import requests, two_spans
from pagecast.traces.lengths import parse
from pagecast.traces.operations import repeat

SCENARIO = Scenario(model="Qwen/Qwen3-8B", gpu="H100", num_gpu_blocks=20_000)
SETUP = ["--model", "Qwen/Qwen3-8B", "--gpu", "H100"]
LOG = """INFO 11-01 10:00:00 [core.py:71] Initializing a V1 LLM engine (v0.24.0) with config: \
model='Qwen/Qwen3-8B', tensor_parallel_size=1, kv_cache_dtype=auto, enable_prefix_caching=True
INFO 11-01 10:00:09 [kv_cache_utils.py:1229] GPU KV cache size: 320,016 tokens
"""


def written(folder: Path, scenario: Scenario, times: int = 1) -> Path:
    """Results of requests that `scenario` has served so often, as `vllm bench serve` writes them."""
    trace = requests(
        ArrivalProcess("poisson", 6), parse("uniform:800-2400"), parse("uniform:50-150"), count=40
    )
    own = two_spans(np.arange(40), np.zeros(40, int), np.arange(40), trace.integers("input_tokens"))
    served = replay(repeat(replace(trace, spans=own), times, 0), scenario).requests[-40:]
    rows = zip(served["output_tokens"], served["tpot_s"], strict=True)
    document = {
        "start_times": served["arrival_s"].tolist(),
        "input_lens": served["input_tokens"].tolist(),
        "output_lens": served["output_tokens"].tolist(),
        "ttfts": served["ttft_s"].tolist(),
        "itls": [[tpot] * (tokens - 1) for tokens, tpot in rows],
    }
    (folder / "run.json").write_text(json.dumps(document))
    return folder / "run.json"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Of a server of 20,000 blocks."""
    return written(tmp_path, SCENARIO)


def test_a_calibration_that_takes_a_figure_further_off_says_so(results, capsys) -> None:
    rows = (MatchRow("tpot_s.mean", 0.010, 0.012, 0.0101), MatchRow("ttft_s.mean", 0.10, 0.11, 0.15))
    setup = Setup(SCENARIO, SCENARIO.step_costs(), read_results(results))
    spread = tuple(tuple(row) for row in (0.01 * np.eye(3)).tolist())
    fitted = Corrections("mine", 0.0, 0.9, 1.0, spread, (0.5, 0.1, 0.1))
    found = Match("mine", rows, Explained(0.1, ()), fitted, setup, ())
    for tell in (lambda: show_answer(found, (), "written"), lambda: show(found)):
        tell()
        assert "with the calibration TTFT mean is further off: +50.0% for +10.0%" in capsys.readouterr().out


@pytest.mark.filterwarnings("error")
def test_results_without_times_of_tokens_are_refused_in_a_line(results, tmp_path, capsys) -> None:
    body = json.loads(results.read_text())
    del body["itls"]
    results.write_text(json.dumps(body))
    assert run(["match", "--results", str(results), *SETUP, "--out", str(tmp_path / "mine.json")]) == 2
    assert "a TPOT above 0 is known of 0 requests" in capsys.readouterr().err


def test_a_default_gpu_is_said(results, tmp_path, capsys) -> None:
    assert run(["match", "--results", str(results), *SETUP[:2], "--out", str(tmp_path / "mine.json")]) == 0
    assert "no --gpu was given: the forecast is of" in " ".join(capsys.readouterr().out.split())
    assert run(["match", "--results", str(results), *SETUP, "--out", str(tmp_path / "other.json")]) == 0
    assert "no --gpu" not in capsys.readouterr().out


def test_results_of_the_forecasts_own_set_up_match(results, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("PAGECAST_CALIBRATIONS", str(tmp_path / "own"))
    (tmp_path / "vllm.log").write_text(LOG)
    log = ["--log", str(tmp_path / "vllm.log"), "--gpu", "H100"]
    assert (
        run(["match", "--results", str(results), *log, "--client-ms", "0", "--name", "mine", "--explain"])
        == 0
    )
    out = capsys.readouterr().out
    lines = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert lines["KV blocks"][2:5] == ["20,000", "25,530", "+27.6%"]
    assert lines["TTFT mean"][-1] == lines["TPOT p50"][-1] == "+0.0%"
    assert "needs no explanation" in out
    assert "the hit rate is unknown, and counted as 0" in out
    assert any(line.startswith("agrees: means within 1% ") for line in out.splitlines())
    assert "no calibration is written" in out and "matched" not in out
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("cause", ["blocks", "chunk", "warm"])
def test_what_the_servers_files_tell_is_the_explanation(cause, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("PAGECAST_CALIBRATIONS", str(tmp_path / "own"))
    changed = {"blocks": {"num_gpu_blocks": 300}, "chunk": {"max_num_batched_tokens": 1024}, "warm": {}}
    file = written(tmp_path, SCENARIO.changed(**changed[cause]), 2 if cause == "warm" else 1)
    told = LOG.replace("320,016", "4,816") if cause == "blocks" else LOG
    told += "INFO Chunked prefill is enabled with max_num_batched_tokens=1024.\n" if cause == "chunk" else ""
    (tmp_path / "vllm.log").write_text(told)
    hits = "vllm:prefix_cache_queries_total 1000\nvllm:prefix_cache_hits_total 995\n"
    (tmp_path / "end.prom").write_text(shown(40) + (hits if cause == "warm" else ""))
    start = ["--launch", "vllm serve Qwen/Qwen3-8B --max-num-batched-tokens 8192", "--gpu", "H100"]
    files = ["--results", str(file), "--log", str(tmp_path / "vllm.log")]
    files += ["--metrics", str(tmp_path / "end.prom")] if cause == "warm" else []
    assert run(["match", *files, *start, "--client-ms", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["explanation"]["cause"] == cause
    words = {
        "blocks": "300 KV blocks, as the server says",
        "chunk": "1,024 tokens, as the log says, not 8,192",
    }
    assert words.get(cause, "found almost all of them there") in found["explanation"]["words"]
    before, after = found["figures"]["ttft_s.mean"]["errors_percent"]
    assert abs(after) < 2 < abs(before)


def test_a_measurement_is_asked_for(capsys) -> None:
    assert run(["match", *SETUP]) == 2
    assert (
        "give --results FILE of a benchmark, --metrics FILE of the server, or both" in capsys.readouterr().err
    )


def shown(served: int) -> str:
    """The metrics of a server after so many requests."""
    random = np.random.default_rng(0)
    values = {
        "time_to_first_token_seconds": np.full(served, 0.05),
        "request_time_per_output_token_seconds": np.full(served, 0.01),
        "e2e_request_latency_seconds": np.full(served, 1.0),
        "request_prompt_tokens": random.integers(500, 1500, served),
        "request_generation_tokens": random.integers(50, 150, served),
    }
    text = 'vllm:num_requests_running{engine="0",model_name="m"} 3\n'
    for name, each in values.items():
        histogram = Histogram(f"vllm:{name}", "x", (10, 100, 1000, 10000))
        for value in each.tolist():
            histogram.observe(value)
        for sample in histogram.family({}).samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
            text += f"{sample.name}{{{labels}}} {sample.value}\n"
    return text


@contextmanager
def server(answers: int) -> Iterator[tuple[str, list[str]]]:
    """A server that answers so often, with 30 more requests each time; its address and what it was asked."""
    asked: list[str] = []

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            self.send_response(200 if len(asked) <= answers else 503)
            self.end_headers()
            self.wfile.write(shown(30 * len(asked)).encode())

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Metrics)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", asked
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_a_server_is_watched_beside_its_forecast_and_only_read(capsys) -> None:
    with server(3) as (url, asked):
        assert run(["watch", url, *SETUP, "--interval", "0.5", "--times", "2"]) == 0
    out = capsys.readouterr().out
    assert asked == ["GET /metrics"] * 3
    assert "vllm, 30 requests in" in out and "vllm, 60 requests in" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("TTFT mean")]
    assert [row[2:4] for row in rows] == [["50", "ms"]] * 2
    assert "warning: TTFT mean is forecast" in out


def test_a_server_that_is_gone_ends_it_in_one_line(capsys) -> None:
    with server(2) as (url, _):
        assert run(["watch", url, *SETUP, "--interval", "0.1", "--json"]) == 2
    captured = capsys.readouterr()
    first = json.loads(captured.out.splitlines()[0])
    assert first["requests"] == 30 and first["server"]["e2e_s"] == pytest.approx(1.0)
    assert captured.err.splitlines()[-1].endswith("(Service Unavailable)") and "Traceback" not in captured.err
    assert run(["watch", "http://127.0.0.1:9", *SETUP]) == 2
    assert "the server does not answer" in capsys.readouterr().err
    assert run(["watch", "ftp://x", *SETUP]) == 2
    assert "no address of a server" in capsys.readouterr().err
