"""Cost of a hybrid model's groups: CPU time of a replay, as a multiple of the same model with one group.

    python tests/benchmarks/hybrid_replay.py [--runs 3]

P10k, AZ and MC as in `replay.py`, each with gpt-oss 20B (a window group and a full one) and Gemma 3 12B (five
and one), and with `disable_hybrid_kv_cache_manager`, which keeps every token in every layer. A pool has as
many times the blocks as there are groups. Both are run in turn; the least CPU time of each counts.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

from pagecast.sim.replay import Kept, replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

sys.path.insert(0, str(Path(__file__).parent))

from replay import rows

MODELS = {"gpt-oss-20b": 2, "gemma-3-12b": 6}


def cpu_seconds(trace: Trace, scenario: Scenario) -> float:
    """CPU time of one replay."""
    gc.collect()
    start = time.process_time()
    replay(trace, scenario, kept=Kept(steps=False))
    return time.process_time() - start


def main() -> None:
    """Prints a line per workload and model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="replays of each kind")
    runs = parser.parse_args().runs
    print(f"{'trace':6} {'model':12} {'one group':>10} {'hybrid':>10} {'times':>6}")
    for row in rows():
        for model, groups in MODELS.items():
            least = {True: float("inf"), False: float("inf")}
            for _ in range(runs):
                for disabled in least:
                    scenario = Scenario(
                        model=model,
                        num_gpu_blocks=row.blocks * (1 if disabled else groups),
                        costs="roofline",
                        disable_hybrid_kv_cache_manager=disabled,
                    )
                    least[disabled] = min(least[disabled], cpu_seconds(row.trace, scenario))
            one, hybrid = least[True], least[False]
            print(f"{row.name:6} {model:12} {one:8.2f} s {hybrid:8.2f} s {hybrid / one:6.2f}", flush=True)


if __name__ == "__main__":
    main()
