"""Speed of a replay, beside every peer that is installed. Run it with `make bench`.

Rows: P10k (10,000 requests, Poisson 5/s, 512 in, 128 out), AZ (Azure conversation 2023) and MC (Mooncake
conversation at a quarter of its rate, 16-token blocks), block 16, 256 sequences, 8,192 batched tokens, 7,000
blocks (MC 30,000). A row is the best of several runs taken in turn with the peer, since machines are noisy.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from pagecast.sim.core import scheduler
from pagecast.sim.replay import Kept, replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import scale
from pagecast.traces.read import read
from pagecast.traces.schema import Trace

sys.path.insert(0, str(Path(__file__).parent))

from peers import dynamo_seconds, peer_python

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
WORK = ROOT / "build" / "bench"


@dataclass
class Row:
    """One workload: its trace, its pool, and the same as a Mooncake file for the peer."""

    name: str
    trace: Trace
    blocks: int
    file: Path
    speedup: float = 1.0


def rows() -> list[Row]:
    """The three workloads, where the shared traces are beside the project."""
    if not SHARED.is_dir():
        print("no ../shared beside the project: the public workloads are left out")
        return []
    WORK.mkdir(parents=True, exist_ok=True)
    p10k = read(SHARED / "workloads" / "poisson_10k_q5_512_128.jsonl.gz")
    azure = read(SHARED / "traces" / "AzureLLMInferenceTrace_conv_2023.csv.zst")
    mooncake = read(SHARED / "traces" / "mooncake_conversation_trace.jsonl.zst")
    return [
        Row("P10k", p10k, 7000, as_mooncake(p10k, "p10k")),
        Row("AZ", azure, 7000, as_mooncake(azure, "azure")),
        Row("MC", scale(mooncake, 0.25), 30000, as_mooncake(mooncake, "mooncake"), 0.25),
    ]


def as_mooncake(trace: Trace, name: str) -> Path:
    """The trace in Mooncake's format; unique prompts get hash ids of their own."""
    path = WORK / f"{name}.jsonl"
    fresh = 1 << 40
    with path.open("w") as out:
        for row, request in enumerate(trace.requests.itertuples()):
            blocks = -(-int(request.input_tokens) // 512)
            ids: list[int] = []
            for content, offset, length in trace.spans.row(row) if trace.spans is not None else ():
                ids += [content * 1_000_000 + at // 512 for at in range(offset, offset + length, 512)]
            if not ids:
                ids = list(range(fresh, fresh + blocks))
                fresh += blocks
            line = {
                "timestamp": request.arrival_s * 1000,
                "input_length": int(request.input_tokens),
                "output_length": int(request.output_tokens),
                "hash_ids": ids[:blocks],
            }
            out.write(json.dumps(line) + "\n")
    return path


def ours(row: Row, *, pipelined: bool) -> float:
    """Requests per second of one replay, parsing left out."""
    scenario = Scenario(num_gpu_blocks=row.blocks, async_scheduling=pipelined, costs="roofline")
    summary = replay(row.trace, scenario, kept=Kept(steps=False)).summary
    return float(summary["requests"] / summary["wall_s"])


def speed(runs: int) -> None:
    """The three workloads at both pipeline depths, each beside the peer in the same run."""
    python = peer_python(WORK / "peer") if SHARED.is_dir() else None
    if python is None:
        print("Dynamo's mocker does not install here: no peer column")
    print(f"{'workload':10}{'requests':>9}{'sync/s':>10}{'async/s':>10}{'Dynamo/s':>10}{'sync ratio':>12}")
    for row in rows():
        best = {True: 0.0, False: 0.0}
        peer = 0.0
        for _ in range(runs):
            for depth in best:
                best[depth] = max(best[depth], ours(row, pipelined=depth))
            if python is not None:
                taken = dynamo_seconds(python, row.file, row.blocks, row.speedup)
                peer = max(peer, len(row.trace) / taken)
        ratio = f"{best[False] / peer:12.2f}" if peer else f"{'-':>12}"
        print(f"{row.name:10}{len(row.trace):9,}{best[False]:10,.0f}{best[True]:10,.0f}{peer:10,.0f}{ratio}")


def flatness() -> None:
    """Cost a request as traces grow: it should not."""
    print(f"\n{'requests':>10}{'us/request':>12}")
    for count in (1_000, 10_000, 100_000):
        best = min(poisson(count) for _ in range(2))
        print(f"{count:10,}{best * 1e6:12.1f}")


def poisson(count: int) -> float:
    """Seconds a request for `count` of them, Poisson 5/s, 512 in and 128 out."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "arrival_s": np.cumsum(rng.exponential(0.2, count)),
            "input_tokens": np.full(count, 512),
            "output_tokens": np.full(count, 128),
        }
    )
    scenario = Scenario(num_gpu_blocks=7000, costs="roofline")
    summary = replay(Trace("poisson", table), scenario, kept=Kept(steps=False)).summary
    return float(summary["wall_s"] / count)


def million() -> None:
    """A million requests in a process of its own, results streamed: time and peak memory."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import replay, resource, tempfile, time\n"
        "begun = time.perf_counter(); each = replay.poisson(1_000_000)\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20\n"
        "print(f'1,000,000 requests: {each * 1e6:.1f} us each, peak memory {peak:.2f} GiB')"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], check=True)


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs of each workload; the best counts")
    parser.add_argument("--million", action="store_true", help="also replay a million requests")
    options = parser.parse_args()
    begun = time.perf_counter()
    kind = "plain Python" if (scheduler.__file__ or "").endswith(".py") else "compiled"
    print(f"core: {kind}; Python {sys.version.split()[0]}, {os.cpu_count()} cores")
    speed(options.runs)
    flatness()
    if options.million:
        million()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\n{time.perf_counter() - begun:.0f} s in all, peak memory {peak:.2f} GiB")


if __name__ == "__main__":
    main()
