"""Coverage of 90% intervals, on recorded runs that neither fitted costs nor set the spread of intervals."""

from pathlib import Path
from statistics import median

import pytest
from accuracy_roles import FIT, JUDGE, SPREAD, folder_of
from pagecast.sim.costs.calibration.file import load, shipped
from pagecast.sim.runs.forecast import forecast
from pagecast.sim.runs.in_sample import in_sample
from pagecast.sim.runs.recorded import RecordedRun

REPLICATES = 40


def test_no_run_has_two_roles():
    assert len({*FIT, *SPREAD, *JUDGE}) == len(FIT) + len(SPREAD) + len(JUDGE)


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
