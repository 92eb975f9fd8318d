"""Files that people have: what load tools and gateways write, and what only looks like a trace."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pagecast.planner_app.cli import run
from pagecast.sim.core.errors import BadInput
from pagecast.traces.read import LENGTHS_ONLY, read

# The same two requests in every form: 100 and 50 prompt tokens, 3 and 7 generated, half a second apart.
ARRIVALS, INPUTS, OUTPUTS = [0.0, 0.5], [100, 50], [3, 7]


def lines(*rows: dict) -> str:
    return "\n".join(map(json.dumps, rows)) + "\n"


def bench(**more) -> dict:
    return {
        "input_lens": [100, 50],
        "output_lens": [3, 7],
        "ttfts": [0.1, 0.2],
        "itls": [[0.2, 0.2], [0.1] * 6],
        **more,
    }


def guidellm(*starts: float, **more: list) -> dict:
    rows = zip(starts, (100, 50), (3, 7), (0.5, 0.8), (100, 200), strict=True)
    names = (
        "request_start_time",
        "prompt_tokens",
        "output_tokens",
        "request_latency",
        "time_to_first_token_ms",
    )
    done = [dict(zip(names, row, strict=True)) for row in rows]
    return {"requests": {"successful": done, "errored": [], "incomplete": [], **more}}


def lifecycle(start: float, inputs: int, outputs: int, first: float, end: float, error=None) -> dict:
    info = {"input_tokens": inputs, "output_tokens": outputs, "output_token_times": [start + first]}
    times = {"scheduled_time": start, "start_time": start, "end_time": start + end}
    return {**times, "info": info, "error": error}


def span(start_ns: int, end_ns: int, name: str = "llm_request", **attributes) -> dict:
    values = [{"key": key, "value": value} for key, value in attributes.items()]
    times = {"startTimeUnixNano": str(start_ns), "endTimeUnixNano": str(end_ns)}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [{"name": name, **times, "attributes": values}]}]}]}


def usage(inputs: int, outputs: int, ttft: float, names=("prompt_tokens", "completion_tokens")) -> dict:
    counts = {
        f"gen_ai.usage.{names[0]}": {"intValue": str(inputs)},
        f"gen_ai.usage.{names[1]}": {"intValue": outputs},
    }
    return {**counts, "gen_ai.latency.time_to_first_token": {"doubleValue": ttft}}


SPANS = (
    span(10**18, 10**18 + 5 * 10**8, **usage(100, 3, 0.1)),
    span(10**18, 10**18 + 5, "http", **{"http.route": {"stringValue": "/v1"}}),
    span(10**18 + 5 * 10**8, 10**18 + 13 * 10**8, **usage(50, 7, 0.2, ("input_tokens", "output_tokens"))),
)
OF_JAEGER = {
    "data": [
        {
            "traceID": "a",
            "spans": [
                {
                    "traceID": "a",
                    "operationName": "llm_request",
                    "startTime": 10**15 + after,
                    "duration": duration,
                    "tags": [
                        {"key": "gen_ai.usage.prompt_tokens", "type": "int64", "value": inputs},
                        {"key": "gen_ai.usage.completion_tokens", "type": "int64", "value": outputs},
                        {"key": "gen_ai.latency.time_to_first_token", "type": "float64", "value": ttft},
                    ],
                }
            ],
        }
        for after, duration, inputs, outputs, ttft in (
            (500_000, 800_000, 50, 7, 0.2),
            (0, 500_000, 100, 3, 0.1),
        )
    ]
}
SPEND = {
    "request_id": "a",
    "startTime": "2026-11-01T10:00:00Z",
    "endTime": "2026-11-01T10:00:00.5Z",
    "completionStartTime": "2026-11-01T10:00:00.1Z",
    "prompt_tokens": 100,
    "completion_tokens": 3,
    "metadata": {"status": "success"},
}
LATER_SPEND = {
    **SPEND,
    "startTime": "2026-11-01T10:00:00.5Z",
    "endTime": "2026-11-01T10:00:01.3Z",
    "completionStartTime": "2026-11-01T10:00:00.7Z",
    "prompt_tokens": 50,
    "completion_tokens": 7,
}


def aiperf(start_ns: int, inputs: int, outputs: int, ttft: float, e2e: float) -> dict:
    values = {
        "input_sequence_length": inputs,
        "output_sequence_length": outputs,
        "time_to_first_token": ttft,
        "request_latency": e2e,
    }
    metrics = {
        name: {"value": value, "unit": "tokens" if name.endswith("length") else "ms"}
        for name, value in values.items()
    }
    about = {"request_start_ns": start_ns, "benchmark_phase": "profiling", "was_cancelled": False}
    return {"metadata": about, "metrics": metrics, "error": None}


CANCELLED = {
    "metadata": {"request_start_ns": 10**18, "benchmark_phase": "profiling", "was_cancelled": True},
    "metrics": {},
    "error": {"code": 499},
}
FORMS = {
    "vllm, a list": json.dumps([bench(start_times=[7.0, 7.5])]),
    "spans of Jaeger": json.dumps(OF_JAEGER),
    "spans of Tempo": json.dumps({"batches": [part for one in SPANS for part in one["resourceSpans"]]}),
    "LiteLLM's JSON": json.dumps([SPEND, LATER_SPEND]),
    "LiteLLM by line": lines(LATER_SPEND, SPEND),
    "AIPerf": lines(aiperf(10**18, 100, 3, 100, 500), aiperf(10**18 + 5 * 10**8, 50, 7, 200, 800)),
    "AIPerf, cancelled": lines(
        CANCELLED, aiperf(10**18 + 5 * 10**8, 50, 7, 200, 800), aiperf(10**18, 100, 3, 100, 500)
    ),
    "vllm": json.dumps(bench(start_times=[7.0, 7.5])),
    "sglang, two places": json.dumps(bench(request_rate=float("inf"), max_concurrency=1)),
    "sglang with an error": json.dumps(
        {
            **bench(start_times=[1.0, 1.5, 1.2]),
            "input_lens": [100, 50, 9],
            "output_lens": [3, 7, 9],
            "ttfts": [0.1, 0.2, 0],
            "itls": [[0.2, 0.2], [0.1] * 6, []],
            "errors": ["", "", "refused"],
        }
    ),
    "guidellm": json.dumps({"benchmarks": [guidellm(1000.0, 1000.5)]}),
    "guidellm, cut off": json.dumps(
        {"benchmarks": [guidellm(1000.0, 1000.5, incomplete=[{}])], "metadata": {}, "metrics": {}}, indent=1
    ),
    "inference-perf": json.dumps([lifecycle(7, 100, 3, 0.1, 0.5), lifecycle(7.5, 50, 7, 0.2, 0.8)]),
    "inference-perf, failed": json.dumps(
        [
            lifecycle(7.5, 50, 7, 0.2, 0.8),
            lifecycle(7, 100, 3, 0.1, 0.5),
            lifecycle(7, 1, 0, 0, 1, {"type": "x"}),
        ]
    ),
    "spans by line": lines(*SPANS),
    "spans in one document": json.dumps(
        {"resourceSpans": [part for one in SPANS for part in one["resourceSpans"]]}, indent=2
    ),
    "LiteLLM": "request_id,startTime,endTime,completionStartTime,prompt_tokens,completion_tokens,status\n"
    "b,2026-11-01T10:00:00.5+00:00,2026-11-01T10:00:01.3+00:00,2026-11-01T10:00:00.7+00:00,50,7,success\n"
    "a,2026-11-01T11:00:00+01:00,2026-11-01T10:00:00.5Z,2026-11-01T10:00:00.1Z,100,3,success\n"
    "c,2026-11-01T10:00:00Z,2026-11-01T10:00:00Z,,100,0,failure\n",
    "seconds and milliseconds": "ts,prompt_tokens,completion_tokens,ttft_ms,latency_ms\n"
    "1700000000.0,100,3,100,500\n1700000000.5,50,7,200,800\n",
    "our own": "arrival_s,input_tokens,output_tokens,ttft_s,e2e_s\n7,100,3,0.1,0.5\n7.5,50,7,0.2,0.8\n",
}
LATER = {"sglang, two places"}  # which has the second start where the first ends: half a second as well


@pytest.mark.parametrize("name", FORMS)
def test_what_load_tools_write_has_requests_and_latencies(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text(FORMS[name])
    trace = read(tmp_path / "file", sort=True)
    arrival = trace.seconds("arrival_s")
    assert (arrival - arrival[0]).tolist() == pytest.approx(ARRIVALS, abs=1e-6)
    assert trace.integers("input_tokens").tolist() == INPUTS
    assert trace.integers("output_tokens").tolist() == OUTPUTS
    assert trace.measured is not None
    assert trace.measured["ttft_s"].tolist() == pytest.approx([0.1, 0.2], abs=1e-6)
    assert trace.measured["e2e_s"].tolist() == pytest.approx([0.5, 0.8], abs=1e-6)
    assert trace.lengths_only and trace.notes[-1] == LENGTHS_ONLY


TABLES = {
    "locust's requests": "timestamp,request_type,response_time,prompt_tokens,completion_tokens\n"
    "1700000000.0,POST,500,100,3\n1700000000.5,POST,800,50,7\n",
    "tabs": "request_time\tprompt_tokens\tcompletion_tokens\n2026-11-01T10:00:00+0100\t100\t3\n"
    "2026-11-01T10:00:00.5+0100\t50\t7\n",
    "a gateway's log": "timestamp,user_id,prompt_tokens,completion_tokens,status\n"
    "2026-11-01 10:00:00,u,100,3,200\n2026-11-01 10:00:00.25,u,9,9,429\n2026-11-01 10:00:00.5,v,50,7,200\n"
    "2026-11-01 10:00:00.5,v,50,0,200\n",
    "milliseconds": "created_at;input_tokens;output_tokens\n1700000000000;100;3\n1700000000500;50;7\n",
    "nested JSON": lines(
        {"createdAt": "2026-11-01T12:00:00+02:00", "usage": {"prompt_tokens": 100, "completion_tokens": 3}},
        {"createdAt": "2026-11-01T10:00:00.5Z", "usage": {"prompt_tokens": 50, "completion_tokens": 7}},
        {"createdAt": "2026-11-01T10:00:01Z", "usage": {"prompt_tokens": 50}, "error": "timeout"},
    ),
    "an array": json.dumps(
        [
            {"ts": 0, "promptTokens": 100, "completionTokens": 3},
            {"ts": 0.5, "promptTokens": 50, "completionTokens": 7},
        ]
    ),
}


@pytest.mark.parametrize("name", [*TABLES, "parquet"])
def test_tables_are_read_by_the_usual_names_of_columns(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    if name == "parquet":
        times = pd.to_datetime(["2026-11-01T10:00:00.0", "2026-11-01T10:00:00.5"])
        frame = pd.DataFrame({"request_time": times, "prompt_len": INPUTS, "output_len": OUTPUTS})
        frame.assign(request_time=times.astype("datetime64[ns]").astype("int64")).to_parquet(path)
    else:
        path.write_text(TABLES[name])
    trace = read(path)
    assert trace.seconds("arrival_s").tolist() == pytest.approx(ARRIVALS)
    assert trace.integers("input_tokens").tolist() == INPUTS
    assert trace.integers("output_tokens").tolist() == OUTPUTS
    assert any("arrival from" in note and "output from" in note for note in trace.notes)
    if name == "a gateway's log":
        assert any("2 of 4 requests" in note for note in trace.notes)


AZURE = {
    "zones": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00+00:00,100,3\n"
    "2024-05-10 00:00:00.500000+00:00,50,7\n",
    "images": "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
    "2024-10-15 00:00:00.0000000,0,100,3\n2024-10-15 00:00:00.5000000,2,50,7\n",
}
MOONCAKE = {
    "fractions": lines(
        {"timestamp": 0.0, "input_length": 100, "output_length": 3, "hash_ids": [7]},
        {"timestamp": 500.0, "input_length": 50, "output_length": 7, "hash_ids": [7]},
    ),
    "another order": lines(
        {"hash_ids": [7], "output_length": 3, "input_length": 100, "timestamp": 9000},
        {"hash_ids": [7], "output_length": 7, "input_length": 50, "timestamp": 9500},
    ),
}


@pytest.mark.parametrize("text", [*AZURE.values(), *MOONCAKE.values()], ids=[*AZURE, *MOONCAKE])
def test_public_traces_are_read_in_their_variants(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    trace = read(tmp_path / "file")
    arrival = trace.seconds("arrival_s")
    assert (arrival - arrival[0]).tolist() == pytest.approx(ARRIVALS)
    assert trace.integers("input_tokens").tolist() == INPUTS
    assert trace.integers("output_tokens").tolist() == OUTPUTS


def test_columns_are_named_on_the_command_line(tmp_path: Path, capsys) -> None:
    path = tmp_path / "odd.csv"
    path.write_text("begun,who,asked,answered\n1000,a,100,3\n1500,b,50,7\n")
    assert run(["trace", "describe", str(path), "--json"]) == 2
    assert "--column arrival=NAME" in capsys.readouterr().err
    mapped = ["--column", "arrival=begun:ms", "--column", "input=asked", "--column", "output=answered"]
    assert run(["trace", "describe", str(path), *mapped, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["duration_s"] == pytest.approx(0.5)
    assert facts["sharing"] is None
    assert facts["input_tokens"]["total"] == 150
    wrong = ["--column", "arrival=later", "--column", "input=asked", "--column", "output=answered"]
    assert run(["trace", "describe", str(path), *wrong]) == 2
    assert "there is no column later; it has begun, who, asked, answered" in capsys.readouterr().err
    assert run(["trace", "describe", str(path), "--column", "begin=begun"]) == 2
    assert "write TRACE=COLUMN, where TRACE is arrival, input, output" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vllm", "guidellm"])
def test_one_run_of_several_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    if name == "vllm":
        path.write_text(lines(*(bench(request_rate=rate, start_times=[1.0, 1.5]) for rate in (5, "inf"))))
    else:
        path.write_text(json.dumps({"benchmarks": [guidellm(10.0, 10.5), guidellm(12.0, 12.5)]}))
    both = read(path)
    assert len(both) == 4 and "2 runs in the file" in both.notes[0]
    assert float(both.seconds("arrival_s")[2]) > 1.29  # the first has ended
    assert read(path, run=2).seconds("arrival_s").tolist() == ARRIVALS
    with pytest.raises(BadInput, match=r"run 3 is asked for .* there are 2"):
        read(path, run=3)


def test_requests_of_a_closed_loop_start_where_one_before_them_ends(tmp_path: Path) -> None:
    tokens = [[0.1] * 9, [0.1] * 2, [0.1] * 2, [0.1] * 2]
    document = {"input_lens": [5] * 4, "output_lens": [10, 3, 3, 3], "ttfts": [0.1] * 4, "itls": tokens}
    (tmp_path / "file").write_text(json.dumps({**document, "request_rate": "inf", "max_concurrency": 2}))
    trace = read(tmp_path / "file")
    assert trace.seconds("arrival_s").tolist() == pytest.approx([0, 0, 0.3, 0.6])
    assert "at most 2 at a time, by the latencies measured" in trace.notes[0]


@pytest.mark.parametrize("layout", [json.dumps, lambda rows: lines(*rows)], ids=["array", "lines"])
def test_failed_requests_of_llmperf_are_left_out(layout: Callable[[list], str], tmp_path: Path) -> None:
    one = {"error_code": None, "ttft_s": 0.1, "number_output_tokens": 3, "number_input_tokens": 100}
    failed = {**one, "error_code": 429, "number_output_tokens": 0}
    other = {**one, "number_output_tokens": 7, "number_input_tokens": 50}
    (tmp_path / "file").write_text(layout([one, failed, other]))
    trace = read(tmp_path / "file")
    assert trace.integers("input_tokens").tolist() == INPUTS
    assert any("failed: 1 of 3 requests" in note for note in trace.notes)


def test_llmperf_has_no_times(tmp_path: Path) -> None:
    row = {
        "number_input_tokens": 100,
        "number_output_tokens": 3,
        "end_to_end_latency_s": 1.0,
        "error_code": None,
    }
    (tmp_path / "file").write_text(
        json.dumps([row, {**row, "error_code": 500}, {**row, "number_input_tokens": 50}])
    )
    trace = read(tmp_path / "file", session_rate=4.0)
    assert trace.integers("input_tokens").tolist() == [100, 50]
    assert trace.measured is None
    assert "requests start at 4 per second" in trace.notes[0] and "1 of 3" in trace.notes[1]


METRIC = 'vllm:num_requests_running{engine="0"} 3.0\n'
LOG = "(APIServer pid=1) INFO 11-01 10:00:10 Engine 000: Avg prompt throughput: 12.0 tokens/s\n"
WRONG = {
    json.dumps(
        {"num_prompts": 5, "total_input_tokens": 9, "mean_ttft_ms": 3}
    ): "summary of a benchmark.*--save-detailed",
    json.dumps(
        {"backend": "sglang", "total_input_tokens": 9, "mean_ttft_ms": 3}
    ): "summary.*--output-details",
    "# HELP sglang:token_usage The token usage\n# TYPE sglang:token_usage gauge\n": "metrics.*from-metrics",
    METRIC: "metrics of a server.*match --metrics",
    json.dumps({"status": "success", "data": {"resultType": "matrix", "result": []}}): "metrics of a server",
    LOG: "an engine's log.*--log",
    "[2026-11-01 10:00:00] server_args=ServerArgs(model_path='x')\n": "an engine's log.*--log",
    "[TensorRT-LLM][INFO] Number of tokens per block: 32\n": "an engine's log.*--log",
    "Method,Name,Error,Occurrences\nPOST,/v1,timeout,3\n": "locust's history or failures.*prompt_tokens",
    "Count,Message,Traceback,Nodes\n1,x,y,z\n": "locust's history or failures.*prompt_tokens",
    "num_prompts,request_rate,mean_ttft_ms\n100,1,30\n": "runs of a sweep.*--save-detailed",
    json.dumps(
        {"avg_latency": 1.0, "latencies": [1.0], "percentiles": {}}
    ): "vllm bench latency.*bench serve",
    json.dumps({"elapsed_time": 3.0, "total_num_tokens": 9}): "vllm bench throughput.*bench serve",
    "benchmarks:\n- requests:\n    successful: []\n": "guidellm's report in YAML.*benchmarks.json",
    "Run Info,Run Info,Benchmark\nId,Model,Strategy\n": "guidellm's table.*benchmarks.json",
    "Metric,avg,min,max,p99\nTime To First Token (ms),1,2,3,4\n": "AIPerf or genai-perf.*profile_export",
    json.dumps(
        {"request_throughput": {}, "request_latency": {}, "input_config": {}}
    ): "AIPerf or genai-perf.*profile_export.jsonl",
    "Type,Name,Request Count,Failure Count\nPOST,/v1,4,0\n": "locust's statistics.*prompt_tokens",
    "Timestamp,User Count,Type,Name,Requests/s\n1,2,a,b,3\n": "locust's history.*prompt_tokens",
    "results:\n  request_performance:\n    aggregate: {}\n": "inference-perf's report.*per_request_lifecycle",
    json.dumps({"load_summary": {}, "successes": {}, "failures": {}}): "inference-perf's summary",
    json.dumps(
        {"service_kind": "openai", "experiments": [{"response_timestamps": []}]}
    ): "genai-perf.*AIPerf",
    json.dumps(
        {"request_throughput": {}, "request_latency": {}, "time_to_first_token": {}, "input_config": {}}
    ): "profile_export.jsonl",
    json.dumps({"results_ttft_s_mean": 1.0, "model": "m"}): "llmperf's summary.*individual_responses",
    "<!DOCTYPE html><html></html>": "a web page",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_told_what_it_is(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(BadInput, match=WRONG[text]):
        read(tmp_path / "file")


READ = {
    **dict.fromkeys(
        ("azure2024.csv", "azure_lmm.csv", "guidellm.json", "litellm_spend_logs.csv", "prod.csv"), 6.16
    ),
    **dict.fromkeys(
        ("per_request_lifecycle_metrics.json", "profile_export.jsonl", "vllm_detailed.json"), 6.16
    ),
    "vllm_otel_spans.jsonl": 6.16,
    **dict.fromkeys(
        ("sglang_bench.jsonl", "llmperf_individual_responses.json", "mooncake_multi.jsonl"), None
    ),
    "vllm_appended.json": None,
}
REFUSED = {
    "genai_perf_profile_export.json": "genai-perf",
    "locust_stats.csv": "locust",
    "metrics.prom": "metrics of a server",
    "report.yaml": "inference-perf",
    "vllm.log": "an engine's log",
    "vllm_summary.json": "summary of a benchmark",
}


def test_files_of_the_field_are_read_or_told_what_they_are(shared: Path) -> None:
    folder = shared / "field" / "formats"
    if not folder.is_dir():
        pytest.skip("no files of the field")
    assert {path.name for path in folder.iterdir()} == {*READ, *REFUSED}
    for name, duration in READ.items():
        trace = read(folder / name)
        times = 2 if name == "vllm_appended.json" else 1
        assert len(trace) == 40 * times, name
        assert int(trace.integers("input_tokens").sum()) == 51_128 * times, name
        assert int(trace.integers("output_tokens").sum()) == 7_392 * times, name
        if duration is not None:
            assert float(np.ptp(trace.seconds("arrival_s"))) == pytest.approx(duration, abs=0.005), name
    for name, words in REFUSED.items():
        with pytest.raises(BadInput, match=words):
            read(folder / name)
