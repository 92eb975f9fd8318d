"""Metrics text: the page `/metrics` of a vLLM server, for tests and trials of `match`."""

from __future__ import annotations

import pandas as pd
from pagecast.planner_app.server.metrics import Histogram

_BOUNDS = (*(digit * 10**power for power in range(5) for digit in (1, 2, 5)), 100_000)


def metrics_text(columns: dict[str, pd.Series], cached_tokens: int) -> str:
    """The page of a server that served these requests alone.

    `columns`: the values of the histograms by name: `ttft_s`, `e2e_s`, `input_tokens`, `output_tokens`.
    """
    text = 'vllm:num_requests_running{engine="0",model_name="m"} 0\n'
    names = {
        "time_to_first_token_seconds": "ttft_s",
        "e2e_request_latency_seconds": "e2e_s",
        "request_prompt_tokens": "input_tokens",
        "request_generation_tokens": "output_tokens",
    }
    for name, column in names.items():
        histogram = Histogram(f"vllm:{name}", "x", _BOUNDS)
        for value in columns[column].tolist():
            histogram.observe(value)
        for sample in histogram.family({}).samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
            text += f"{sample.name}{{{labels}}} {sample.value}\n"
    queries = columns["input_tokens"].sum()
    return f"{text}vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total {cached_tokens}\n"
