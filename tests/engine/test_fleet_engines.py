"""Two engines behind a router in wall time: every request once, and each engine's decisions the core's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import compare_decisions
from pagecast.traces.schema import Trace
from pagecast.traces.write import write

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "fleet_engines.py"
COUNT = 30


@pytest.mark.slow
def test_two_engines_behind_a_router_serve_every_request_once_as_the_core_decides(
    model_of: Callable[..., Any], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    table = {
        "arrival_s": np.cumsum(rng.exponential(0.05, COUNT)),
        "input_tokens": rng.integers(20, 120, COUNT),
        "output_tokens": rng.integers(5, 30, COUNT),
    }
    write(Trace("small", pd.DataFrame(table)), tmp_path / "small.jsonl")
    out = tmp_path / "fleet"
    options = ["--trace", tmp_path / "small.jsonl", "--device", "cpu", "--num-blocks", 200]
    options += ["--max-model-len", 512, "--router", "round-robin"]
    command = [sys.executable, SCRIPT, "record", out, "--model", model_of("qwen3").folder, *options]
    subprocess.run([str(word) for word in command], check=True, timeout=300)
    runs = [RecordedRun.load(out / f"engine-{number}") for number in range(2)]
    for run in runs:
        report = compare_decisions(run)
        assert report.ok, report.first_mismatch
    rows = sorted(int(row) for run in runs for row in run.requests["trace_row"])
    assert rows == list(range(COUNT))
    assert json.loads((out / "fleet.json").read_text())["router"] == "round-robin"
    sent = pd.read_csv(out / "requests.csv")
    assert sent["replica"].tolist() == [number % 2 for number in range(COUNT)]


RECORDED = Path(__file__).parent / "recorded_fleet" / "h200x2-qwen3-8b-chat-least-loaded"


@pytest.mark.parametrize("number", [0, 1])
def test_engines_that_served_behind_a_router_on_gpus_decided_as_the_core(number: int) -> None:
    report = compare_decisions(RecordedRun.load(RECORDED / f"engine-{number}"))
    assert report.ok, report.first_mismatch
    assert report.steps_recorded > 11_000


@pytest.mark.slow
def test_a_recorded_fleet_is_forecast_within_the_bound() -> None:
    command = [sys.executable, str(SCRIPT), "forecast", str(RECORDED)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
