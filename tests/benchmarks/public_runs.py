"""Public runs with latencies of each request, and the scenarios that they were measured in.

inference-sim/training at c4f0340 (vLLM 0.15.1, H100; latencies of a client), and bench/examples of
LLMServingSim (vLLM 0.19, RTX PRO 6000; latencies of the engine). None of them is kept in this repository.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pagecast.sim.runs.bench_results import BenchResults
from pagecast.sim.runs.client_share import CLIENT_SHARE
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Spans, Trace, starts, table

_MODELS = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
}
_CODELLAMA = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 22016,
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
}
_PERIOD = 100  # requests after which prompts come again, as their lengths show (in 98 to 99% of requests)


@dataclass(frozen=True)
class PublicRun:
    """A run's requests and its scenario; `failed` requests are left out.

    `set_up` names model, GPUs and data set: runs of one set-up share model, engine and hosts.
    """

    name: str
    set_up: str
    results: BenchResults
    scenario: Scenario
    failed: int = 0

    @property
    def overloaded(self) -> bool:
        """Whether requests waited for longer than they were served, or more than 1 in 100 failed."""
        waited = float(np.median(self.results.ttft_s)) > float(np.median(self.results.e2e_s)) / 2
        return waited or self.failed > 0.01 * (self.failed + len(self.results.trace))


def training_runs(folder: Path, costs: str) -> Iterator[PublicRun]:
    """Runs of inference-sim/training in `folder`/replay_data."""
    for path in sorted(folder.glob("replay_data/*_ground_truth.json")):
        yield training_run(path, costs)


def training_run(path: Path, costs: str) -> PublicRun:
    """A run of inference-sim/training. Prompts come again after 100 requests.

    All requests of a run asked for the same number of tokens and ignored the end of text (`output_len` and
    `ignore_eos` of its `profile.yaml`). The files count tokens of the text tokenized again: a request with a
    tenth of the count took as long as those beside it. The most frequent count is what was generated.
    """
    run = json.loads(Path(str(path).replace("_ground_truth", "")).read_text())
    truth = json.loads(path.read_text())
    asked = [r for r, t in zip(run["requests"], truth, strict=True) if not t["has_error"]]
    done = [t for t in truth if not t["has_error"]]
    counts = np.array([r["output_tokens"] for r in asked])
    tokens = np.full(len(counts), max(np.bincount(counts).argmax(), 1), np.int64)
    lengths = np.array([r["input_tokens"] for r in asked])
    slots = np.array([r["index"] % _PERIOD for r in asked])
    rows = len(asked)
    spans = Spans(starts(np.ones(rows, np.int64)), slots, np.zeros(rows, np.int64), lengths)
    columns = {
        "arrival_s": np.array([r["arrival_time_us"] / 1e6 for r in asked]),
        "input_tokens": lengths,
        "output_tokens": tokens,
    }
    config = run["config"]
    known = next((key for key in _MODELS if key in run["experiment"]), None)
    scenario = Scenario(
        model=_MODELS[known] if known else codellama(),
        gpu="H100",
        costs=costs,
        tensor_parallel_size=config["tensor_parallelism"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        num_gpu_blocks=config["kv_blocks_total_gpu"],
    )
    name = path.name.removesuffix("_ground_truth.json")[16:]
    ttft, e2e = (np.array([t[key] for t in done], np.float64) for key in ("ttft_s", "e2e_s"))
    results = BenchResults(name, Trace(name, table(columns), spans), ttft, e2e, CLIENT_SHARE)
    return PublicRun(name, known or "codellama-34b", results, scenario, len(truth) - rows)


def codellama() -> str:
    """A folder with the configuration of CodeLlama-34B."""
    folder = Path(tempfile.gettempdir()) / "codellama-34b"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CODELLAMA))
    return str(folder)


def servingsim_runs(folder: Path, costs: str) -> Iterator[PublicRun]:
    """Runs of LLMServingSim's in `folder`, which is its bench/examples."""
    for path in sorted(folder.glob("RTXPRO6000/*/vllm/meta.json")):
        yield servingsim_run(path.parent, costs)


def servingsim_run(folder: Path, costs: str) -> PublicRun:
    """A run of LLMServingSim's; of data-parallel ranks one, with its share of the requests.

    The link between the GPUs is the one that the example's own `config.json` states.
    """
    meta = json.loads((folder / "meta.json").read_text())
    link = json.loads((folder.parent / "config.json").read_text())["link_bw"]
    options = meta["engine_kwargs"]
    ranks = options["data_parallel_size"]
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    kept = lines[::ranks]
    arrival = np.array([line["arrival_time"] - lines[0]["arrival_time"] for line in kept])
    sent = lines[0]["queued_ts"] + arrival
    columns: dict[str, Any] = {
        "arrival_s": arrival,
        "input_tokens": np.array([line["input_toks"] for line in kept], np.int64),
        "output_tokens": np.array([line["output_toks"] for line in kept], np.int64),
    }
    first, last = (np.array([line[key] for line in kept]) for key in ("first_token_ts", "last_token_ts"))
    scenario = Scenario(
        model=meta["model"],
        gpu="RTX PRO 6000",
        costs=costs,
        tensor_parallel_size=options["tensor_parallel_size"],
        moe_data_parallel_size=ranks,
        enable_expert_parallel=options["enable_expert_parallel"],
        gpu_link_gb_per_s=float(link),
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
    )
    name = f"RTX PRO 6000 {folder.parts[-2]}"
    results = BenchResults(name, Trace(folder.parent.name, table(columns)), first - sent, last - sent)
    return PublicRun(name, name, results, scenario)
