"""Job of the Load page: the trace at several rates on several GPUs, one row per replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from pagecast.planner_app.dashboard.shell.state import Session
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.planner.capacity.bisection import CapacityQuestion
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.users import Load, LoadSize, requests_per_s, serve
from pagecast.planner_app.planner.prices import usd_per_million_tokens
from pagecast.planner_app.planner.slo import Slo
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

LOADS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # times the side bar's rate
MOST_REQUESTS = 2000  # of each replay: bounds how often a short trace is repeated
OVERLOADED = 0.01  # share of requests within the SLO, below which higher loads are left out


def curves_for(own: Session, view: PageView, trace: Trace, gpus: Sequence[str]) -> pd.DataFrame | None:
    """A row per GPU and load, as `curves` makes them; None until the job is done."""
    key = ("load", tuple(gpus), view["slo"], *view.key())
    table: pd.DataFrame | None = own.ask(
        "load", key, curves_job, trace, view.scenario(), tuple(gpus), view["slo"]
    )
    return table


def curves_job(
    trace: Trace, scenario: Scenario, gpus: Sequence[str], slo: str, *, progress: Any
) -> pd.DataFrame:
    """`curves` with progress."""
    total = len(gpus) * len(LOADS)
    return curves(trace, scenario, gpus, slo, progress=lambda done: progress((done, total, "loads replayed")))


def curves(
    trace: Trace,
    scenario: Scenario,
    gpus: Sequence[str],
    slo: str,
    *,
    loads: Sequence[float] = LOADS,
    progress: Any = None,
) -> pd.DataFrame:
    """Replays the trace at each load on each GPU, for long enough that the server settles.

    Loads are those of `pagecast plan`: a short trace is repeated, and only requests that come while the
    server is settled count. Columns: `gpu`, `load` (times the trace's own rate), `requests_per_s` (offered),
    `ttft_p50_s`, `ttft_p99_s`, `tpot_p99_s`, `output_tokens_per_s`, `goodput` (share of requests that keep
    the SLO's bounds), `goodput_per_s` (such requests that end per second), `meets` (whether the SLO holds
    and the server keeps up), `costs`, `num_gpu_blocks`, and `reason` where a GPU cannot run the scenario
    (all else is then missing). Errors: BadInput for an SLO that can't be read, or a trace without a rate.
    """
    level = Slo.parse(slo) if slo.strip() else None
    rate = requests_per_s(trace)
    rows = []
    for number, gpu in enumerate(gpus):
        overloaded = False
        for place, load in enumerate(loads, 1):
            if overloaded and load != 1.0:  # more load is worse still, and takes longest to replay
                continue
            row: dict[str, Any] = {"gpu": find_gpu(gpu).name, "load": load, "requests_per_s": rate * load}
            try:
                on_gpu = Scenario.make({**scenario.flat(), "gpu": gpu}, "scenario")
                row |= _figures(trace, on_gpu, level, load)
            except BadInput as error:
                row |= {"reason": str(error), "meets": False}
            overloaded |= row.get("goodput", 1.0) < OVERLOADED
            rows.append(row)
            if progress is not None:
                progress(number * len(loads) + place)
    return pd.DataFrame(rows)


def _figures(trace: Trace, scenario: Scenario, level: Slo | None, load: float) -> dict[str, Any]:
    offered_load = Load("rate", load)
    replay = serve(trace, scenario, offered_load, size=LoadSize(MOST_REQUESTS))
    requests, endings = replay.measured, replay.ended
    figures: dict[str, Any] = {
        "ttft_p50_s": _percentile(requests, "ttft_s", 50),
        "ttft_p99_s": _percentile(requests, "ttft_s", 99),
        "tpot_p99_s": _percentile(requests, "tpot_s", 99),
        "output_tokens_per_s": float(endings["output_tokens"].sum()) / max(replay.seconds, 1e-9),
        "num_gpu_blocks": scenario.blocks(),
        "costs": scenario.step_costs().name,
        "reason": "",
    }
    if level is not None:
        figures["goodput"] = float(level.good(requests).mean())
        figures["goodput_per_s"] = float(level.good(endings).sum()) / max(replay.seconds, 1e-9)
        figures["meets"] = (
            CapacityQuestion(trace, scenario, PlanOptions(slo=level.text)).judge(offered_load, replay).holds
        )
    return figures


def _percentile(requests: pd.DataFrame, name: str, percent: float) -> float:
    values = requests[name].to_numpy(np.float64)
    values = values[np.isfinite(values)]
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def usd_per_million(row: pd.Series, prices: dict[str, float], gpus_each: int) -> float | None:
    """USD per million output tokens of a row, for a replica of `gpus_each` GPUs; None without a price."""
    price = prices.get(row["gpu"])
    tokens = row.get("output_tokens_per_s")
    if price is None or tokens is None or np.isnan(tokens):
        return None
    return usd_per_million_tokens(price * gpus_each, float(tokens))
