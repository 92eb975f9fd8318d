"""What our engine measured on an H200, and what its calibrations, fitted to sweeps alone, forecast of it."""

from pathlib import Path

import pytest
from pagecast.sim.forecast import Forecast, Row, forecast
from pagecast.sim.recorded import RecordedRun

RUNS = Path(__file__).parents[1] / "engine" / "recorded"
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
# Figures beyond the bounds below, in percent, as they were measured: two recordings of a light run of agent
# sessions differ by 23% in median TTFT and 16% in its p90, for their turns meet each other by chance.
BEYOND = {
    ("agents-load", "ttft_s.p50"): 6.0,
    ("agents-load", "ttft_s.p90"): 4.0,
    ("agents-load", "tpot_s.p99"): 7.0,
    ("agents-overload", "ttft_s.p50"): 8.5,
}


def allowed(run: str, row: Row) -> float:
    """Percent: 3, p99 6; a TTFT may be off by what 1% of step time makes of it."""
    bound = 6.0 if row.name.endswith("p99") else 3.0
    if row.name.startswith("ttft_s"):
        bound = max(bound, abs(row.sensitivity or 0.0))
    return max(bound, BEYOND.get((run, row.name), 0.0))


@pytest.mark.parametrize("run", ["mooncake-load", "mooncake-overload", "agents-load", "agents-overload"])
def test_forecasts_of_our_engine_are_within_their_bounds(run: str) -> None:
    found = forecast(RecordedRun.load(RUNS / f"h200-qwen3-8b-{run}"), "auto", replicates=0, workers=1)
    assert found.costs == "pagecast-h200-qwen3-8b" and not found.in_sample
    for row in judged(found):
        assert abs(row.error_percent) <= allowed(run, row), f"{row.name}: {row.error_percent:+.1f}%"


def judged(found: Forecast) -> list[Row]:
    """Means, p50, p90 and p99 of latencies, and the makespan."""
    rows = [row for row in found.rows if row.name.split(".")[0] in LATENCIES and not row.name.endswith("p95")]
    return [*rows, next(row for row in found.rows if row.name == "makespan_s")]


@pytest.mark.parametrize("run", ["mooncake-overload", "agents-overload"])
def test_intervals_hold_what_was_measured_and_are_narrow(run: str) -> None:
    coverage = forecast(RecordedRun.load(RUNS / f"h200-qwen3-8b-{run}"), "auto").coverage()
    assert coverage["covered"] is not None and coverage["covered"] >= 0.8
    assert coverage["median_half_width_percent"] is not None
    assert coverage["median_half_width_percent"] <= 10


def test_costs_carried_over_to_another_model_are_worse_than_its_own_and_say_so() -> None:
    run = RecordedRun.load(RUNS / "h200-qwen3-0.6b-mooncake")
    own = forecast(run, "auto", replicates=0, workers=1)
    carried = forecast(run, "pagecast-h200-qwen3-8b", replicates=0, workers=1, transfer=True)
    assert own.costs == "pagecast-h200-qwen3-0.6b"
    assert "carried over from Qwen/Qwen3-8B" in carried.expected_error

    def mean_tpot(found: Forecast) -> float:
        return next(abs(row.error_percent) for row in found.rows if row.name == "tpot_s.mean")

    assert mean_tpot(own) < mean_tpot(carried) < 20
