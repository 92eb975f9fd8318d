"""The same public traffic under the rules of vLLM, SGLang and TensorRT-LLM, with one model, GPU and memory.

    python tests/benchmarks/engines.py                    # Mooncake conversations and Azure, two loads each
    python tests/benchmarks/engines.py --limit 300        # fewer requests

Only the rules differ: scheduling, memory and its page size, eviction. Step costs are the roofline's for all
of them, so this does not compare how fast the engines are. Each trace is replayed at two loads, with a KV
memory that is short at the second.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pagecast.sim.replay import Kept, replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import scale
from pagecast.traces.read import read
from pagecast.traces.schema import Trace

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
TRACES: dict[str, tuple[str, int, tuple[float, ...]]] = {  # file, tokens of KV, times the trace's rate
    "mooncake": ("mooncake_conversation_trace.jsonl.zst", 400_000, (0.1, 0.2)),
    "azure": ("AzureLLMInferenceTrace_conv_2023.csv.zst", 60_000, (2.0, 6.0)),
}
RULES: dict[str, dict[str, Any]] = {
    "vllm": {"engine": "vllm", "block_size": 16},
    "sglang": {"engine": "sglang", "block_size": 1},
    "sglang, lpm": {"engine": "sglang", "block_size": 1, "scheduling_policy": "lpm"},
    "sglang, mixed": {"engine": "sglang", "block_size": 1, "enable_mixed_chunk": True},
    "trtllm, no evict": {"engine": "trtllm-guaranteed-no-evict", "block_size": 32},
    "trtllm, max util": {"engine": "trtllm-max-utilization", "block_size": 32},
    "trtllm, static": {"engine": "trtllm-static", "block_size": 32},
}
COLUMNS = ("rules", "TTFT p50", "p99 s", "TPOT p50", "p99 ms", "makespan s", "hits", "preempted")


def rows(trace: Trace, tokens: int, model: str, gpu: str) -> Iterator[tuple[str, ...]]:
    """A line per rule set."""
    for name, fields in RULES.items():
        scenario = Scenario(
            model=model, gpu=gpu, costs="roofline", num_gpu_blocks=tokens // fields["block_size"], **fields
        )
        result = replay(trace, scenario, kept=Kept(steps=False))
        done = result.requests[result.requests["state"] == "completed"]
        ttft = done["ttft_s"].to_numpy(np.float64)
        tpot = done["tpot_s"].dropna().to_numpy(np.float64) * 1e3
        summary = result.summary
        yield (
            name,
            f"{np.percentile(ttft, 50):.2f}",
            f"{np.percentile(ttft, 99):.1f}",
            f"{np.percentile(tpot, 50):.1f}",
            f"{np.percentile(tpot, 99):.1f}",
            f"{summary['makespan_s']:.0f}",
            f"{summary['reused_prefix_tokens'] / max(int(done['input_tokens'].sum()), 1):.1%}",
            f"{summary['preemptions']}",
        )


def main() -> None:
    """Prints a table per trace and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--limit", type=int, default=1000, help="requests of each trace [1000]")
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--gpu", default="H100")
    given = parser.parse_args()
    for name, (file, tokens, loads) in TRACES.items():
        trace = read(SHARED / file, limit=given.limit)
        for load in loads:
            print(f"\n{name}, {len(trace)} requests at {load:g} times its rate, {tokens:,} tokens of KV")
            print("".join(f"{column:>{18 if column == 'rules' else 11}}" for column in COLUMNS))
            for row in rows(scale(trace, load), tokens, given.model, given.gpu):
                print("".join(f"{cell:>{18 if at == 0 else 11}}" for at, cell in enumerate(row)), flush=True)


if __name__ == "__main__":
    main()
