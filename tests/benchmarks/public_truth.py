"""A board of public truth: forecasts of public results that nobody fitted, beside what was measured.

    python tests/benchmarks/public_truth.py [--half judging|teaching|both] [--only WORD]
    python tests/benchmarks/public_truth.py --errors tests/benchmarks/public_truth_errors.csv     # keeps them

`public_truth.csv` has aggregate results of InferenceX (SemiAnalysis; mean TTFT and TPOT of closed loops), as
NVIDIA's aiconfigurator lists them (systems/silicon_sample.csv at 095f58a, Apache-2.0): one instance, no
data-parallel attention, no pipeline, 4, 16 or 64 at a time, the newest of equal set-ups.

The rule: within a kind of runs (engine, GPU, model, GPUs of the instance, experts spread or not) the runs
are sorted by the SHA-256 of their id, and every other one, from the first on, judges. The others teach: by
them were found which published times hold launches or another kernel (`products.py`, `experts.py`), and two
constants of TensorRT-LLM (`OVERLAPPED_KERNEL_S`, `launch_trtllm`). Of them, too, are the errors told beside a
forecast; the judging half says how far those hold.

Known of a run are engine, model, precision, GPUs and lengths, and what InferenceX's published script for it
gives the engine (`benchmarks/` at 843c625; of Llama-3.1-70B at a267b4b and 409e9a4): dtype of the KV cache,
tokens and requests of a step, longest sequence, share of memory, no prefix caching. Lengths are uniform from
0.8 L to L, and there are ten prompts for each client (`random_range_ratio` 0.8 and `num_prompts`). All else
is the engine's default: sizes of CUDA graphs, fused all-reduces, TensorRT-LLM's `batch_wait_timeout_iters`,
`stream_interval` and SGLang's `scheduler_recv_interval` are in these scripts, but not simulated. Throughput
is not listed: compared is what Little's law makes of both latencies, concurrency x output / (TTFT + TPOT x
(output - 1)). A client's share of TTFT is added (`CLIENT_SHARE`).
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.measured.costs import MeasuredCosts
from pagecast.sim.costs.measured.known_errors import FEWEST, Known, Like, like_of
from pagecast.sim.replay import replay
from pagecast.sim.runs.client_share import CLIENT_SHARE
from pagecast.sim.scenario import Scenario
from pagecast.traces.load import Load

RESULTS = Path(__file__).with_suffix(".csv")
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm-guaranteed-no-evict"}
FIGURES = ("throughput", "tpot", "ttft")
KEPT = ("half", "id", "engine", "kind", "family", "spread", *FIGURES)
OTHERS = RESULTS.with_name("public_runs_errors.csv")
SHORTEST = 0.8  # of a length's most


@dataclass(frozen=True)
class Run:
    """A public result: its set-up, and mean latencies in seconds."""

    id: str
    source: str
    engine: str
    gpu: str
    model: str
    input_len: int
    output_len: int
    concurrency: int
    tensor_parallel: int
    experts_over: int
    ttft: float
    tpot: float

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """Engine, GPU, model, and how it is spread."""
        spread = f"TP{self.tensor_parallel}"
        if self.experts_over > 1:
            spread += f" EP{self.experts_over}"
        return self.engine, self.gpu, self.model.rsplit("/", 1)[1], spread

    @property
    def scenario(self) -> Scenario:
        """What is known of the run."""
        return Scenario(
            model=self.model,
            gpu=self.gpu,
            engine=ENGINES[self.engine],
            tensor_parallel_size=self.tensor_parallel,
            enable_expert_parallel=self.experts_over > 1,
            costs="measured",
            **self.recipe,
        )

    @property
    def recipe(self) -> dict[str, Any]:
        """The options that the published script gives the engine, by the scenario's names."""
        model, blackwell = self.model.rsplit("/", 1)[1], self.gpu.startswith("B")
        fp8 = {"kv_cache_dtype": "fp8"}
        long = self.input_len > 1024
        length = {"max_model_len": self.input_len + self.output_len + 200}
        if self.engine == "sglang":
            return {
                **(fp8 if blackwell else {}),
                "gpu_memory_utilization": 0.82,
                "max_num_batched_tokens": 32768,
            }
        if self.engine == "trtllm":
            if model.startswith("Llama"):
                return {
                    **fp8,
                    **length,
                    "max_num_batched_tokens": 16384 if blackwell else length["max_model_len"],
                }
            if model.startswith("gpt-oss"):
                seqs = 512 if blackwell else self.concurrency
                step = {
                    "max_num_batched_tokens": 20000,
                    "max_num_seqs": seqs,
                    "free_gpu_memory_fraction": 0.85,
                }
                return {**(fp8 if blackwell else {}), **length, **step}
            tokens = max(-(-(self.concurrency + self.input_len + 64) // 64) * 64, 8192)
            share = 0.75 if not blackwell or (long and self.tensor_parallel == 4) else 0.8
            return {**fp8, "max_num_batched_tokens": tokens, "free_gpu_memory_fraction": share}
        if model.startswith("MiniMax"):
            if self.gpu.startswith("H100"):
                return {"gpu_memory_utilization": 0.9}
            if blackwell:
                step = {"max_num_batched_tokens": 2 * self.input_len, "gpu_memory_utilization": 0.9}
                return {**fp8, **length, **step, "block_size": 32, "enable_prefix_caching": False}
            step = {"max_num_batched_tokens": 32768, "max_num_seqs": 512, "gpu_memory_utilization": 0.95}
            return {**fp8, **length, **step, "enable_prefix_caching": False}
        seqs = 512 if blackwell else self.concurrency
        step = {"max_num_batched_tokens": 8192, "max_num_seqs": seqs, "gpu_memory_utilization": 0.9}
        same = fp8 if blackwell or model.startswith("Llama") else {}
        return {**same, **length, **step, "enable_prefix_caching": False}

    @property
    def like(self) -> Like:
        """Which runs are like it."""
        costs = self.scenario.step_costs()
        assert isinstance(costs, MeasuredCosts)
        return like_of(costs.operations)

    def throughput(self, ttft: float, tpot: float) -> float:
        """Output tokens per second that follow from mean latencies."""
        tokens = self.output_len * (1 + SHORTEST) / 2
        return self.concurrency * tokens / (ttft + tpot * (tokens - 1))


def runs() -> list[Run]:
    """All results, in the order of the file."""
    with RESULTS.open() as file:
        return [
            Run(
                row["id"],
                row["source"],
                row["engine"],
                row["gpu"],
                row["model"],
                *(int(row[name]) for name in ("input_len", "output_len", "concurrency")),
                *(int(row[name]) for name in ("tensor_parallel", "experts_over")),
                *(float(row[name]) / 1e3 for name in ("ttft_ms", "tpot_ms")),
            )
            for row in csv.DictReader(file)
        ]


def judging(results: list[Run]) -> set[str]:
    """The ids of the runs that judge: every other one of a kind, by the digest of the id."""
    kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for run in results:
        kinds[run.kind].append(run.id)
    return {
        id
        for ids in kinds.values()
        for id in sorted(ids, key=lambda id: hashlib.sha256(id.encode()).hexdigest())[::2]
    }


def forecast(run: Run) -> dict[str, float]:
    """Errors of the forecast, as parts of what was measured. Errors: BadInput where there is none."""
    load = Load(
        input_len=f"uniform:{round(SHORTEST * run.input_len)}-{run.input_len}",
        output_len=f"uniform:{round(SHORTEST * run.output_len)}-{run.output_len}",
        concurrency=run.concurrency,
        num_prompts=10 * run.concurrency,
    )
    summary = CLIENT_SHARE.seen(replay(load.trace(seed=0), run.scenario)).requests
    ttft, tpot = float(summary["ttft_s"].mean()), float(summary["tpot_s"].mean())
    return {
        "throughput": run.throughput(ttft, tpot) / run.throughput(run.ttft, run.tpot) - 1,
        "tpot": tpot / run.tpot - 1,
        "ttft": ttft / run.ttft - 1,
    }


def table(rows: list[dict[str, object]], columns: tuple[str, ...]) -> Iterator[str]:
    """Median and 90th percentile of absolute errors, and the median error, by the columns."""
    groups: dict[tuple[str, ...], list[dict[str, object]]] = defaultdict(list)
    for row in rows:
        groups[tuple(str(row[name]) for name in columns)].append(row)
    titles = "".join(f" {name} median | within 90% | bias |" for name in ("tokens/s", "TPOT", "TTFT"))
    yield f"| {' | '.join(columns)} | runs |{titles}"
    yield "|" + "---|" * (len(columns) + 1 + 3 * len(FIGURES))
    for key, group in sorted(groups.items()):
        cells = [*key, str(len(group))]
        for figure in FIGURES:
            errors = [float(str(row[figure])) for row in group]
            absolute = sorted(map(abs, errors))
            ninety = absolute[-(-9 * len(absolute) // 10) - 1]
            cells += [
                f"{statistics.median(absolute):.1%}",
                f"{ninety:.1%}",
                f"{statistics.median(errors):+.1%}",
            ]
        yield f"| {' | '.join(cells)} |"


def known_errors(rows: Iterable[dict[str, Any]]) -> dict[Like, Known]:
    """The error that nine in ten like runs stayed within, for kinds with enough runs, in whole percent."""
    errors: dict[Like, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        like = Like(*(str(row[name]) for name in Like._fields))
        errors[like].append((abs(float(row["tpot"])), abs(float(row["ttft"]))))
    return {
        like: Known(len(pairs), *(_ninety(column) for column in zip(*pairs, strict=True)))
        for like, pairs in sorted(errors.items())
        if len(pairs) >= FEWEST
    }


def _ninety(errors: Iterable[float]) -> int:
    """The least whole percent that nine in ten are within."""
    ordered = sorted(errors)
    return -int(-100 * ordered[-(-9 * len(ordered) // 10) - 1] // 1)


def within(rows: Iterable[dict[str, Any]], known: dict[Like, Known]) -> dict[str, tuple[int, int]]:
    """Of the runs of which an error is known, how many stayed within it, and how many there are."""
    counts = {"tpot": (0, 0), "ttft": (0, 0)}
    for row in rows:
        band = known.get(Like(*(str(row[name]) for name in Like._fields)))
        for name, (inside, all_runs) in counts.items() if band else ():
            hit = abs(float(row[name])) <= getattr(band, name) / 100
            counts[name] = inside + hit, all_runs + 1
    return counts


def main() -> None:
    """Prints the board."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--half", choices=("judging", "teaching", "both"), default="judging")
    parser.add_argument("--only", default="", help="kinds that have this word")
    parser.add_argument("--errors", type=Path, help="writes the errors to a file")
    options = parser.parse_args()
    results = runs()
    judges = judging(results)
    rows: list[dict[str, object]] = []
    refused: dict[str, int] = defaultdict(int)
    for run in results:
        half = "judging" if run.id in judges else "teaching"
        if options.half not in (half, "both") or options.only not in " ".join(run.kind):
            continue
        try:
            errors = forecast(run)
        except BadInput as reason:
            refused[f"{' '.join(run.kind)}: {reason}"] += 1
            continue
        engine, gpu, model, spread = run.kind
        like = run.like
        named = {"engine": engine, "GPU": gpu, "model": model, "GPUs": spread, "half": half}
        rows.append({"id": run.id, **like._asdict(), **named, **errors})
    if options.errors:
        with options.errors.open("w", newline="") as file:
            writer = csv.DictWriter(file, KEPT, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows({**row, **{name: f"{row[name]:.4f}" for name in FIGURES}} for row in rows)
    for columns in (("half",), ("half", "engine", "GPU"), ("half", "engine", "model"), ("half", "GPUs")):
        print("\n".join(table(rows, columns)), end="\n\n")
    with OTHERS.open() as file:
        known = known_errors([*csv.DictReader(file), *(row for row in rows if row["half"] == "teaching")])
    for like, band in known.items():
        print(
            f"    Like({', '.join(map(repr, like))}): Known({', '.join(map(repr, band))}),".replace("'", '"')
        )
    for name, (inside, all_runs) in within((r for r in rows if r["half"] == "judging"), known).items():
        print(f"{name}: {inside} of {all_runs} judging runs are within what is known of runs like them")
    for reason, count in refused.items():
        print(f"no forecast of {count} runs, {reason}")


if __name__ == "__main__":
    main()
