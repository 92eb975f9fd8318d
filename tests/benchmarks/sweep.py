"""How long a sweep takes: 200 trials over 2,000 requests, by one process and by two.

    python tests/benchmarks/sweep.py

The grid is block size x HBM budget x batch size, on the first 2,000 requests of the bundled chat trace.
Each run is a whole `sweep`, from reading nothing to the table, with the start of its processes.
"""

from __future__ import annotations

import argparse
import time

from pagecast.planner_app.planner.executor import cores
from pagecast.planner_app.planner.question import Question
from pagecast.planner_app.planner.space import parse_space
from pagecast.planner_app.planner.study import sweep
from pagecast.sim.core import scheduler
from pagecast.sim.scenario import Scenario
from pagecast.traces.bundled import resolve
from pagecast.traces.read import read

GRID = ["block_size=8,16,32,64,128", "gpu_memory_utilization=0.5:0.95:0.05", "max_num_seqs=32,64,128,256"]
LEVEL = "ttft_p99<2s,tpot_p95<50ms"


def main() -> None:
    """Prints seconds, trials a second and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=1, help="of each number of processes; the best counts")
    parser.add_argument("--search", action="store_true", help="choose the trials by Optuna instead of a grid")
    options = parser.parse_args()
    trace = read(resolve("chat"), limit=options.requests)
    scenario = Scenario()
    question = Question(
        trace, scenario, parse_space(GRID, scenario), slo=LEVEL, trials=200 if options.search else None
    )
    kind = "plain Python" if (scheduler.__file__ or "").endswith(".py") else "compiled"
    print(f"{len(trace):,} requests, {question.count} trials, {cores()} cores, core in {kind}")
    best: dict[int, float] = {}
    for _ in range(options.runs):
        for workers in (1, 2):
            begun = time.perf_counter()
            sweep(question, workers=workers)
            taken = time.perf_counter() - begun
            best[workers] = min(taken, best.get(workers, taken))
    for workers, taken in best.items():
        print(f"{workers} process(es)  {taken:6.1f} s  {question.count / taken:6.1f} trials/s")
    print(f"two processes are {best[1] / best[2]:.2f} times as fast as one")


if __name__ == "__main__":
    main()
