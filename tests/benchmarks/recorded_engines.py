"""Recorded engines of our own and their forecast: what `fleet_engines.py` and `handoff_engines.py` share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pagecast.sim.core.errors import PagecastError
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.choose import choose
from pagecast.sim.costs.calibration.file import load
from pagecast.sim.costs.calibration.shape import CPU
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.runs.forecast import scenario_of
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import scale
from pagecast.traces.read import read
from pagecast.traces.schema import Trace

BOUND = 0.10  # relative error of mean TPOT and E2E
Task = Callable[[argparse.Namespace], int]
STATISTICS: dict[str, Callable[[Any], Any]] = {
    "mean": np.nanmean,
    "p50": np.nanmedian,
    "p90": lambda values: np.nanpercentile(values, 90),
}


def trace_of(name: str, requests: int, rate: float) -> Trace:
    """The requests, at so many times the trace's rate, without clients that give up."""
    trace = read(name, limit=requests)
    if rate != 1:
        trace = scale(trace, rate)
    if "cancel_after_s" in trace.requests:
        trace = replace(trace, requests=trace.requests.drop(columns="cancel_after_s"))
    return trace


def new_folder(name: str) -> Path:
    """The folder of a recording. Exits where it has files."""
    out = Path(name)
    if out.exists() and any(out.iterdir()):
        sys.exit(f"{out} is not empty; give a new folder")
    return out


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """What every engine is started with."""
    engine = {
        "random_weights": options.random_weights,
        "device": options.device,
        "max_model_len": options.max_model_len,
    }
    if options.num_blocks is not None:
        engine["num_blocks"] = options.num_blocks
    return engine


def latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """Recorded requests by row of the trace, with TTFT, E2E and TPOT as their clients saw them."""
    table = requests.copy()
    table["trace_row"] = table["trace_row"].astype(int)
    table = table.set_index("trace_row").sort_index()
    table["ttft_s"] = table["first_token_s"] - table["arrival_s"]
    table["e2e_s"] = table["finish_s"] - table["arrival_s"]
    later = (table["output_tokens"] - 1).where(table["output_tokens"] > 1)
    table["tpot_s"] = (table["finish_s"] - table["first_token_s"]) / later
    return table


def scenario_for(run: RecordedRun, about: dict[str, Any], options: argparse.Namespace) -> Scenario:
    """The scenario of a recorded engine; `about` is the recording's `fleet.json`."""
    scenario = scenario_of(run, options.costs)
    if Path(about["model"]).is_dir():
        return Scenario.make({**scenario.flat(), "model": about["model"]}, "fleet.json")
    return scenario


def costs_for(run: RecordedRun, scenario: Scenario) -> tuple[Scenario, StepCosts]:
    """The scenario and its costs. A run without a GPU needs a calibration's file; its GPU is then made up."""
    if run.meta["gpu"] != CPU:
        target = replace(scenario.target(), engine=run.meta["engine"])
        return scenario, choose(scenario.costs, target)
    costs = CalibratedCosts(load(scenario.costs), pipeline_depth=run.pipeline_depth)
    return scenario.changed(gpu="L4"), costs


def print_latencies(
    measured: pd.DataFrame, forecast: pd.DataFrame, statistics: tuple[str, ...] = tuple(STATISTICS)
) -> float:
    """Prints latencies side by side. Returns the larger relative error of mean TPOT and mean E2E."""
    worst = 0.0
    for name in ("tpot_s", "e2e_s", "ttft_s"):
        for statistic in statistics:
            of = STATISTICS[statistic]
            real = float(of(measured[name].to_numpy(np.float64)))
            ours = float(of(forecast[name].to_numpy(np.float64)))
            error = ours / real - 1
            print(f"{name:7}{statistic:5} measured {real:9.5f}  forecast {ours:9.5f}  {error:+7.1%}")
            if statistic == "mean" and name != "ttft_s":
                worst = max(worst, abs(error))
    return worst


def arriving_after(table: pd.DataFrame, seconds: float) -> pd.DataFrame:
    """The requests that arrive after so many seconds."""
    return table[table["arrival_s"] >= seconds]


def verdict(worst: float) -> int:
    """Prints whether the forecast keeps `BOUND`. 1 where it does not."""
    print(f"mean TPOT and E2E are within {worst:.1%}; the bound is {BOUND:.0%}")
    return int(worst > BOUND)


def parsers(about: str | None, requests: int) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of both tasks, and that of `record`, for options of its own."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    recording = tasks.add_parser("record")
    recording.add_argument("out")
    recording.add_argument("--model", required=True)
    recording.add_argument("--random-weights", action="store_true")
    recording.add_argument("--trace", default="chat")
    recording.add_argument("--requests", type=int, default=requests)
    recording.add_argument("--rate", type=float, default=1.0, help="times as fast as the trace")
    recording.add_argument("--num-blocks", type=int)
    recording.add_argument("--max-model-len", type=int)
    recording.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    comparing = tasks.add_parser("forecast")
    comparing.add_argument("out")
    comparing.add_argument("--costs", default="auto", help="a calibration's file or name, auto, roofline")
    comparing.add_argument(
        "--after", type=float, default=0.0, help="compare the requests that arrive from then on, in seconds"
    )
    return parser, recording


def main(name: str, parser: argparse.ArgumentParser, record: Task, forecast: Task) -> None:
    """Does the task that the command line names, and exits with its code."""
    options = parser.parse_args()
    try:
        code = record(options) if options.task == "record" else forecast(options)
    except PagecastError as error:
        sys.exit(f"{name}: {error}")
    sys.exit(code)
