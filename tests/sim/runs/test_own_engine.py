"""Our engine's measurements on H200s and H100s beside forecasts by calibrations fitted to sweeps alone."""

from functools import cache
from pathlib import Path

import pytest
from accuracy_roles import JUDGE
from pagecast.sim.runs.forecast import Forecast, ForecastRow, forecast
from pagecast.sim.runs.recorded import RecordedRun

RUNS = Path(__file__).parents[2] / "engine" / "recorded"
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
# GPU C set the spread between GPUs: only runs of others judge, and of those the ones of the fitted kernels.
HELD = tuple(
    run.name.removeprefix("h200")
    for run in JUDGE
    if run.parent == RUNS and "h200" in run.name and "8b" in run.name
)
TTFT_MISSED = pytest.mark.xfail(strict=True, reason="TTFT -6.5%, of which 1% of step time makes 4%")
LOADS = ("mooncake-load", "azure-async", "azure-sync", "rag-async", "chat-async")
H100 = (
    "t-qwen3-8b-mooncake-load",
    pytest.param("t-qwen3-8b-azure-async", marks=[pytest.mark.slow, TTFT_MISSED]),
    *(pytest.param(f"t-qwen3-8b-{load}", marks=pytest.mark.slow) for load in LOADS[2:]),
    *(pytest.param(f"u-qwen3-8b-{load}", marks=pytest.mark.slow) for load in LOADS),
)
FEW = ("o-qwen3-8b-mooncake-load",)  # in `make test`; the others are slow
# Runs that miss the bounds; see docs/accuracy.md.
MISSED = {
    "n-qwen3-8b-azure-sync": "TPOT -4.5%: near saturation, on the slower of the two GPUs",
    "o-qwen3-8b-chat-sync": "TPOT -5.2%: each request takes the host 10 us more than in the sweeps",
    "o-qwen3-8b-chat-async": "TTFT -4.4%, p90 -8.0%",
}
# Of a run's figures, those that may miss the bounds below: turns of agent sessions meet by chance.
MOST_BEYOND = 0.05


@cache
def forecast_of(run: str) -> Forecast:
    """A run's forecast, made once."""
    return forecast(RecordedRun.load(RUNS / f"h200{run}"), "auto", replicates=0, workers=1)


def allowed(row: ForecastRow) -> float:
    """Percent: 3, p99 6; a TTFT may be off by what step times within 1% make of it."""
    bound = 6.0 if row.name.endswith("p99") else 3.0
    if row.name.startswith("ttft_s") and row.range_percent is not None:
        bound = max(bound, *map(abs, row.range_percent))
    return bound


def marks(run: str) -> list[pytest.MarkDecorator]:
    """Slow, but for a few; a run that misses the bounds is known by name."""
    known = [pytest.mark.xfail(strict=True, reason=MISSED[run])] if run in MISSED else []
    return known if run in FEW else [pytest.mark.slow, *known]


@pytest.mark.parametrize("run", [pytest.param(run, marks=marks(run)) for run in HELD])
def test_forecasts_of_our_engine_are_within_their_bounds(run: str) -> None:
    result = forecast_of(run)
    assert result.costs == "pagecast-h200-qwen3-8b" and not result.in_sample
    rows = judged(result)
    beyond = [
        f"{row.name}: {row.error_percent:+.1f}%" for row in rows if abs(row.error_percent) > allowed(row)
    ]
    assert len(beyond) <= round(MOST_BEYOND * len(rows)), beyond


def judged(result: Forecast) -> list[ForecastRow]:
    """Means, p50, p90 and p99 of latencies, and the makespan."""
    rows = [
        row for row in result.rows if row.name.split(".")[0] in LATENCIES and not row.name.endswith("p95")
    ]
    return [*rows, next(row for row in result.rows if row.name == "makespan_s")]


@pytest.mark.slow
def test_a_small_model_is_forecast_by_its_own_sweep() -> None:
    result = forecast_of("c-qwen3-0.6b-mooncake")
    assert result.costs == "pagecast-h200-qwen3-0.6b"
    errors = {row.name: abs(row.error_percent) for row in result.rows}
    assert max(errors[f"{name}.mean"] for name in LATENCIES) < 3


@pytest.mark.parametrize("run", H100)
def test_an_h100_is_forecast_by_its_own_sweeps(run: str) -> None:
    """Sweeps on both GPUs: means within 6%, at least 80% of all figures in their intervals."""
    result = forecast(RecordedRun.load(RUNS / f"h100{run}"), "auto", replicates=20, workers=1)
    assert result.costs == "pagecast-h100-qwen3-8b" and not result.in_sample
    errors = {row.name: abs(row.error_percent) for row in result.rows}
    assert max(errors[f"{name}.mean"] for name in LATENCIES) < 6
    coverage = result.coverage()["covered"]
    assert coverage is not None and coverage >= 0.8
