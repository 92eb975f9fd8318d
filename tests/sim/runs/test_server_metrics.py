"""Metrics of a server as figures, and a trace with its load."""

import json
from pathlib import Path

import numpy as np
import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.server.metrics import Histogram
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import replay
from pagecast.sim.runs.server_forecast import figures_of_replay, trace_of_metrics
from pagecast.sim.runs.server_metrics import Lengths, read_metrics
from pagecast.sim.scenario import Scenario

pytest.importorskip("prometheus_client")
BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
NAMES = {
    "vllm": {
        "ttft": "vllm:time_to_first_token_seconds",
        "tpot": "vllm:request_time_per_output_token_seconds",
        "e2e": "vllm:e2e_request_latency_seconds",
        "inputs": "vllm:request_prompt_tokens",
        "outputs": "vllm:request_generation_tokens",
        "kv": "vllm:kv_cache_usage_perc",
        "hits": "vllm:prefix_cache_hits_total",
        "queries": "vllm:prefix_cache_queries_total",
        "prompt": "vllm:prompt_tokens_total",
        "output": "vllm:generation_tokens_total",
    },
    "sglang": {
        "ttft": "sglang:time_to_first_token_seconds",
        "tpot": "sglang:inter_token_latency_seconds",
        "e2e": "sglang:e2e_request_latency_seconds",
        "inputs": "sglang:prompt_tokens_histogram",
        "outputs": "sglang:generation_tokens_histogram",
        "kv": "sglang:token_usage",
        "hits": "sglang:cached_tokens_total",
        "prompt": "sglang:prompt_tokens_total",
        "output": "sglang:generation_tokens_total",
    },
    "trtllm": {
        "ttft": "trtllm_time_to_first_token_seconds",
        "tpot": "trtllm_time_per_output_token_seconds",
        "e2e": "trtllm_e2e_request_latency_seconds",
        "kv": "trtllm_kv_cache_utilization",
        "hits": "trtllm_prompt_cached_tokens_total",
        "prompt": "trtllm_prompt_tokens_total",
        "output": "trtllm_generation_tokens_total",
    },
}
RANDOM = np.random.default_rng(0)
INPUTS, OUTPUTS = RANDOM.integers(200, 1900, 400), RANDOM.integers(10, 300, 400)


def series(engine: str, served: int) -> list[tuple[str, dict[str, str], float]]:
    """What a server shows after it has served so many requests, half of each prompt from its cache."""
    names, inputs, outputs = NAMES[engine], INPUTS[:served], OUTPUTS[:served]
    values = {"ttft": np.full(served, 0.05), "tpot": np.full(served, 0.01), "e2e": np.full(served, 1.5)}
    made: list[tuple[str, dict[str, str], float]] = []
    for figure, each in {**values, "inputs": inputs, "outputs": outputs}.items():
        if figure in names:
            histogram = Histogram(names[figure], "x", BOUNDS)
            for value in each.tolist():
                histogram.observe(value)
            made += [(one.name, dict(one.labels), one.value) for one in histogram.family({}).samples]
    totals = {
        "hits": inputs.sum() / 2,
        "queries": inputs.sum(),
        "prompt": inputs.sum(),
        "output": outputs.sum(),
    }
    made += [(names[figure], {}, float(value)) for figure, value in totals.items() if figure in names]
    return [*made, (names["kv"], {}, 0.25)]


def dump(engine: str, served: int) -> str:
    def line(name: str, labels: dict[str, str], value: float) -> str:
        inside = ",".join(f'{key}="{one}"' for key, one in labels.items())
        return f"{name}{{{inside}}} {value}\n"

    return "".join(line(*one) for one in series(engine, served))


def query(engine: str, at: dict[float, int]) -> str:
    found: dict[str, dict] = {}
    for time_s, served in at.items():
        for name, labels, value in series(engine, served):
            metric = {"__name__": name, **labels}
            found.setdefault(json.dumps(metric), {"metric": metric, "values": []})["values"].append(
                [time_s, str(value)]
            )
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": list(found.values())}})


