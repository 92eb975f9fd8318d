"""Comparisons of a replay with others: the cost of a rollout, and the price of isolation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pagecast.sim.replay.folder import save_summary
from pagecast.sim.replay.result import Result
from pagecast.sim.replay.rollout import rollout_figures
from pagecast.sim.replay.served import Served
from pagecast.sim.replay.tenancy import isolation_price, without_salts
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace


def add_comparisons(
    trace: Trace,
    scenario: Scenario,
    result: Result,
    replicas: Sequence[Served],
    again: Callable[[Trace, Scenario], Result],
    out: str | Path | None,
) -> None:
    """Adds the figures that need a second replay: the cost of a rollout, and the price of isolation.

    `replicas`: those that served it. `again` makes the other replays. `out`: the
    folder of the result, if it has one.
    """
    figures: dict[str, Any] = {}
    if watches := [served.revision for served in replicas if served.revision is not None]:
        before = again(trace, scenario.changed(rollout_at_s=None, isolation_price=False))
        figures["rollout"] = rollout_figures(watches, result.requests, before.summary, result.summary)
    if scenario.isolation_price:
        shared = scenario.changed(isolation="salt", isolation_price=False)
        other = again(without_salts(trace), shared)
        figures["isolation"] = isolation_price(result.summary, other.summary)
    if not figures:
        return
    result.summary.update(figures)
    if out is not None:
        save_summary(Path(out), result.summary)
