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


def lifecycle_of_today(start: float, inputs: int, outputs: int, first: float | None, end: float) -> dict:
    """As reportgen/base.py of inference-perf writes it since requests may hold images."""
    answer = {"output_tokens": outputs, "server_usage": {"completion_tokens": outputs}}
    if first is not None:
        times = {"chunk_times": [start + first], "output_token_times": [start + first]}
        answer |= {"response_chunks": ["x"], **times}
    asked = {"request_metrics": {"text": {"input_tokens": inputs}, "image": None}}
    info = {**asked, "response_metrics": answer, "extra_info": {}, "lora_adapter": None, "labels": {}}
    return {"start_time": start, "end_time": start + end, "request": "{}", "info": info, "error": None}


def printed(start: str, end: str, inputs: int, outputs: int, ttft: float) -> dict:
    """A span as the console exporter of OpenTelemetry's Python SDK prints it."""
    tokens = {"gen_ai.usage.prompt_tokens": inputs, "gen_ai.usage.completion_tokens": outputs}
    return {
        "name": "llm_request",
        "context": {"trace_id": "0x1", "span_id": "0x2", "trace_state": "[]"},
        "kind": "SpanKind.SERVER",
        "parent_id": None,
        "start_time": f"2026-11-01T10:00:{start}Z",
        "end_time": f"2026-11-01T10:00:{end}Z",
        "status": {"status_code": "UNSET"},
        "attributes": {**tokens, "gen_ai.latency.time_to_first_token": ttft},
    }


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


