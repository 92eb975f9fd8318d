"""Shipped calibrations: every coefficient certain, and those of our engine fitted again from their sweeps."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from pagecast.sim.costs.calibration.file import load, shipped
from pagecast.sim.fitting.build import MOST_SPREAD, CalibrationRun, calibrate
from pagecast.sim.runs.recorded import RecordedRun

SWEEPS = Path(__file__).parents[2] / "engine" / "sweeps"
spec = importlib.util.spec_from_file_location("unpack_sweeps", SWEEPS / "unpack.py")
unpack_sweeps = importlib.util.module_from_spec(spec)
spec.loader.exec_module(unpack_sweeps)
OWN = {
    "pagecast-h200-qwen3-8b": ("h200n-qwen3-8b", "h200o-qwen3-8b"),
    "pagecast-h200-qwen3-0.6b": ("h200h-qwen3-0.6b", "h200i-qwen3-0.6b"),
    "pagecast-h100-qwen3-8b": ("h100t-qwen3-8b", "h100u-qwen3-8b"),
}
SEGMENTS = {"h200o-qwen3-8b": 7}  # what there was time for: all synchronous ones, and one asynchronous


@pytest.mark.parametrize("name", shipped())
def test_every_coefficient_is_certain_and_no_curve_falls(name):
    calibration = load(name)
    copies = np.array(calibration.replicates)
    spread = copies.std(axis=0) / np.maximum(copies.mean(axis=0), 1e-12)
    assert len(copies) >= 32 and spread.max() < MOST_SPREAD
    assert np.all(np.diff(calibration.curve_ns) >= 0)


@pytest.mark.parametrize("shipped", OWN)
def test_the_sweeps_in_the_repository_are_those_that_were_fitted(shipped, tmp_path):
    runs, model = load(shipped).provenance["runs"], shipped.split("-", 2)[2]
    for name in OWN[shipped]:
        folder = unpack_sweeps.unpack(name, tmp_path)
        first = RecordedRun.load(sorted(folder.iterdir())[0])
        mine = [run for run in runs if run["gpu_id"] == first.meta["gpu_id"]]
        assert [run["asynchronous"] for run in mine] == [False, True]
        assert first.meta["model_name"].lower().endswith(model)
        assert len(list(folder.iterdir())) == SEGMENTS.get(name, 12)


@pytest.mark.slow
@pytest.mark.parametrize("shipped", OWN)
def test_the_same_sweeps_give_the_shipped_coefficients_again(shipped, tmp_path):
    folders = [unpack_sweeps.unpack(name, tmp_path) for name in OWN[shipped]]
    sources = [source for folder in folders for source in CalibrationRun.all(str(folder))]
    made, kept = calibrate(sources, "again"), load(shipped)
    assert made.terms_ns == pytest.approx(kept.terms_ns, rel=1e-3)
    assert made.curve_ns == pytest.approx(kept.curve_ns, rel=1e-3)


def test_a_term_that_only_one_load_of_a_sweep_shows_is_kept():
    """One load alone decodes behind shared prefixes; without the term chat was 26% too slow."""
    assert load("pagecast-h100-qwen3-8b").terms_ns["shared_token"] > 0
