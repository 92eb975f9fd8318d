"""`pagecast match` on recorded runs, through files that people have of a run: log, results, metrics."""

import json
from pathlib import Path

import numpy as np
import pytest
from metrics_text import metrics_text
from pagecast.planner_app.cli import run
from pagecast.sim.runs.recorded import RecordedRun

RUNS = Path("groundtruth")
H200, H100 = "vllm-0.24.0-h200-qwen3-8b", "vllm-0.24.0-h100-unfitted"
MODELS = {4096: "Qwen/Qwen3-8B", 5120: "Qwen/Qwen3-14B"}  # by hidden size


def results(recorded: RecordedRun) -> str:
    """As `vllm bench serve --save-detailed` writes them: tokens came as steps ended."""
    t = recorded.requests
    ends = recorded.steps.end_ns / 1e9
    itls = []
    for first, last, tokens in zip(t["first_token_s"], t["finish_s"], t["tokens_out"], strict=True):
        own = ends[np.searchsorted(ends, first + 1e-6) : np.searchsorted(ends, last - 1e-6)]
        # A preempted request misses steps: its tokens are those of the last ones.
        own = own[max(len(own) - tokens + 2, 0) :]
        itls.append(np.diff([first, *own, last]).tolist() if tokens > 1 else [])
    document = {
        "start_times": t["arrival_s"].tolist(),
        "input_lens": t["input_tokens"].tolist(),
        "output_lens": t["tokens_out"].tolist(),
        "ttfts": (t["first_token_s"] - t["arrival_s"]).tolist(),
        "itls": itls,
    }
    return json.dumps(document)


def log(recorded: RecordedRun) -> str:
    """The lines of a start that tell options and KV blocks."""
    config = recorded.meta["config"]
    name, length = (
        MODELS[recorded.meta["model"]["hidden_size"]],
        recorded.meta["model"].get("max_position_embeddings", 131072),
    )
    options = {
        "model": name,
        "max_num_seqs": config["max_num_seqs"],
        "max_num_batched_tokens": config["max_num_batched_tokens"],
        "async_scheduling": config["async_scheduling"],
    }
    if recorded.meta.get("scheduling_policy", config.get("scheduling_policy")):
        options["scheduling_policy"] = config["scheduling_policy"]
    tokens = (recorded.meta["usable_blocks"] + 1) * config["block_size"]
    return (
        "INFO 11-01 10:00:00 vLLM API server version 0.24.0\n"
        f"INFO 11-01 10:00:00 non-default args: {options}\n"
        "INFO 11-01 10:00:05 [core.py:71] Initializing a V1 LLM engine (v0.24.0) with config: "
        f"model='{name}', max_seq_len={length}, tensor_parallel_size=1, enable_prefix_caching=True\n"
        f"INFO 11-01 10:00:09 GPU KV cache size: {tokens:,} tokens\n"
        f"INFO 11-01 10:00:09 Maximum concurrency for {length:,} tokens per request: {tokens / length:.2f}x\n"
    )


def metrics(recorded: RecordedRun) -> str:
    """What /metrics of a new server says after the run."""
    t = recorded.requests
    columns = {
        "ttft_s": t["first_token_s"] - t["arrival_s"],
        "e2e_s": t["finish_s"] - t["arrival_s"],
        "input_tokens": t["input_tokens"],
        "output_tokens": t["tokens_out"],
    }
    return metrics_text(columns, t["cached_tokens"].sum())


# What is allowed in the mean of each latency, in percent: what `validate` has of these runs, and of TTFT near
# saturation what 1% of step time makes of it.
BOUNDS = {
    f"{H200}/azure_conv": {"tpot_s.mean": 5, "e2e_s.mean": 5, "ttft_s.mean": 5},
    f"{H200}/mooncake_conv": {"tpot_s.mean": 5, "e2e_s.mean": 5, "ttft_s.mean": 8},
    f"{H100}/q14b-code-r8.5": {"tpot_s.mean": 5, "e2e_s.mean": 5, "ttft_s.mean": 8},
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", BOUNDS)
def test_a_recorded_run_matches_through_its_files(shared, tmp_path, monkeypatch, capsys, name) -> None:
    monkeypatch.setenv("PAGECAST_CALIBRATIONS", str(tmp_path / "own"))
    recorded = RecordedRun.load(shared / RUNS / name)
    for file, text in (("run.json", results), ("vllm.log", log), ("end.prom", metrics)):
        (tmp_path / file).write_text(text(recorded))
    given = ["--results", "run.json", "--log", "vllm.log", "--metrics", "end.prom"]
    files = [str(tmp_path / one) if "." in one else one for one in given]
    assert run(["match", *files, "--gpu", name.split("-")[2].upper(), "--client-ms", "0", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["num_gpu_blocks"]["measured"] == recorded.meta["usable_blocks"]
    for figure, bound in BOUNDS[name].items():
        assert abs(figures[figure]["errors_percent"][1]) < bound, (figure, figures[figure])