PRINTED = (
    printed("00.000000", "00.500000", 100, 3, 0.1),
    {**printed("00.100000", "00.200000", 9, 9, 0.1), "status": {"status_code": "ERROR"}},
    printed("00.500000", "01.300000", 50, 7, 0.2),
)
CANCELLED = {
    "metadata": {"request_start_ns": 10**18, "benchmark_phase": "profiling", "was_cancelled": True},
    "metrics": {},
    "error": {"code": 499},
}
FORMS = {
    "vLLM, a list": json.dumps([bench(start_times=[7.0, 7.5])]),
    "OTEL spans of Jaeger": json.dumps(OF_JAEGER),
    "OTEL spans of Tempo": json.dumps({"batches": [part for one in SPANS for part in one["resourceSpans"]]}),
    "OTEL spans printed, indented": "\n".join(json.dumps(one, indent=4) for one in PRINTED),
    "OTEL spans printed, by line": lines(*PRINTED),
    "LiteLLM's JSON": json.dumps([SPEND, LATER_SPEND]),
    "LiteLLM by line": lines(LATER_SPEND, SPEND),
    "LiteLLM, a page of its API": json.dumps({"data": [LATER_SPEND, SPEND], "total": 2, "page": 1}),
    "AIPerf": lines(aiperf(10**18, 100, 3, 100, 500), aiperf(10**18 + 5 * 10**8, 50, 7, 200, 800)),
    "AIPerf, cancelled": lines(
        CANCELLED, aiperf(10**18 + 5 * 10**8, 50, 7, 200, 800), aiperf(10**18, 100, 3, 100, 500)
    ),
    "vLLM": json.dumps(bench(start_times=[7.0, 7.5])),
    "SGLang, two places": json.dumps(bench(request_rate=float("inf"), max_concurrency=1)),
    "SGLang with an error": json.dumps(
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
    "inference-perf of today": json.dumps(
        [lifecycle_of_today(7, 100, 3, 0.1, 0.5), lifecycle_of_today(7.5, 50, 7, 0.2, 0.8)], indent=2
    ),
    "inference-perf, failed": json.dumps(
        [
            lifecycle(7.5, 50, 7, 0.2, 0.8),
            lifecycle(7, 100, 3, 0.1, 0.5),
            lifecycle(7, 1, 0, 0, 1, {"type": "x"}),
        ]
    ),
    "OTEL spans by line": lines(*SPANS),
    "OTEL spans in one document": json.dumps(
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
LATER = {"SGLang, two places"}  # which has the second start where the first ends: half a second as well


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
    "locust's requests, one of which failed": "timestamp,name,response_time,exception,prompt_tokens,"
    "completion_tokens\n1700000000.0,/v1,500,,100,3\n1700000000.2,/v1,500,HTTPError,9,9\n"
    "1700000000.5,/v1,800,,50,7\n",
    "CSV of OpenRouter": "generation_id,created_at,tokens_prompt,tokens_completion\n"
    "a,2026-11-01 10:00:00.000,100,3\nb,2026-11-01 10:00:00.500,50,7\n",
    "JSON lines of Bedrock": lines(
        {
            "timestamp": "2026-11-01T10:00:00Z",
            "input": {"inputTokenCount": 100},
            "output": {"outputTokenCount": 3},
        },
        {
            "timestamp": "2026-11-01T10:00:00.5Z",
            "input": {"inputTokenCount": 50},
            "output": {"outputTokenCount": 7},
        },
    ),
    "JSON lines, indented": "\n".join(
        json.dumps({"ts": ts, "prompt_tokens": inputs, "completion_tokens": outputs}, indent=2)
        for ts, inputs, outputs in zip(ARRIVALS, INPUTS, OUTPUTS, strict=True)
    ),
    "locust's requests": "timestamp,request_type,response_time,prompt_tokens,completion_tokens\n"
    "1700000000.0,POST,500,100,3\n1700000000.5,POST,800,50,7\n",
    "CSV with tabs": "request_time\tprompt_tokens\tcompletion_tokens\n2026-11-01T10:00:00+0100\t100\t3\n"
    "2026-11-01T10:00:00.5+0100\t50\t7\n",
    "CSV of a gateway": "timestamp,user_id,prompt_tokens,completion_tokens,status\n"
    "2026-11-01 10:00:00,u,100,3,200\n2026-11-01 10:00:00.25,u,9,9,429\n2026-11-01 10:00:00.5,v,50,7,200\n"
    "2026-11-01 10:00:00.5,v,50,0,200\n",
    "CSV in milliseconds": "created_at;input_tokens;output_tokens\n1700000000000;100;3\n1700000000500;50;7\n",
    "JSON lines, nested": lines(
        {"createdAt": "2026-11-01T12:00:00+02:00", "usage": {"prompt_tokens": 100, "completion_tokens": 3}},
        {"createdAt": "2026-11-01T10:00:00.5Z", "usage": {"prompt_tokens": 50, "completion_tokens": 7}},
        {"createdAt": "2026-11-01T10:00:01Z", "usage": {"prompt_tokens": 50}, "error": "timeout"},
    ),
    "JSON array": json.dumps(
        [
            {"ts": 0, "promptTokens": 100, "completionTokens": 3},
            {"ts": 0.5, "promptTokens": 50, "completionTokens": 7},
        ]
    ),
}


PARQUET = ("parquet", "parquet of dates")


@pytest.mark.parametrize("name", [*TABLES, *PARQUET])
def test_tables_are_read_by_the_usual_names_of_columns(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    if name in PARQUET:
        times = pd.to_datetime(["2026-11-01T10:00:00.0", "2026-11-01T10:00:00.5"])
        frame = pd.DataFrame({"request_time": times, "prompt_len": INPUTS, "output_len": OUTPUTS})
        if name == "parquet":
            frame = frame.assign(request_time=times.astype("datetime64[ns]").astype("int64"))
        frame.to_parquet(path)
    else:
        path.write_text(TABLES[name])
    trace = read(path)
    assert trace.seconds("arrival_s").tolist() == pytest.approx(ARRIVALS)
    assert trace.integers("input_tokens").tolist() == INPUTS
    assert trace.integers("output_tokens").tolist() == OUTPUTS
    assert any("arrival from" in note and "output from" in note for note in trace.notes)
    if name == "CSV of a gateway":
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
ONE_PAGE = "<!DOCTYPE html>\n<html><head><title>{}</title></head></html>"
OF_AIPERF = {"request_throughput": {}, "request_latency": {}, "input_config": {}}
OF_LOCUST = {"name": "/v1", "num_requests": 3, "num_failures": 0, "response_times": {"1": 2}, "start_time": 1}
FAILED = {"error_code": 429, "number_output_tokens": 0, "number_input_tokens": 9, "ttft_s": 0}
# By the kind of file that it is of, the text and what is said of it.
WRONG = {
    "vLLM, summary": (
        json.dumps({"num_prompts": 5, "total_input_tokens": 9, "mean_ttft_ms": 3}),
        "summary of a benchmark.*--save-detailed",
    ),
    "vLLM, sweep": ("num_prompts,request_rate,mean_ttft_ms\n100,1,30\n", "runs of a sweep.*--save-detailed"),
    "vLLM, latency": (
        json.dumps({"avg_latency": 1.0, "latencies": [1.0], "percentiles": {}}),
        "vllm bench latency.*bench serve",
    ),
    "vLLM, throughput": (
        json.dumps({"elapsed_time": 3.0, "total_num_tokens": 9}, indent=4),
        "vllm bench throughput.*bench serve",
    ),
    "SGLang, summaries": (
        lines(*[{"backend": "sglang", "total_input_tokens": 9, "mean_ttft_ms": 3}] * 2),
        "summary.*--output-details",
    ),
    "guidellm, YAML": (
        "benchmarks:\n- requests:\n    successful: []\n",
        "guidellm's report in YAML.*benchmarks.json",
    ),
    "guidellm, CSV": (
        "Run Info,Run Info,Benchmark\nId,Model,Strategy\n",
        "guidellm's table.*benchmarks.json",
    ),
    "guidellm, page": (ONE_PAGE.format("GuideLLM"), "guidellm's report as a web page; give benchmarks.json"),
    "guidellm, no usage": (
        json.dumps({"benchmarks": [guidellm(1.0, 2.0)]}).replace(
            '"prompt_tokens": 50', '"prompt_tokens": null'
        ),
        "prompt_tokens: is null, for the server sent no usage",
    ),
    "guidellm, all failed": (
        json.dumps({"benchmarks": [{"requests": {"successful": [], "errored": [{}], "incomplete": [{}]}}]}),
        "all of its 2 requests failed",
    ),
    "AIPerf, table": ("Metric,avg,min,max,p99\nTTFT (ms),1,2,3,4\n", "AIPerf or genai-perf.*profile_export"),
    "AIPerf, summary": (json.dumps(OF_AIPERF), "AIPerf or genai-perf.*profile_export.jsonl"),
    "AIPerf, raw": (
        lines({"metadata": {"request_start_ns": 1}, "payload": {}, "responses": []}),
        "AIPerf's raw export.*profile_export.jsonl",
    ),
    "AIPerf, inputs": (
        json.dumps({"data": [{"session_id": "a", "payloads": [{"messages": [{"role": "user"}]}]}]}),
        "what AIPerf sent.*profile_export.jsonl",
    ),
    "genai-perf, raw": (
        json.dumps({"service_kind": "openai", "experiments": [{"response_timestamps": []}]}),
        "genai-perf.*AIPerf",
    ),
    "genai-perf, summary": (
        json.dumps({**OF_AIPERF, "time_to_first_token": {}}, indent=2),
        "genai-perf.*profile_export.jsonl",
    ),
    "inference-perf, report": (
        "results:\n  request_performance:\n    aggregate: {}\n",
        "inference-perf's report.*per_request_lifecycle",
    ),
    "inference-perf, summary": (
        json.dumps({"load_summary": {}, "successes": {}, "failures": {}}),
        "inference-perf's summary",
    ),
    "llmperf, summary": (
        json.dumps({"results_ttft_s_mean": 1.0, "model": "m"}),
        "llmperf's summary.*individual_responses",
    ),
    "llmperf, all failed": (json.dumps([FAILED] * 3), "all of its 3 requests failed"),
    "locust, statistics": (
        "Type,Name,Request Count,Failure Count\nPOST,/v1,4,0\n",
        "locust's statistics.*prompt_tokens",
    ),
    "locust, history": (
        "Timestamp,User Count,Type,Name,Requests/s\n1,2,a,b,3\n",
        "locust's history.*prompt_tokens",
    ),
    "locust, failures": (
        "Method,Name,Error,Occurrences\nPOST,/v1,timeout,3\n",
        "locust's history or failures.*prompt_tokens",
    ),
    "locust, exceptions": (
        "Count,Message,Traceback,Nodes\n1,x,y,z\n",
        "locust's history or failures.*prompt_tokens",
    ),
    "locust, JSON": (json.dumps([OF_LOCUST], indent=4), "locust's statistics.*prompt_tokens"),
    "locust, page": (ONE_PAGE.format("Locust"), "locust's report as a web page.*prompt_tokens"),
    "LiteLLM, by day": (
        json.dumps([{"startTime": "2026-11-01", "spend": 1.0, "users": {}, "models": {}}]),
        "LiteLLM's spend by day.*export its table",
    ),
    "OTEL metrics": (json.dumps({"resourceMetrics": []}), "OpenTelemetry's metrics.*resourceSpans"),
    "OTEL spans without tokens": (json.dumps(SPANS[1]), "no span of 1 has gen_ai.usage.prompt_tokens"),
    "metrics, SGLang": (
        "# HELP sglang:token_usage The token usage\n# TYPE sglang:token_usage gauge\n",
        "metrics.*from-metrics",
    ),
    "metrics, vLLM": (METRIC, "metrics of a server.*match --metrics"),
    "metrics, TensorRT-LLM": (
        'trtllm_kv_cache_utilization{engine_type="trtllm"} 0.6\n',
        "metrics of a server",
    ),
    "metrics, a query": (
        json.dumps({"status": "success", "data": {"resultType": "matrix", "result": []}}),
        "metrics of a server",
    ),
    "metrics, an export": (
        lines({"metric": {"__name__": "vllm:num_requests_running"}, "values": [1], "timestamps": [2]}),
        "metrics of a server",
    ),
    "log, vLLM": (LOG, "an engine's log.*--log"),
    "log, SGLang": (
        "[2026-11-01 10:00:00] server_args=ServerArgs(model_path='x')\n",
        "an engine's log.*--log",
    ),
    "log, TensorRT-LLM": ("[TensorRT-LLM][INFO] Number of tokens per block: 32\n", "an engine's log.*--log"),
    "CSV with other dates": (
        "time,prompt_tokens,completion_tokens\n01/Nov/2026:10:00:00 +0000,100,3\n",
        "line 2, field time: '01/Nov/2026:10:00:00 .* is no date as 2026-11-01T10:00:00Z",
    ),
    "CSV with thousands": (
        'timestamp,prompt_tokens,completion_tokens\n1700000000,"1,100",3\n',
        "'1,100' is no number; write it without commas",
    ),
    "JSON lines of a batch": (
        lines({"custom_id": "a", "method": "POST", "url": "/v1", "body": {"messages": [{"role": "user"}]}}),
        "requests of a batch.*output file",
    ),
    "a web page": (ONE_PAGE.format("x"), "this is a web page; download the file itself"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_told_what_it_is(tmp_path: Path, name: str) -> None:
    text, words = WRONG[name]
    (tmp_path / "file").write_text(text)
    with pytest.raises(BadInput, match=words):
        read(tmp_path / "file")


KINDS = (
    *("guidellm", "SGLang", "vLLM", "inference-perf", "genai-perf", "AIPerf", "locust", "LiteLLM", "OTEL"),
    *("CSV", "JSON", "parquet", "metrics", "log"),
)


def test_there_are_two_files_of_every_kind() -> None:
    """llmperf's are read in tests of their own; those of metrics, logs and steps where they are read."""
    names = [*FORMS, *TABLES, *PARQUET, *WRONG]
    counts = {kind: sum(name.startswith(kind) for name in names) for kind in KINDS}
    assert all(count >= 2 for count in counts.values()), counts


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
