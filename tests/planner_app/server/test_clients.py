"""Load generators in common use run against the server; what they report is what was recorded.

They are installed apart from pagecast: `PAGECAST_VLLM_PYTHON` names an interpreter that has vLLM 0.24 (its
kernels aren't needed), `PAGECAST_AIPERF` and `PAGECAST_GUIDELLM` the commands of these. A test without its
client skips. The server needs a core for itself, or clients report its delays too.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from pagecast.planner_app.server.tokenizer import PackedTokenizer
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import compare_decisions

from .test_robustness import served

pytestmark = pytest.mark.slow
_DRIVE_VLLM = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


def needed(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set")
    return value


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A transformers folder with a byte-level tokenizer that knows made-up words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = PackedTokenizer()
    words = [own.decode((id,))[1:] for id in own.words.tolist()]
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    syllables = sorted({word[:2] for word in words})
    pairs = [(a[0], a[1]) for a in syllables] + [(word[:2], word[2:]) for word in words]
    for pair in [*pairs, *(("Ġ", word) for word in words)]:
        vocabulary.setdefault("".join(pair), len(vocabulary))
        merges.append(pair)
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    folder = tmp_path / "tokenizer"
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    fast.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


def compare(folder: Path, requests: int, reported: dict[str, float]) -> None:
    """What a client reports of its last requests, in seconds, against the recording."""
    run = RecordedRun.load(folder)
    report = compare_decisions(run)
    assert report.ok, report.first_mismatch
    table = run.requests.iloc[-requests:]
    decode = table["finish_s"] - table["first_token_s"]
    ours = {
        "ttft": (table["first_token_s"] - table["arrival_s"]).mean(),
        "tpot": (decode / (table["tokens_out"] - 1).clip(lower=1)).mean(),
        "e2e": (table["finish_s"] - table["arrival_s"]).mean(),
    }
    for name, value in reported.items():
        print(f"{name}: {value * 1e3:.2f} ms reported, {ours[name] * 1e3:.2f} ms recorded")
    for name, value in reported.items():
        assert value == pytest.approx(ours[name], rel=0.03), name


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_vllm_bench_serve(endpoint: str, tokenizer: Path, tmp_path: Path) -> None:
    python = needed("PAGECAST_VLLM_PYTHON")
    process, url = served("--tokenizer", str(tokenizer), "--record", str(tmp_path / "run"))
    backend = "openai-chat" if "chat" in endpoint else "openai"
    options = ["--backend", backend, "--base-url", url, "--endpoint", endpoint, "--model", "Qwen/Qwen3-8B"]
    options += ["--tokenizer", str(tokenizer), "--dataset-name", "random", "--random-input-len", "2000"]
    options += ["--random-output-len", "128", "--num-prompts", "120", "--request-rate", "6", "--ignore-eos"]
    options += ["--save-result", "--result-filename", str(tmp_path / "result.json")]
    options += ["--percentile-metrics", "ttft,tpot,itl,e2el"]
    try:
        subprocess.run([python, "-c", _DRIVE_VLLM, *options], check=True, timeout=600)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 120
    names = {"ttft": "mean_ttft_ms", "tpot": "mean_tpot_ms", "e2e": "mean_e2el_ms"}
    compare(tmp_path / "run", 120, {name: result[key] / 1e3 for name, key in names.items()})


@pytest.mark.parametrize("stream", [True, False])
def test_aiperf(stream: bool, tokenizer: Path, tmp_path: Path) -> None:
    command = needed("PAGECAST_AIPERF")
    process, url = served("--tokenizer", str(tokenizer), "--record", str(tmp_path / "run"))
    options = ["--model", "Qwen/Qwen3-8B", "--url", url, "--endpoint-type", "chat", "--ui", "none"]
    options += ["--tokenizer", str(tokenizer), "--synthetic-input-tokens-mean", "2000"]
    options += ["--output-tokens-mean", "128", "--extra-inputs", "ignore_eos:true", "--request-count", "100"]
    options += ["--request-rate", "6", "--artifact-dir", str(tmp_path / "out")]
    options += ["--streaming"] if stream else []
    try:
        subprocess.run([command, "profile", *options], check=True, timeout=600)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    (file,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    result = json.loads(file.read_text())
    reported = {"e2e": result["request_latency"]["avg"] / 1e3}
    if stream:
        reported["ttft"] = result["time_to_first_token"]["avg"] / 1e3
        reported["tpot"] = result["inter_token_latency"]["avg"] / 1e3
    compare(tmp_path / "run", 100, reported)


def test_guidellm(tokenizer: Path, tmp_path: Path) -> None:
    command = needed("PAGECAST_GUIDELLM")
    process, url = served("--tokenizer", str(tokenizer), "--record", str(tmp_path / "run"))
    out = tmp_path / "out.json"
    options = ["--backend", f"kind=openai_http,target={url},model=Qwen/Qwen3-8B", "--disable-progress"]
    options += ["--profile", "kind=constant,rate=6", "--constraint", "kind=max_requests,count=100"]
    options += ["--tokenizer", f"kind=hf_auto,model={tokenizer}", "--output", f"kind=json,path={out}"]
    options += ["--data", "kind=synthetic_text,prompt_tokens=2000,output_tokens=128"]
    try:
        subprocess.run([command, "run", *options], check=True, timeout=600)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    means = {
        name: metrics[name]["successful"]["mean"] for name in ("time_to_first_token_ms", "request_latency")
    }
    compare(
        tmp_path / "run",
        100,
        {"ttft": means["time_to_first_token_ms"] / 1e3, "e2e": means["request_latency"]},
    )
