"""What n-grams and a host tier take is fitted to runs that had them, kept in the file and charged."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.file import Calibration, load
from pagecast.sim.costs.calibration.option_costs import UNKNOWN, OptionCosts
from pagecast.sim.fitting import option_fit
from pagecast.sim.fitting.build import CalibrationRun, calibrate
from pagecast.sim.fitting.option_fit import option_costs_of
from pagecast.sim.replay import Kept, replay
from pagecast.sim.runs.forecast import scenario_of
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.run_figures import measured
from pagecast.sim.scenario import Scenario
from pagecast.sim.speculation.lookup import lookup_of
from pagecast.traces.operations import select
from pagecast.traces.read import read

TESTS = Path(__file__).parents[2]
VLLM = TESTS / "sim" / "runs" / "recorded"
OWN = TESTS / "engine" / "recorded"
OPTION_SWEEPS = "h200m-qwen3-8b-options"
EARLIER = OWN.parent / "sweeps" / "h200hi-qwen3-8b.json"  # costs of earlier kernels, as the runs have
KNOWN = OptionCosts(30_000.0, 500_000.0, 0.1, 40e9, 20e9, 500_000.0, 8_000.0)


@pytest.fixture
def costly(tmp_path: Path) -> Path:
    """A file of the shipped calibration with costs of options."""
    path = tmp_path / "c.json"
    replace(load("pagecast-h200-qwen3-8b"), options=KNOWN).save(path)
    return path


def test_vllms_runs_tell_its_host_time() -> None:
    runs = [
        RecordedRun.load(VLLM / f"vllm-h200-qwen3-8b-{name}") for name in ("ngram-azure", "offload-mooncake")
    ]
    costs = option_costs_of(load("vllm-0.24-h200-qwen3-8b"), runs)
    assert costs.lookup_ns == pytest.approx(46_000, rel=0.1)
    assert costs.lookup_prompt_ns == pytest.approx(996_000, rel=0.1)
    assert costs.lookup_sd is not None and 0.05 < costs.lookup_sd < 0.3
    assert costs.offloading_step_ns == pytest.approx(992_000, rel=0.3)
    assert costs.offloading_block_ns == pytest.approx(17_100, rel=0.3)
    assert costs.load_bytes_per_s is None  # it did not record when copies began


@pytest.mark.parametrize("free", [-4.0, 4.0])
def test_what_a_host_tier_takes_is_the_best_fit_of_costs_that_are_not_negative(
    free: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a few blocks a step may hide its work, so that a straight line would begin below zero."""
    blocks = np.random.default_rng(1).integers(0, 40, 2000).astype(float)
    more = 1000 * (blocks - free) + np.random.default_rng(2).normal(0, 500, 2000)
    rows = [(count, took, took) for count, took in zip(blocks, more, strict=True)]
    monkeypatch.setattr(option_fit, "offloading_rows", lambda *_: rows)
    run = RecordedRun.load(OWN / "h200f-qwen3-8b-host-async")
    step_ns, block_ns = option_fit.offloading_ns([run], Scenario().step_costs())
    assert step_ns is not None
    assert block_ns is not None

    def error(step: float, block: float) -> float:
        return float(((step + block * blocks - more) ** 2).sum())

    nearby = [max(step_ns + change, 0.0) for change in (-50.0, 0.0, 50.0)]
    assert error(step_ns, block_ns) <= min(
        error(step, block_ns + change) for step in nearby for change in (-10.0, 0.0, 10.0)
    )
    assert min(step_ns, block_ns) >= 0


def test_the_engines_runs_tell_the_rate_of_its_link() -> None:
    run = RecordedRun.load(OWN / "h200f-qwen3-8b-host-async")
    costs = option_costs_of(load(str(EARLIER)), [run])
    assert costs.load_bytes_per_s == pytest.approx(46.6e9, rel=0.01)
    assert costs.store_bytes_per_s is not None
    assert costs.offloading_step_ns is None  # steps planned ahead hide the host's time


@pytest.mark.parametrize(
    ("name", "bound"), [("ngram-azure", 3), pytest.param("host-chat", 6, marks=pytest.mark.slow)]
)
def test_sweeps_with_options_forecast_runs_with_them(name: str, bound: float, tmp_path: Path) -> None:
    """Sweeps and runs of one H200; the plain costs are of two others."""
    sweeps = [RecordedRun.load(path) for path in sorted((OWN.parent / "sweeps" / OPTION_SWEEPS).iterdir())]
    plain = load(str(EARLIER))
    options = option_costs_of(plain, sweeps)
    assert options.offloading_step_ns == pytest.approx(185_000, rel=0.1)
    assert options.offloading_block_ns == pytest.approx(32_000, rel=0.1)
    path = tmp_path / "c.json"
    replace(plain, options=options).save(path)
    run = RecordedRun.load(OWN / f"h200m-qwen3-8b-{name}")
    ours = replay(run.trace("arrival"), scenario_of(run, str(path)), kept=Kept(steps=False)).summary
    real = measured(run).figures()
    assert ours["tpot_s"]["mean"] == pytest.approx(real["tpot_s.mean"], rel=bound / 100)
    assert ours["e2e_s"]["mean"] == pytest.approx(real["e2e_s.mean"], rel=bound / 100)


def test_a_run_with_both_options_tells_neither() -> None:
    run = RecordedRun.load(OWN / "h200f-qwen3-0.6b-host-ngram")
    with pytest.raises(BadInput, match="can't be told apart"):
        option_costs_of(load("pagecast-h200-qwen3-0.6b"), [run])


def test_runs_with_options_alone_are_no_calibration() -> None:
    run = CalibrationRun(RecordedRun.load(VLLM / "vllm-h200-qwen3-8b-ngram-azure"))
    with pytest.raises(BadInput, match="without n-grams and a host tier"):
        calibrate([run], "c")


def test_a_file_keeps_them_and_old_files_have_none(costly: Path, tmp_path: Path) -> None:
    assert Calibration.load(costly).options == KNOWN
    assert load("pagecast-h200-qwen3-8b").options == UNKNOWN
    costly.write_text(costly.read_text().replace('"lookup_ns": 30000.0', '"lookup_ns": -1'))
    with pytest.raises(BadInput, match="lookup_ns is -1"):
        Calibration.load(costly)


def test_a_replay_charges_them(costly: Path) -> None:
    assert lookup_of(CalibratedCosts(Calibration.load(costly))) == (30_000, 500_000)
    scenario = Scenario(
        model="Qwen/Qwen3-8B",
        gpu="H200",
        engine="pagecast",
        costs=str(costly),
        kv_offloading_size=40.0,
        async_scheduling=False,
    )
    links = scenario.host_links(scenario.step_costs())
    assert links is not None
    assert (links.load.bytes_per_s, links.store.bytes_per_s) == (40e9, 20e9)
    assert (links.step_ns, links.submit_ns) == (500_000, 8_000)
    given = scenario.changed(host_load_gb_per_s=10.0, offloading_step_ms=0.0)
    links = given.host_links(scenario.step_costs())
    assert links is not None
    assert (links.load.bytes_per_s, links.step_ns, links.submit_ns) == (10e9, 0, 8_000)
    trace = select(read("chat"), np.arange(20))
    plain = replay(trace, scenario.changed(costs="pagecast-h200-qwen3-8b"))
    slower = replay(trace, scenario)
    assert slower.requests["tpot_s"].mean() > plain.requests["tpot_s"].mean() + 0.0004
