"""CPU time of replays by tier of step costs, and of what-ifs on every GPU that has measured operations.

    python tests/benchmarks/cost_tiers.py [--rounds 7]

The first table has the best of several rounds, all tiers in turn in each round, and the ratio to calibrated
costs (at most 1.5). The second has a replay of 2,000 requests on each GPU from a scenario to its summary, the
first in a new process of its own with its tables unread (the dashboard's goal: one second).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from pagecast.sim.costs.measured.tables import paths
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.replay import Kept, replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

TIERS = ("vllm-0.24-h200-qwen3-8b", "measured", "roofline")
TRACES = ("chat", "rag")


def main() -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gpu", help="only this what-if, in this process")
    options = parser.parse_args()
    if options.gpu:
        write(f"{what_if_s(options.gpu):.3f}")
        return 0
    print_tiers(options.rounds)
    print_gpus()
    return 0


def print_tiers(rounds: int) -> None:
    """Seconds of CPU time for each trace and tier."""
    write(f"{'trace':10} {'scheduling':12} {'calibrated':>10} {'measured':>9} {'roofline':>9} {'ratio':>6}")
    for name in TRACES:
        trace = read(name)
        for ahead in (False, True):
            scenarios = [Scenario(costs=costs, async_scheduling=ahead) for costs in TIERS]
            best = [float("inf")] * len(TIERS)
            for _ in range(rounds):
                for at, scenario in enumerate(scenarios):
                    begun = time.process_time()
                    replay(trace, scenario, kept=Kept(steps=False))
                    best[at] = min(best[at], time.process_time() - begun)
            kind = "asynchronous" if ahead else "synchronous"
            times = f"{best[0]:10.3f} {best[1]:9.3f} {best[2]:9.3f}"
            write(f"{name:10} {kind:12} {times} {best[1] / best[0]:6.2f}")


def print_gpus() -> None:
    """Seconds of CPU time of a what-if on each GPU, in a process of its own."""
    for key in sorted({gpu for gpu, engine in paths() if engine == "vllm"}):
        name = find_gpu(key).name
        ran = subprocess.run(
            [sys.executable, __file__, "--gpu", name], check=True, capture_output=True, text=True
        )
        write(f"{name:20} {float(ran.stdout):6.3f} s")


def what_if_s(gpu: str) -> float:
    """CPU time from a scenario to the summary of a replay; the trace is there, as on the dashboard."""
    trace = read("chat")
    begun = time.process_time()
    replay(trace, Scenario(gpu=gpu, costs="measured"), kept=Kept(steps=False))
    return time.process_time() - begun


def write(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