@pytest.mark.parametrize("engine", NAMES)
def test_a_range_query_tells_load_hits_and_latencies(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "answer.json"
    path.write_text(query(engine, {1000.0: 100, 1050.0: 300, 1060.0: 400}))
    found = read_metrics(path)
    assert (found.engine, found.seconds, found.requests) == (engine, 60.0, 300.0)
    assert found.figures["requests_per_s"] == 5.0
    assert found.figures["hit_rate"] == pytest.approx(0.5)
    assert found.figures["kv_usage"] == 0.25
    assert found.figures["ttft_s"] == pytest.approx(0.05)
    assert found.figures["tpot_s"] == pytest.approx(0.01)
    assert found.figures["prompt_tokens_per_s"] == pytest.approx(INPUTS[100:].sum() / 60)
    assert found.tpot_of_tokens == (engine == "sglang")

    trace = trace_of_metrics(found, seed=3)
    arrival = trace.seconds("arrival_s")
    assert len(trace) == 300
    assert 195 <= int((arrival < 50).sum()) <= 205, "two thirds come in the first 50 s"
    assert trace.integers("input_tokens").mean() == pytest.approx(INPUTS[100:].mean(), rel=0.01)
    assert trace.integers("output_tokens").mean() == pytest.approx(OUTPUTS[100:].mean(), rel=0.01)
    result = replay(trace, Scenario(model="Qwen/Qwen3-8B", gpu="H200"))
    figures = figures_of_replay(result)
    assert figures["hit_rate"] == pytest.approx(0.5, abs=0.015)
    assert figures["requests_per_s"] == pytest.approx(5.0, rel=0.05)


def test_two_dumps_make_a_trace_on_the_command_line(tmp_path: Path, capsys) -> None:
    for name, served in (("a.prom", 100), ("b.prom", 400)):
        (tmp_path / name).write_text(dump("vllm", served))
    a, b, out = (str(tmp_path / name) for name in ("a.prom", "b.prom", "load.jsonl"))
    assert run(["trace", "from-metrics", a, b, out, "--seconds", "60"]) == 0
    assert "300 requests written to" in capsys.readouterr().out
    assert run(["trace", "describe", out, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["requests_per_s"] == pytest.approx(5, rel=0.15)
    assert facts["sharing"]["shareable_fraction"] == pytest.approx(0.5, abs=0.01)
    assert run(["trace", "from-metrics", a, out]) == 2
    assert "do not tell a load per second; give --rate, or two dumps" in capsys.readouterr().err
    assert run(["match", "--metrics", a, "--metrics", b, "--seconds", "60", "--gpu", "H200", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["ttft_s"]["measured"] == pytest.approx(0.05)
    assert figures["hit_rate"]["forecast"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("up 1\n", "no metrics of vLLM, SGLang or TensorRT-LLM among 1 series"),
        ("not metrics {\n", "no metrics"),
        ('{"status": "success", "data": {"result": []}}', "the query found nothing"),
        (
            '{"data": {"result": [{"metric": {"pod": "a"}, "values": [[1, "2"]]}]}}',
            "its series have no names",
        ),
        ('{"status": "error", "error": "parse error"}', "answered with an error: parse error"),
        ('{"arrival_s": 0, "input_tokens": 3}', "no answer of Prometheus, which has data and its result"),
        ('{"data": {"resultType": "scalar", "result": [1, "2"]}}', "no answer of Prometheus"),
    ],
)
def test_what_are_no_metrics_is_told(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(BadInput, match=match):
        read_metrics(tmp_path / "file")


# As servers of the engine's versions show themselves, and what is to be read.
DUMPS = {
    "vllm, of 0.9": (
        'vllm:num_requests_running{model_name="m"} 3\nvllm:gpu_cache_usage_perc{model_name="m"} 0.3\n'
        'vllm:gpu_prefix_cache_hits_total{model_name="m"} 3\n'
        'vllm:gpu_prefix_cache_queries_total{model_name="m"} 30\n',
        {"running": 3, "kv_usage": 0.3, "hit_rate": 0.1},
    ),
    "vllm, federated, two replicas": (
        "".join(
            f'vllm:num_requests_running{{instance="{name}:1",model_name="m"}} 4 1700000000000\n'
            f'vllm:num_preemptions_total{{instance="{name}:1",model_name="m"}} 6 1700000000000\n'
            for name in "ab"
        ),
        {"running": 4, "preemptions": 6},
    ),
    "sglang, all ranks of one engine": (
        "".join(
            f'sglang:num_running_reqs{{model_name="m",tp_rank="{rank}"}} 4\n'
            f'sglang:token_usage{{model_name="m",tp_rank="{rank}"}} 0.5\n'
            f'sglang:num_retractions_total{{model_name="m",tp_rank="{rank}"}} 2\n'
            for rank in range(4)
        ),
        {"running": 4, "kv_usage": 0.5, "preemptions": 2},
    ),
    "sglang, two engines that share the attention": (
        "".join(
            f'sglang:num_running_reqs{{dp_rank="{rank}",model_name="m",tp_rank="{rank}"}} {running}\n'
            for rank, running in enumerate((4, 6))
        ),
        {"running": 5},
    ),
    "trtllm, of 1.1": (
        'trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 2\n'
        'trtllm_kv_cache_hit_rate{engine_type="trtllm",model_name="m"} 0.25\n'
        'trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.5\n',
        {"running": 2, "hit_rate": 0.25, "kv_usage": 0.5},
    ),
    "trtllm, older names": (
        "trtllm_num_active_requests 2\ntrtllm_server_queue_length 1\ntrtllm_kv_cache_utilization 0.5\n",
        {"running": 2, "waiting": 1, "kv_usage": 0.5},
    ),
}


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_tells_the_figures_of_one_engine(name: str, tmp_path: Path) -> None:
    text, figures = DUMPS[name]
    (tmp_path / "metrics.prom").write_text(text)
    found = read_metrics(tmp_path / "metrics.prom")
    assert found.engine == name.split(",")[0]
    assert found.figures == pytest.approx(figures)


def test_a_server_that_was_started_again_is_counted_from_there(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    path.write_text(query("vllm", {0.0: 300, 10.0: 400, 20.0: 50}))
    found = read_metrics(path)
    assert found.requests == 150
    assert any("started again" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["uniform", "lognormal", "alike"])
def test_lengths_of_a_histogram_have_the_mean_and_about_the_spread(kind: str) -> None:
    random = np.random.default_rng(1)
    real = {
        "uniform": random.integers(800, 2401, 4000),
        "lognormal": random.lognormal(6.5, 0.8, 4000),
        "alike": np.full(500, 1200),
    }[kind]
    bounds = np.array([*(digit * 10.0**power for power in range(5) for digit in (1, 2, 5)), np.inf])
    counts = np.histogram(real, np.concatenate([[0], bounds[:-1], [1e9]]))[0].astype(float)
    drawn = Lengths(bounds, counts, float(real.mean())).drawn(2000, random)
    assert drawn.mean() == pytest.approx(real.mean(), rel=1e-3)
    # Buckets are as wide as half their bounds: what lies within them is a guess.
    assert abs(drawn.std() - real.std()) < 0.15 * real.mean()
    assert np.quantile(drawn, 0.95) == pytest.approx(np.quantile(real, 0.95), rel=0.16)
