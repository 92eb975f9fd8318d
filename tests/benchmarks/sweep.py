"""Time of a sweep: 200 trials over 2,000 requests, with one process and with two.

    OPENBLAS_NUM_THREADS=1 python tests/benchmarks/sweep.py

The grid is block size x HBM budget x batch size, on the first 2,000 requests of the bundled chat trace.
Trials that differ by limits which no step meets share a replay; `--apart` replays each by itself.
Each run is a whole `sweep`, from the question to the table, with the start of its processes. Beside the
time on the clock stands that of the processors, the longest process's: what the clock would show on a machine
with nothing else to do.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace

from pagecast.planner_app.planner.execution.executor import cores, executor
from pagecast.planner_app.planner.execution.options import Many
from pagecast.planner_app.planner.sweep.options import SweepOptions
from pagecast.planner_app.planner.sweep.question import SweepQuestion
from pagecast.planner_app.planner.sweep.study import sweep
from pagecast.sim.core import scheduler
from pagecast.sim.scenario import Scenario
from pagecast.traces.bundled import resolve
from pagecast.traces.read import read

GRID = ["block_size=8,16,32,64,128", "gpu_memory_utilization=0.5:0.95:0.05", "max_num_seqs=32,64,128,256"]
LEVEL = "ttft_p99<2s,tpot_p95<50ms"


def swept(many, *arguments, **options):
    """A sweep whose replays run where `many` says."""
    with executor(many) as run:
        return sweep(*arguments, run=run, **options)


def main() -> None:
    """Prints seconds, trials per second and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=1, help="of each number of processes; the best counts")
    parser.add_argument("--apart", action="store_true", help="share no replays among trials")
    parser.add_argument("--search", action="store_true", help="choose the trials by Optuna instead of a grid")
    options = parser.parse_args()
    trace = read(resolve("chat"), limit=options.requests)
    scenario = Scenario()
    question = SweepQuestion(
        trace, scenario, SweepOptions(settings=GRID, slo=LEVEL, search=200 if options.search else None)
    )
    kind = "plain Python" if (scheduler.__file__ or "").endswith(".py") else "compiled"
    print(f"{len(trace):,} requests, {question.count} trials, {cores()} cores, core in {kind}")
    if options.apart:
        alone = replace(question.work(), shares=False)
        SweepQuestion.work = lambda self: alone  # type: ignore[method-assign]
    best: dict[int, tuple[float, float, int]] = {}
    for _ in range(options.runs):
        for workers in (1, 2):
            taken = _timed(question, workers)
            best[workers] = min(taken, best.get(workers, taken))
    for workers, (clock, cpu, replays) in best.items():
        rate = question.count / clock
        print(
            f"{workers} process(es)  {clock:6.1f} s  {rate:6.1f} trials/s  processor {cpu:6.1f} s  "
            f"{replays} replays"
        )
    print(f"two processes are {best[1][0] / best[2][0]:.2f} times as fast as one, ", end="")
    print(f"{best[1][1] / best[2][1]:.2f} times by processor time")


def _timed(question: SweepQuestion, workers: int) -> tuple[float, float, int]:
    """Seconds on the clock and of processor time (with an equal part of the children's), and replays."""
    begun, own, others = time.perf_counter(), time.process_time(), _children_s()
    result = swept(Many(workers=workers), question)
    cpu = time.process_time() - own + (_children_s() - others) / workers
    return time.perf_counter() - begun, cpu, result.replays


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
