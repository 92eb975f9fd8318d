"""`pagecast validate` of runs that lack what others have."""

import gzip
import json
from pathlib import Path

import pytest
from pagecast.planner_app.cli import run

META = {
    "name": "short",
    "engine": "vllm",
    "gpu": "H200",
    "model": "Qwen/Qwen3-8B",
    "usable_blocks": 100,
    "config": {"block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 512},
}
STEP = {
    "start_s": 0.0,
    "sched_s": 0.0001,
    "end_s": 0.007,
    "decode_n": 0,
    "decode_ctx": 0,
    "decode_max": 0,
    "prefill": [[40, 0]],
    "running": 1,
    "waiting": 0,
    "kv_usage": 0.03,
}
REQUESTS = (
    "index,arrival_s,submitted_s,input_tokens,output_tokens,first_token_s,finish_s,cached_tokens,tokens_out\n"
    "0,0.0,0.0,40,1,0.007,0.007,0,1\n"
)


@pytest.fixture
def one_token(tmp_path: Path) -> Path:
    """A run of one request with one output token, which has no TPOT."""
    (tmp_path / "meta.json").write_text(json.dumps(META))
    for name, line in (("steps", STEP), ("inputs", {"arrival_s": 0, "input_tokens": 40, "output_tokens": 1})):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(json.dumps(line).encode() + b"\n"))
    (tmp_path / "requests.csv.gz").write_bytes(gzip.compress(REQUESTS.encode()))
    return tmp_path


def test_a_latency_that_no_request_has_is_a_dash(one_token, capsys, tmp_path):
    report = tmp_path / "report.html"
    command = ["validate", str(one_token), "--costs", "roofline", "--report", str(report)]
    assert run([*command, "--replicates", "20", "--explain"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("TPOT")]
    assert len(rows) == 5
    assert all(set(row[2:]) == {"-"} for row in rows)
    assert "nan%" not in report.read_text()
    assert run([*command, "--replicates", "0", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["tpot_s"]["mean"]["measured"] is None
    assert body["ttft_s"]["mean"]["measured"] == pytest.approx(0.007)


def test_the_report_counts_the_measurements_inside_in_one_way(one_token, capsys, tmp_path):
    report = tmp_path / "report.html"
    command = ["validate", str(one_token), "--costs", "roofline", "--replicates", "20", "--json"]
    assert run([*command, "--report", str(report)]) == 0
    coverage = json.loads(capsys.readouterr().out)["coverage"]
    text, page = f"{coverage['inside']} of {coverage['figures']}", report.read_text()
    assert f"{text} measurements" in page and f"{text} intervals hold the measurement" in page


def test_no_figure_is_cut_where_the_output_has_80_columns(capsys):
    recorded = Path(__file__).parents[2] / "engine" / "recorded" / "h200j-qwen3-0.6b-fp8-rag"
    assert run(["validate", str(recorded), "--costs", "roofline", "--replicates", "2", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "\u2026" not in out
    table = [line for line in out.splitlines() if line.startswith(("TTFT", "TPOT", "E2E"))]
    assert len(table) == 15
    assert all(len(line) <= 80 and len(line.split()) == 9 for line in table)


@pytest.mark.parametrize("costs", ["roofline", "auto"])
def test_a_run_on_a_cpu_is_not_forecast(one_token, costs, capsys):
    (one_token / "meta.json").write_text(json.dumps({**META, "gpu": "CPU"}))
    assert run(["validate", str(one_token), "--costs", costs, "--replicates", "0"]) == 2
    error = capsys.readouterr().err
    assert "meta.json: the run was recorded on a CPU" in error
    assert "leave out --costs to compare its decisions" in error
    assert run(["validate", str(one_token)]) != 2
    assert "steps" in capsys.readouterr().out
