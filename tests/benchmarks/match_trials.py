"""How often `pagecast match` names the cause that was put into a measurement: trials through files.

    python tests/benchmarks/match_trials.py 0-39 [--results-only]

A trial is a seed. It draws a set-up, a load, step costs within their own uncertainty, what a client adds,
and a cause. The cause moves mean TTFT, mean TPOT or the longest times between tokens by a tenth at least, and
by more than the costs that were drawn. The server so made is replayed, and its results, the line of its log
that tells KV blocks, and its metrics are written as vLLM and its benchmark write them. `match` gets these and
the set-up without the cause. Printed are a line for each trial and how many are explained by their cause.
`--results-only` leaves log and metrics out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pagecast.planner_app.cli import run
from pagecast.sim.costs.calibration.draw import draw
from pagecast.sim.costs.measured.corrections import Corrections
from pagecast.sim.fitting.explain import Setup, warmed
from pagecast.sim.fitting.from_bench import corrected
from pagecast.sim.replay.result import Result
from pagecast.sim.runs.bench_results import BenchResults
from pagecast.sim.runs.client_share import CLIENT_SHARE
from pagecast.sim.scenario import Scenario
from pagecast.traces.load import Load

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sim" / "runs"))

from metrics_text import metrics_text

KINDS = ("host", "chunk", "warm", "blocks")
MODELS = (
    ("Qwen/Qwen3-8B", "H100"),
    ("Qwen/Qwen3-8B", "H200"),
    ("meta-llama/Llama-3.1-8B-Instruct", "H100"),
    ("Qwen/Qwen3-14B", "H100"),
    ("mistralai/Mistral-7B-v0.3", "H100"),
)
LEAST = math.log(1.1)  # what a cause must move to be one
_STEP_TOKENS = (512, 1024, 2048, 4096, 16384)


@dataclass(frozen=True)
class Trial:
    """The cause that was put in, and the files' contents."""

    kind: str
    words: str
    scenario: Scenario
    result: Result
    count: int


def trial(seed: int) -> Trial:
    """The trial of a seed."""
    random = np.random.default_rng([41, seed])
    kind = KINDS[seed % len(KINDS)]
    model, gpu = MODELS[random.integers(len(MODELS))]
    scenario = Scenario(model=model, gpu=gpu)
    plain = scenario.step_costs()
    while True:
        prompt, output = math.exp(random.uniform(5.5, 8.3)), math.exp(random.uniform(3.7, 6.0))
        shared = int(prompt * random.choice([0.0, 0.3, 0.6]))
        load = Load(
            num_prompts=200,
            input_len=str(max(int(prompt - shared), 16)),
            output_len=str(int(output)),
            range_ratio=str(random.choice([0.2, 0.5, 0.9])),
            prefix_len=shared or None,
            request_rate=float(_capacity(prompt - shared, output) * random.uniform(0.3, 0.9)),
        )
        trace = load.trace(seed=seed)
        asked = BenchResults("run", trace, *(np.full(len(trace), np.nan),) * 2)
        base = Setup(scenario, draw(plain, int(random.integers(1000)), seed), asked)
        expected, before = replace(base, costs=plain).replayed(), base.replayed()
        setup, words = _with_cause(kind, base, before, random)
        after = setup.replayed()
        served = (after.requests["state"] == "completed").all()
        if served and _moved(before, after) > max(LEAST, _moved(expected, before)):
            share = CLIENT_SHARE.drawn(int(random.integers(1000)), seed)
            return Trial(kind, words, scenario, share.seen(after), len(trace))


def _capacity(prompt: float, output: float) -> float:
    """Requests per second that such a GPU takes, roughly: 15,000 prompt tokens or 2,000 generated ones."""
    return 1 / (prompt / 15_000 + output / 2_000)


def _with_cause(kind: str, base: Setup, before: Result, random: np.random.Generator) -> tuple[Setup, str]:
    scenario = base.scenario
    if kind == "host":
        ms = float(random.uniform(0.8, 6))
        return replace(base, costs=corrected(base.costs, Corrections("", ms / 1e3, 1, 1))), f"{ms:.2f} ms"
    if kind == "chunk":
        own = scenario.max_num_batched_tokens
        sizes = [size for size in _STEP_TOKENS if size != own and size >= scenario.max_num_seqs]  # as vLLM
        size = int(random.choice(sizes))
        return replace(base, scenario=scenario.changed(max_num_batched_tokens=size)), f"{size} tokens"
    if kind == "warm":
        return replace(base, results=warmed(base.results)), "warm"
    peak = int(before.steps["used_blocks"].max())
    longest = int(before.requests.eval("input_tokens + output_tokens").max()) // scenario.block_size + 2
    blocks = max(int(peak * random.uniform(0.25, 0.9)), longest)
    return replace(base, scenario=scenario.changed(num_gpu_blocks=blocks)), f"{blocks} blocks"


def _moved(before: Result, after: Result) -> float:
    """By how much the cause moves what moves most, as a logarithm."""
    count = len(before.requests)
    both = [(one.requests[-count:], longest_of(one)[-count:]) for one in (before, after)]
    moved = [
        abs(math.log(both[1][0][name].mean() / both[0][0][name].mean())) for name in ("ttft_s", "tpot_s")
    ]
    return max(*moved, abs(math.log(both[1][1].mean() / both[0][1].mean())))


