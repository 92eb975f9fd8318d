"""Files that hold no requests, though people have them at hand: what they are, and what to give instead."""

from __future__ import annotations

import re
from collections.abc import Callable

from pagecast.traces.head import Head

_METRIC = re.compile(
    r"^(#\s(HELP|TYPE)\s|[a-zA-Z_:][\w:]*(\{[^}]*\})?[ \t]+([-+]?[\d.]|NaN|[-+]?Inf))", re.MULTILINE
)
_LOG = re.compile(
    r"Avg prompt throughput|GPU KV cache size|V1 LLM engine|non-default args|server_args=|Decode batch"
    r"|max_total_num_tokens=|\[TRT-LLM\]|\[TensorRT-LLM\]"
)
_OF_LOCUST = (
    ("Timestamp", "User Count", "Requests/s"),
    ("Method", "Name", "Error", "Occurrences"),
    ("Count", "Message", "Traceback"),
)
_OF_LOCUST_REQUESTS = (
    "log requests with their tokens (locust's request event), as CSV of timestamp, prompt_tokens, "
    "completion_tokens"
)
_METRICS = (
    "metrics of a server, which have no requests; `pagecast trace from-metrics` makes a trace with their "
    "load, `pagecast match --metrics` sets them beside a forecast"
)


def _keys(*names: str, without: str = "") -> Callable[[Head], bool]:
    def found(head: Head) -> bool:
        keys = head.keys or set()
        return set(names) <= keys and without not in keys

    return found


def _columns(*names: str) -> Callable[[Head], bool]:
    return lambda head: set(names) <= set(head.columns)


def _page(word: str) -> Callable[[Head], bool]:
    return lambda head: (
        head.text[:200].lower().startswith(("<!doctype html", "<html")) and word in head.text.lower()
    )


def _inference_perf_report(head: Head) -> bool:
    named = ("request_performance", "load_summary", "request_lifecycle")
    return head.keys is None and any(re.search(rf"^\s*{name}:", head.text, re.MULTILINE) for name in named)


WRONG: tuple[tuple[Callable[[Head], bool], str], ...] = (
    (
        _keys("total_input_tokens", "mean_ttft_ms", without="input_lens"),
        "the summary of a benchmark, without its requests; run it again with --save-result --save-detailed "
        "(vLLM) or --output-details (SGLang)",
    ),
    (
        _columns("mean_ttft_ms"),
        "a table of runs of a sweep, without their requests; give the JSON of one run, made with "
        "--save-detailed",
    ),
    (
        _keys("avg_latency", "latencies"),
        "of vllm bench latency, which sends one batch over and over: no requests; vllm bench serve has some",
    ),
    (
        _keys("elapsed_time", "total_num_tokens"),
        "of vllm bench throughput, which has no times of requests; vllm bench serve --save-detailed has them",
    ),
    (
        lambda head: head.keys is None and bool(re.search(r"^benchmarks:", head.text, re.MULTILINE)),
        "guidellm's report in YAML; give the one in JSON (benchmarks.json), which has the same requests",
    ),
    (
        lambda head: head.columns[:1] == ["Run Info"] or "Requests per Second mean" in ",".join(head.columns),
        "guidellm's table of benchmarks, without requests; give benchmarks.json of the same run",
    ),
    (
        _columns("Metric", "avg", "p99"),
        "the table of AIPerf or genai-perf, without requests; give profile_export.jsonl of the same folder",
    ),
    (
        _keys("service_kind", "experiments", "response_timestamps"),
        "genai-perf's raw export: prompts as text, no numbers of tokens; AIPerf, which follows it, writes "
        "them (profile_export.jsonl)",
    ),
    (
        _keys("request_throughput", "request_latency", "input_config"),
        "the summary of AIPerf or genai-perf, without requests; give profile_export.jsonl of the same folder",
    ),
    (
        _keys("load_summary", "successes", "failures"),
        "inference-perf's summary, without requests; give per_request_lifecycle_metrics.json "
        "(report.request_lifecycle.per_request: true)",
    ),
    (
        _inference_perf_report,
        "inference-perf's report, without requests; give per_request_lifecycle_metrics.json "
        "(report.request_lifecycle.per_request: true)",
    ),
    (
        _keys("results_ttft_s_mean"),
        "llmperf's summary, without requests; give the ..._individual_responses.json beside it",
    ),
    (
        _columns("Type", "Name", "Request Count"),
        "locust's statistics, which have neither requests nor tokens; " + _OF_LOCUST_REQUESTS,
    ),
    (
        lambda head: any(_columns(*names)(head) for names in _OF_LOCUST),
        "locust's history or failures, which have neither requests nor tokens; " + _OF_LOCUST_REQUESTS,
    ),
    (_keys("resultType", "result"), _METRICS),
    (_keys("metric", "values", "timestamps"), _METRICS),
    (
        _keys("num_requests", "num_failures", "response_times"),
        "locust's statistics, which have neither requests nor tokens; " + _OF_LOCUST_REQUESTS,
    ),
    (
        lambda head: bool({"resourceMetrics", "resourceLogs"} & (head.keys or set())),
        "OpenTelemetry's metrics or logs, which have no requests; give the spans (resourceSpans) of the same "
        "collector",
    ),
    (
        _keys("startTime", "spend", "users", without="prompt_tokens"),
        "LiteLLM's spend by day, without requests; ask /spend/logs without dates, or export its table",
    ),
    (
        _keys("metadata", "payload", "responses"),
        "AIPerf's raw export, which has no numbers of tokens; give profile_export.jsonl of the same folder",
    ),
    (
        _keys("data", "payloads"),
        "what AIPerf sent, without times and answers; give profile_export.jsonl of the same folder",
    ),
    (
        _keys("custom_id", "method", "url", "body"),
        "requests of a batch, as texts without times; its output file has numbers of tokens",
    ),
    (
        lambda head: not head.keys and bool(_LOG.search(head.text)),
        "an engine's log, which has no requests; give it as --log to take the engine's options and KV blocks",
    ),
    (lambda head: head.keys is None and bool(_METRIC.match(head.text)), _METRICS),
    (_page("guidellm"), "guidellm's report as a web page; give benchmarks.json of the same run"),
    (_page("locust"), "locust's report as a web page; " + _OF_LOCUST_REQUESTS),
    (_page(""), "a web page; download the file itself"),
)


def wrong_file(head: Head) -> str | None:
    """What a file is that is no trace, and what to do; None where nothing is known of it."""
    return next((words for recognised, words in WRONG if recognised(head)), None)
