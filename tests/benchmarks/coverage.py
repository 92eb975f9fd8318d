"""Share of figures that their 90% intervals hold, on recorded runs that neither fitted costs nor set spreads.

    python tests/benchmarks/coverage.py [--costs auto] [--replicates 80] [--workers N]

`tests/sim/runs/accuracy_roles.py` says what each run is used for.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sim" / "runs"))

from accuracy_roles import JUDGE, JUDGE_MEASURED, folder_of, host_time_factor
from pagecast.sim.runs.forecast import Forecast, forecast
from pagecast.sim.runs.recorded import RecordedRun


def main() -> int:
    """Prints a row per run, and the share over all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--costs", default="auto")
    parser.add_argument("--replicates", type=int, default=80)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--only", default="", help="runs whose name holds this")
    options = parser.parse_args()
    results = []
    write(f"{'run':44} figures inside  share half-width  TPOT mean E2E mean TTFT mean")
    runs = JUDGE_MEASURED if options.costs == "measured" else JUDGE
    for folder in map(folder_of, runs):
        if folder is None or options.only not in folder.name:
            continue
        run = RecordedRun.load(folder)
        result = forecast(
            run,
            options.costs,
            replicates=options.replicates,
            workers=options.workers,
            host_time_factor=host_time_factor(folder) if options.costs == "measured" else None,
        )
        results.append(result)
        show(folder.name, result)
    figures = sum(int(result.coverage()["figures"] or 0) for result in results)
    inside = sum(int(result.coverage()["inside"] or 0) for result in results)
    write(f"{'all':44} {figures:7} {inside:6} {100 * inside / max(figures, 1):5.1f}%")
    return 0


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
