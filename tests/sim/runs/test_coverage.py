"""Coverage of 90% intervals, on recorded runs that neither fitted costs nor set the spread of intervals."""

from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest
from accuracy_roles import FIT, FIT_MEASURED, JUDGE, JUDGE_MEASURED, SPREAD, folder_of, host_time_factor
from pagecast.sim.costs.calibration.file import load, shipped
from pagecast.sim.runs.forecast import forecast
from pagecast.sim.runs.in_sample import in_sample
from pagecast.sim.runs.recorded import RecordedRun

REPLICATES = 40


def test_no_run_has_two_roles():
    assert len({*FIT, *SPREAD, *JUDGE}) == len(FIT) + len(SPREAD) + len(JUDGE)
    assert not {*FIT_MEASURED} & {*JUDGE_MEASURED}


def test_no_run_that_judges_was_fitted():
    for folder in filter(None, map(folder_of, JUDGE)):
        run = RecordedRun.load(folder)
        assert not any(in_sample(load(name), run) for name in shipped())


@pytest.mark.slow
def test_intervals_hold_at_least_four_fifths_of_the_figures_that_judge_them():
    folders: list[Path] = [folder for folder in map(folder_of, JUDGE) if folder]
    results = [forecast(RecordedRun.load(folder), "auto", replicates=REPLICATES) for folder in folders]
    held = [row.covered for result in results for row in result.rows if row.covered is not None]
    assert len(held) >= 150
    assert sum(held) >= 0.8 * len(held)
    assert median(result.coverage()["median_half_width_percent"] for result in results) <= 10


@pytest.mark.slow
def test_intervals_of_measured_operations_hold_at_least_four_fifths_of_each_latency():
    """Public runs judge them beside these: `tests/benchmarks/coverage.py --training DIR --servingsim DIR`."""
    held = defaultdict(list)
    for folder in filter(None, map(folder_of, JUDGE_MEASURED)):
        factor = host_time_factor(folder)
        run = RecordedRun.load(folder)
        result = forecast(run, "measured", replicates=24, host_time_factor=factor)
        for row in result.rows:
            if row.covered is not None:
                held[row.name.split(".")[0]].append(row.covered)
    assert sum(map(len, held.values())) >= 150
    for latency in ("ttft_s", "tpot_s", "e2e_s"):
        assert sum(held[latency]) >= 0.8 * len(held[latency]), latency