def token_times(result: Result) -> list[np.ndarray]:
    """When the tokens of each request came."""
    steps = result.steps
    ends = steps["end_ns"].to_numpy() / 1e9
    counts = steps["steps"].to_numpy()
    # Steps of one row take equally long.
    begin = np.concatenate([[steps["start_ns"].iloc[0] / 1e9], ends[:-1]])
    begin = np.maximum(begin, steps["start_ns"].to_numpy() / 1e9)
    every = np.concatenate(
        [np.linspace(a, b, n + 1)[1:] for a, b, n in zip(begin, ends, counts, strict=True)]
    )
    t = result.requests
    first, last = t["first_token_s"].to_numpy(), t["finished_s"].to_numpy()
    tokens = t["output_tokens"].to_numpy()
    times = []
    for a, b, n in zip(first, last, tokens, strict=True):
        own = every[np.searchsorted(every, a + 1e-9) : np.searchsorted(every, b + 1e-9)]
        own = np.concatenate([[a], own])
        # A preempted request stands still while others go on: its tokens are the last ones.
        times.append(np.concatenate([[a], own[1:][len(own) - n :]]) if len(own) > n else own)
    return times


def longest_of(result: Result) -> np.ndarray:
    """The longest gap between two tokens of each request."""
    return np.array([np.diff(one).max() if len(one) > 1 else 1e-3 for one in token_times(result)])


def results(made: Trial) -> str:
    """As `vllm bench serve --save-detailed` writes them."""
    t, times = made.result.requests[-made.count :], token_times(made.result)[-made.count :]
    random = np.random.default_rng(made.count)
    # A client sees tokens a little later than they came, one more than another.
    times = [np.sort(one + random.exponential(3e-4, len(one))) for one in times]
    document = {
        "start_times": (t["arrival_s"] - t["arrival_s"].min()).tolist(),
        "input_lens": t["input_tokens"].tolist(),
        "output_lens": t["output_tokens"].tolist(),
        "ttfts": t["ttft_s"].tolist(),
        "itls": [np.diff(one).tolist() for one in times],
    }
    return json.dumps(document)


def log(made: Trial) -> str:
    """The lines of a start that tell KV blocks."""
    scenario = made.result.scenario
    blocks = scenario.limits().num_blocks
    tokens = (blocks + 1) * scenario.block_size
    return (
        "INFO 11-01 10:00:05 [core.py:71] Initializing a V1 LLM engine (v0.24.0) with config: "
        f"model='{scenario.model}', tensor_parallel_size=1, enable_prefix_caching=True\n"
        f"INFO 11-01 10:00:09 GPU KV cache size: {tokens:,} tokens\n"
    )


def metrics(made: Trial) -> str:
    """The counters of `/metrics` for the requests that were measured."""
    t = made.result.requests[-made.count :]
    columns = {name: t[name] for name in ("ttft_s", "e2e_s", "input_tokens", "output_tokens")}
    text = metrics_text(columns, t["cached_tokens"].clip(lower=0).sum())
    return f"{text}vllm:num_preemptions_total {t['preemptions'].sum()}\n"


def matched(made: Trial, folder: Path, results_only: bool) -> dict:
    """The answer of `match` for a trial's files."""
    os.environ["PAGECAST_CALIBRATIONS"] = str(folder / "own")
    for file, text in (("run.json", results), ("vllm.log", log), ("end.prom", metrics)):
        (folder / file).write_text(text(made))
    files = [
        "--results",
        "run.json",
        *([] if results_only else ["--log", "vllm.log", "--metrics", "end.prom"]),
    ]
    given = [str(folder / one) if "." in one else one for one in files]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run(["match", *given, "--model", made.scenario.model, "--gpu", made.scenario.gpu, "--json"])
    assert code == 0, code
    return json.loads(out.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", help="A-B")
    parser.add_argument("--results-only", action="store_true")
    ask = parser.parse_args()
    first, last = map(int, ask.seeds.split("-"))
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for seed in range(first, last + 1):
        made = trial(seed)
        with tempfile.TemporaryDirectory() as folder:
            found = matched(made, Path(folder), ask.results_only)
        best = found["explanation"]
        cause = best["cause"] if best else "none"
        right[made.kind].append(cause == made.kind)
        tried = ", ".join(f"{one['cause']} {one['distance']:.3f}" for one in found["explanations"])
        columns = (
            "ok" if cause == made.kind else "WRONG",
            f"{made.kind} {made.words}",
            f"{made.scenario.model} {made.scenario.gpu}",
            best["words"] if best else "-",
            f"{found['distance']:.3f}: {tried}",
        )
        print(seed, *columns, sep="\t", flush=True)
    print()
    for kind, each in right.items():
        print(f"{kind}: {sum(each)} of {len(each)}")
    print(f"all: {sum(map(sum, right.values()))} of {sum(map(len, right.values()))}")


if __name__ == "__main__":
    sys.exit(main())
