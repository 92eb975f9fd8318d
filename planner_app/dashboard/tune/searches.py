"""Jobs of the Tune page: the grid of block size and HBM budget, tuning curves, the hit-ratio curve."""

from __future__ import annotations

from typing import Any

import pandas as pd
from pagecast.planner_app.dashboard.shell.state import Session
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.planner.execution.executor import executor
from pagecast.planner_app.planner.sweep.options import SweepOptions
from pagecast.planner_app.planner.sweep.question import SweepQuestion
from pagecast.planner_app.planner.sweep.study import sweep
from pagecast.planner_app.planner.tune.knobs import USUAL, TuneResult, tune, values_of
from pagecast.planner_app.planner.tune.options import TuneOptions
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

_BUDGETS = 6
_TOP, _STEP = 95, 5  # percent of the GPU


def budgets(scenario: Scenario, count: int = _BUDGETS) -> tuple[float, ...]:
    """About `count` fractions of the GPU from where the KV cache begins to fit, evenly up to 0.95."""
    for least in range(_STEP, _TOP, _STEP):
        if _fits(scenario, least / 100):
            break
    step = max((_TOP - least) // (count - 1), 1)
    return tuple(percent / 100 for percent in range(_TOP, least - 1, -step))[::-1]


def grid_budgets(scenario: Scenario) -> tuple[float, ...]:
    """`budgets`, with the scenario's own in place of the one nearest to it: the map shows where it stands."""
    values, own = list(budgets(scenario)), scenario.gpu_memory_utilization
    if own is None:
        return tuple(values)
    nearest = min(range(len(values)), key=lambda index: abs(values[index] - own))
    values[nearest] = own
    return tuple(sorted(values))


def _fits(scenario: Scenario, fraction: float) -> bool:
    try:
        scenario.changed(gpu_memory_utilization=fraction).budget()
    except BadInput:
        return False
    return True


def grid_for(own: Session, view: PageView, trace: Trace) -> pd.DataFrame | None:
    """A row per trial of block size and HBM budget, as `sweep` gives them; None until the job is done."""
    table: pd.DataFrame | None = own.ask(
        "grid", ("grid", view["slo"], *view.key()), grid_job, trace, view.scenario(), view["slo"]
    )
    return table


def grid_job(trace: Trace, scenario: Scenario, slo: str, *, progress: Any) -> pd.DataFrame:
    """Sweeps the grid."""
    sizes = sorted({*map(int, USUAL["block_size"].split(",")), scenario.block_size})
    ask = SweepOptions(
        settings=(
            f"block_size={','.join(map(str, sizes))}",
            f"gpu_memory_utilization={','.join(map(str, grid_budgets(scenario)))}",
        ),
        slo=slo,
    )
    question = SweepQuestion(trace, scenario, ask)
    total = question.count
    with executor() as run:
        return sweep(question, run, progress=lambda done: progress((done, total, "scenarios replayed"))).table


def tuned_for(own: Session, view: PageView, trace: Trace, knob: str, simulate: bool) -> TuneResult | None:
    """Result of `pagecast tune` for `block_size` or `gpu_memory_utilization`; None until the job is done."""
    result: TuneResult | None = own.ask(
        f"tune-{knob}",
        ("tune", knob, simulate, view["slo"], *view.key()),
        tune_job,
        trace,
        view.scenario(),
        knob,
        view["slo"],
        simulate,
    )
    return result


def tune_job(
    trace: Trace, scenario: Scenario, knob: str, slo: str, simulate: bool, *, progress: Any
) -> TuneResult:
    """Tunes one knob; `simulate`: with a search for the concurrency that each setting admits.

    For HBM without an SLO always: there no cards advise by the load that a budget admits.
    """
    values = "" if knob == "block_size" else ",".join(map(str, budgets(scenario, 2 * _BUDGETS)))
    ask = TuneOptions(
        values=values, slo=slo, static=not simulate and (knob == "block_size" or bool(slo.strip()))
    )
    total = len(values_of(scenario, knob, ask))
    return tune(trace, scenario, knob, ask, progress=lambda done: progress((done, total, "settings tried")))
