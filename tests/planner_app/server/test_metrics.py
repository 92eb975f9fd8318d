"""Metrics have vLLM's names, labels and buckets, and say what happened."""

from typing import Any

from pagecast.planner_app.server.metrics import Histogram, lengths
from prometheus_client.parser import text_string_to_metric_families

LABELS = {"model_name": "Qwen/Qwen3-8B", "engine": "0"}
GAUGES = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
    *("kv_cache_usage_perc", "engine_sleep_state", "lora_requests_info", "cache_config_info"),
)
COUNTERS = (
    *("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries"),
    *("external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits", "num_preemptions", "prompt_tokens"),
    *("prompt_tokens_by_source", "prompt_tokens_cached", "generation_tokens", "request_success"),
)
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "iteration_tokens_total"),
    *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
    *("request_params_n", "request_params_max_tokens", "request_prefill_kv_computed_tokens"),
)


def scraped(server: Any) -> dict[str, Any]:
    with server.client() as http:
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def value(families: dict[str, Any], name: str, **labels: str) -> float:
    wanted = {**LABELS, **labels}
    (sample,) = (
        sample
        for family in families.values()
        for sample in family.samples
        if sample.name == name and sample.labels == wanted
    )
    return float(sample.value)


def test_every_metric_of_vllm_that_applies_is_there(server: Any) -> None:
    families = scraped(server)
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
        for name in names:
            assert families[f"vllm:{name}"].type == kind, name
    for name in (*GAUGES[:5], *COUNTERS, *HISTOGRAMS):
        assert all(LABELS.items() <= s.labels.items() for s in families[f"vllm:{name}"].samples), name
    bounds = [
        s.labels["le"] for s in families["vllm:time_to_first_token_seconds"].samples if "le" in s.labels
    ]
    assert bounds[0] == "0.001" and bounds[-2:] == ["2560.0", "+Inf"] and len(bounds) == 23
    config = families["vllm:cache_config_info"].samples[0].labels
    assert (config["block_size"], config["num_gpu_blocks"]) == ("16", "4000")


def test_the_counts_are_those_of_what_was_served(serve: Any) -> None:
    one = serve()
    with one.client() as http:
        for _ in range(3):
            body = {"prompt": "words to share" + " words to share" * 31, "max_tokens": 20, "n": 2}
            assert http.post("/v1/completions", json=body).status_code == 200
    families = scraped(one)
    assert value(families, "vllm:generation_tokens_total") == 120
    assert value(families, "vllm:request_success_total", finished_reason="length") == 6
    assert value(families, "vllm:prompt_tokens_total") == 6 * 96
    cached = value(families, "vllm:prefix_cache_hits_total")
    assert cached == value(families, "vllm:prompt_tokens_cached_total") >= 4 * 80
    assert value(families, "vllm:prompt_tokens_by_source_total", source="local_compute") == 6 * 96 - cached
    assert value(families, "vllm:inter_token_latency_seconds_count") == 114
    assert value(families, "vllm:request_params_n_bucket", le="1.0") == 0
    assert value(families, "vllm:request_params_n_bucket", le="2.0") == 3
    assert value(families, "vllm:num_requests_running") == 0
    ttft = value(families, "vllm:time_to_first_token_seconds_sum") / 6
    decode = value(families, "vllm:request_decode_time_seconds_sum") / 6
    e2e = value(families, "vllm:e2e_request_latency_seconds_sum") / 6
    assert abs(ttft + decode - e2e) < 1e-6


def test_adapters_that_run_are_told(serve: Any) -> None:
    modules = ("sql=/adapters/sql", '{"name": "law", "path": "/adapters/law"}')
    one = serve({"max_loras": 2}, lora_modules=modules)
    body = {"model": "law", "prompt": "x", "max_tokens": 30_000, "stream": True}
    with one.client() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        (sample,) = scraped(one)["vllm:lora_requests_info"].samples
    assert sample.labels == {"max_lora": "2", "running_lora_adapters": "law", "waiting_lora_adapters": ""}


def test_buckets_take_values_up_to_their_bound() -> None:
    assert lengths(100) == (1, 2, 5, 10, 20, 50, 100)
    histogram = Histogram("h", "about", (1, 2))
    for number in (1.0, 1.5, 2.0, 3.0):
        histogram.observe(number, 2)
    buckets = [sample.value for sample in histogram.family({}).samples if sample.name == "h_bucket"]
    assert buckets == [2, 6, 8]


def test_a_host_tier_has_its_metrics_and_its_hits(serve: Any) -> None:
    one = serve({"num_gpu_blocks": 60, "kv_offloading_size": 0.5, "max_model_len": 600})
    with one.client() as http:
        for number in [*range(8), 0, 0]:
            body = {"prompt": f"{number} " + " words to share" * 120, "max_tokens": 4}
            assert http.post("/v1/completions", json=body).status_code == 200
    families = scraped(one)
    assert value(families, "vllm:kv_offload_store_bytes_total") > 0
    assert value(families, "vllm:kv_offload_load_bytes_total") > 0
    assert 0 < value(families, "vllm:kv_offload_cpu_cache_usage_perc") <= 1
    hits = value(families, "vllm:external_prefix_cache_hits_total")
    assert 0 < hits < value(families, "vllm:external_prefix_cache_queries_total")
    assert value(families, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == hits
    for direction in ("load", "store"):
        size = f"vllm:kv_offload_{direction}_size"
        assert families[size].type == "histogram" and value(families, f"{size}_count") > 0
        assert value(families, f"{size}_sum") == value(families, f"vllm:kv_offload_{direction}_bytes_total")
        assert value(families, f"vllm:kv_offload_{direction}_time_total") > 0
    assert "vllm:kv_offload_stores_skipped" in families
    assert not any("kv_offload" in name or "spec_decode" in name for name in scraped(serve()))


def test_speculation_has_its_metrics(serve: Any) -> None:
    one = serve({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.6}})
    with one.client() as http:
        body = {"prompt": "some words", "max_tokens": 200}
        assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 200
    families = scraped(one)
    assert value(families, "vllm:generation_tokens_total") == 200
    drafts = value(families, "vllm:spec_decode_num_drafts_total")
    accepted = value(families, "vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= value(families, "vllm:spec_decode_num_draft_tokens_total") <= 3 * drafts
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    places = [value(families, name, position=str(place)) for place in range(3)]
    assert sum(places) == accepted and places[0] >= places[1] >= places[2]
    assert value(families, "vllm:inter_token_latency_seconds_count") < 199
