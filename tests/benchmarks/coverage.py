"""Share of figures that their 90% intervals hold, on runs that neither fitted costs nor set spreads.

    python tests/benchmarks/coverage.py [--costs auto] [--replicates 80] [--workers N]
    python tests/benchmarks/coverage.py --training DIR --servingsim DIR

`tests/sim/runs/accuracy_roles.py` says what each recorded run is used for. Public runs (`public_runs.py`) are
forecast with measured operations, each with the spreads that the other set-ups give (`public_spread.py`). All
of them count whose load is known: less than one request in 100 failed, and the server kept up.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sim" / "runs"))

from accuracy_roles import JUDGE, JUDGE_MEASURED, folder_of, host_time_factor
from pagecast.sim.costs.measured.costs import MeasuredCosts
from pagecast.sim.costs.measured.spread import MeasuredSpread
from pagecast.sim.replay.replicates import ChangeCosts
from pagecast.sim.replay.result import Result
from pagecast.sim.replay.simulation import replay
from pagecast.sim.runs.forecast import Forecast, forecast, forecast_results
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from public_runs import PublicRun
from public_spread import RunSpread, leave_out, public_runs, run_spreads


def main() -> int:
    """Prints a row per run, and the share over all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--costs", default="auto")
    parser.add_argument("--replicates", type=int, default=80)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--only", default="", help="runs whose name holds this")
    parser.add_argument("--training", type=Path, help="inference-sim/training at c4f0340")
    parser.add_argument("--servingsim", type=Path, help="bench/examples of LLMServingSim")
    options = parser.parse_args()
    write(f"{'run':44} figures inside  share half-width  TPOT mean E2E mean TTFT mean")
    public = options.training or options.servingsim
    results = list(on_public_runs(options) if public else on_recorded_runs(options))
    figures = sum(int(result.coverage()["figures"] or 0) for result in results)
    inside = sum(int(result.coverage()["inside"] or 0) for result in results)
    write(f"{'all':44} {figures:7} {inside:6} {100 * inside / max(figures, 1):5.1f}%")
    by_metric(results)
    return 0


def on_recorded_runs(options: argparse.Namespace) -> Iterator[Forecast]:
    """Forecasts of recorded runs that judge."""
    runs = JUDGE_MEASURED if options.costs == "measured" else JUDGE
    for folder in map(folder_of, runs):
        if folder is None or options.only not in folder.name:
            continue
        result = forecast(
            RecordedRun.load(folder),
            options.costs,
            replicates=options.replicates,
            workers=options.workers,
            host_time_factor=host_time_factor(folder) if options.costs == "measured" else None,
        )
        show(folder.name, result)
        yield result


def on_public_runs(options: argparse.Namespace) -> Iterator[Forecast]:
    """Forecasts of public runs, each with the spreads of the other set-ups."""
    runs = list(public_runs(options.training, options.servingsim))
    spreads = list(run_spreads(runs))
    for run in runs:
        if options.only not in run.name:
            continue
        if run.overloaded:
            write(f"{run.name:44} overloaded, {run.failed} requests failed: not judged")
            continue
        result = forecast_public(run, spreads, options.replicates, options.workers)
        show(run.name, result)
        yield result


def forecast_public(
    run: PublicRun, spreads: list[RunSpread], replicates: int, workers: int | None
) -> Forecast:
    """A public run's forecast, with intervals by the other set-ups."""
    spread, client = leave_out(spreads, run.set_up)
    results = run.results if run.results.client is None else replace(run.results, client=client)
    return forecast_results(
        results,
        run.scenario,
        replicates=replicates,
        workers=workers,
        replay_of=partial(replay_with_spread, spread=spread),
    )


def replay_with_spread(
    trace: Trace, scenario: Scenario, change: ChangeCosts, *, spread: MeasuredSpread
) -> Result:
    """A replay with draws of `spread`."""
    costs = scenario.step_costs()
    assert isinstance(costs, MeasuredCosts)
    costs.spread = spread
    return replay(trace, scenario, costs=change(costs))


def by_metric(results: list[Forecast]) -> None:
    """The share of figures held, by latency."""
    held: dict[str, list[bool]] = defaultdict(list)
    for row in (row for result in results for row in result.rows if row.covered is not None):
        held[row.name.split(".")[0] if "." in row.name else "totals"].append(bool(row.covered))
    for name, values in held.items():
        write(f"    {name:40} {len(values):7} {sum(values):6} {100 * sum(values) / len(values):5.1f}%")


def show(name: str, result: Forecast) -> None:
    """A run's coverage and its errors."""
    held = result.coverage()
    errors = {row.name: row.error_percent for row in result.rows}
    write(
        f"{name:44} {held['figures']:7} {held['inside']:6} {100 * (held['covered'] or 0):5.0f}% "
        f"{held['median_half_width_percent']:9.1f}% {errors['tpot_s.mean']:+9.1f}% "
        f"{errors['e2e_s.mean']:+7.1f}% {errors['ttft_s.mean']:+8.1f}%"
    )
    outside = [f"{row.name} {row.error_percent:+.1f}%" for row in result.rows if row.covered is False]
    if outside:
        write(f"    outside: {', '.join(outside)}")


def write(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
