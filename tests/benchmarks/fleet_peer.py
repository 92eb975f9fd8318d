"""AISimulate's replay of a fleet beside ours, in one run: requests per second, and what both forecast.

    pip install --target FOLDER --no-deps --pre aisimulate
    python tests/benchmarks/fleet_peer.py FOLDER                 # 4 replicas, Mooncake's first 1,000 requests
    python tests/benchmarks/fleet_peer.py FOLDER --requests 3000

Both replay the same requests on the same fleet: Qwen3-8B on H200s, 30,000 blocks of 16 tokens each, steps
timed by NVIDIA's measured operations of vLLM 0.24 (`--costs measured` here). Our router is round-robin,
AISimulate's is its default. Turns alternate; the time is CPU time of this process, the better of two.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pagecast.sim.fleet.settings import FleetSettings, ReplicaGroup, RouterSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.replay.result import Kept
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read
from pagecast.traces.schema import Trace
from pagecast.traces.source import open_source

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
MOONCAKE = SHARED / "traces" / "mooncake_conversation_trace.jsonl.zst"
BLOCKS, BLOCK_SIZE, SEQUENCES, BATCHED = 30_000, 16, 256, 8192
Figures = dict[str, float]


def ours(trace: Trace, replicas: int) -> Callable[[], Figures]:
    """Our replay of the fleet."""
    scenario = Scenario(
        costs="measured",
        num_gpu_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=BATCHED,
        async_scheduling=False,
    )
    fleet = FleetSettings(
        groups=(ReplicaGroup(replicas=replicas),), router=RouterSettings(policy="round-robin")
    )

    def run() -> Figures:
        summary = replay_fleet(trace, scenario, fleet, kept=Kept(steps=False)).summary
        return {
            "TTFT mean": summary["ttft_s"]["mean"],
            "TPOT mean": summary["tpot_s"]["mean"],
            "E2E mean": summary["e2e_s"]["mean"],
            "prefix hits": summary["token_hit_rate"],
        }

    return run


def theirs(file: Path, replicas: int) -> Callable[[], Figures]:
    """AISimulate's replay of the fleet, from its Python interface."""
    from aisimulate import runner
    from aisimulate.sweeper.replay import BackendDeploymentSpec, ReplayOutputRequirements, ReplaySpec

    engine: dict[str, Any] = {
        "engine_type": "vllm",
        "aic_model_path": "Qwen/Qwen3-8B",
        "aic_system": "h200_sxm",
        "aic_backend_version": "0.24.0",
        "aic_tp_size": 1,
        "num_gpu_blocks": BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": BATCHED,
        "enable_prefix_caching": True,
    }
    spec = ReplaySpec(
        backend_deployment=BackendDeploymentSpec(
            deployment_mode="agg",
            backend="vllm",
            backend_version="0.24.0",
            agg_engine_args=engine,
            num_workers=replicas,
        ),
        workload={"trace_format": "mooncake", "trace_block_size": 512, "trace_path": str(file)},
        goal={"target": "throughput", "sla": None},
        execution_mode="offline",
    )
    simulator = runner.EngineReplayRunnerFactory().create(0)

    def run() -> Figures:
        found = simulator.run(spec, output_requirements=ReplayOutputRequirements()).metrics
        return {
            "TTFT mean": found["mean_ttft_ms"] / 1000,
            "TPOT mean": found["mean_tpot_ms"] / 1000,
            "E2E mean": found["mean_e2e_latency_ms"] / 1000,
            "prefix hits": found["first_admission_prefix_cache_reused_ratio"],
        }

    return run


def main() -> None:
    """Prints both, line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", help="where aisimulate is installed")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=4)
    options = parser.parse_args()
    if not MOONCAKE.exists():
        print("no ../shared beside the project")
        return
    sys.path.append(options.folder)
    trace = read(MOONCAKE, limit=options.requests)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        lines = open_source(MOONCAKE).text().splitlines()[: options.requests]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        assert [json.loads(line)["input_length"] for line in lines] == np.asarray(
            trace.integers("input_tokens")
        ).tolist()
        runs = {
            "pagecast": ours(trace, options.replicas),
            "aisimulate": theirs(file, options.replicas),
        }
        cpu: dict[str, float] = {}
        figures: dict[str, Figures] = {}
        for _ in range(2):
            for name, run in runs.items():
                begun = time.process_time()
                figures[name] = run()
                cpu[name] = min(cpu.get(name, float("inf")), time.process_time() - begun)
    print(f"{len(trace):,} requests of Mooncake on {options.replicas} replicas")
    for name, found in figures.items():
        shown = ", ".join(
            f"{key} {value:.1%}" if key == "prefix hits" else f"{key} {1000 * value:,.1f} ms"
            for key, value in found.items()
        )
        print(f"{name:11}{len(trace) / cpu[name]:8,.0f} requests per CPU second; {shown}")
    print(f"pagecast is {cpu['aisimulate'] / cpu['pagecast']:.1f} times as fast")


if __name__ == "__main__":
    main()
