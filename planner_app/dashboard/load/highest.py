"""The highest rate that each GPU takes, by the search of `pagecast plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagecast.planner_app.dashboard.shell.state import Session
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.planner_app.planner.capacity.options import PlanOptions
from pagecast.planner_app.planner.capacity.planning import plan, steps
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

SLOT = "highest rate"
Rates = dict[str, float | None]  # by GPU; None where no load keeps the SLO


def rates_for(own: Session, view: PageView, trace: Trace, gpus: Sequence[str]) -> Rates | None:
    """The rates; None until the job is done, and without an SLO."""
    if not view["slo"].strip():
        return None
    key = ("highest", tuple(gpus), view["slo"], *view.key())
    rates: Rates | None = own.ask(SLOT, key, rates_job, trace, view.scenario(), tuple(gpus), view["slo"])
    return rates


def rates_job(trace: Trace, scenario: Scenario, gpus: Sequence[str], slo: str, *, progress: Any) -> Rates:
    """The answer of `pagecast plan` for the rate alone, GPU by GPU; those that can't run are left out."""
    each = steps(1, 0)
    rates: Rates = {}
    for number, gpu in enumerate(gpus):
        ask = PlanOptions(slo=slo, kinds=("rate",), replicates=0, explain=False)
        done_before = number * each

        def tell(done: int, before: int = done_before) -> None:
            progress((before + done, len(gpus) * each, "searches"))

        try:
            found = plan(
                trace, Scenario.make({**scenario.flat(), "gpu": gpu}, "scenario"), ask, progress=tell
            )
        except BadInput:
            continue
        rates[found.scenario.gpu] = found.answers["rate"].value
    return rates
