"""Job of the Fleet page: a fleet as it is, behind other routers, and with one replica lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from pagecast.planner_app.dashboard.shell.state import Session
from pagecast.planner_app.dashboard.shell.view import PageView
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import FleetResult, replay_fleet
from pagecast.sim.replay.result import Kept
from pagecast.sim.scenario import Scenario
from pagecast.traces.operations import sort
from pagecast.traces.schema import Trace

_OTHERS = 3
_REQUEST_COLUMNS = ["arrival_s", "ttft_s", "replica", "state"]


@dataclass(frozen=True)
class FleetRun:
    """The figures of one replay of a fleet that the page shows."""

    summary: dict[str, Any]
    requests: pd.DataFrame
    timeline: pd.DataFrame

    @classmethod
    def of(cls, result: FleetResult) -> FleetRun:
        """The part of a result that the page needs."""
        return cls(result.summary, result.requests[_REQUEST_COLUMNS], result.timeline)


@dataclass(frozen=True)
class FleetStudy:
    """A fleet's replay, the same with a replica lost (None: none is), and a row per router.

    `others` are replays without the loss whose arrivals are a little earlier or later: what differs among
    them is chance.

    `routers` has `router`, `token_hit_rate`, `ttft_p99_s`, `tpot_p99_s`, `herding` and `imbalance`.
    """

    run: FleetRun
    lost: FleetRun | None
    loss_s: float | None
    routers: pd.DataFrame
    others: tuple[FleetRun, ...] = ()


def study_for(
    own: Session,
    view: PageView,
    trace: Trace,
    fleet: FleetSettings,
    routers: Sequence[str],
    loss: float | None,
) -> FleetStudy | None:
    """The study of a view's fleet; None until the job in slot `fleet` has it."""
    key = ("fleet", fleet.model_dump_json(), tuple(routers), loss, *view.key())
    done: FleetStudy | None = own.ask(
        "fleet", key, study, trace, view.scenario(), fleet, tuple(routers), loss
    )
    return done


def study(
    trace: Trace,
    scenario: Scenario,
    fleet: FleetSettings,
    routers: Sequence[str],
    loss: float | None,
    *,
    progress: Any = None,
) -> FleetStudy:
    """Replays the fleet, behind each of `routers` as well, and with its first replica lost.

    `loss` says when: a share of the time in which requests arrive. The lost replica is started again at once.
    Errors: BadInput for what can't be replayed.
    """
    others = [name for name in dict.fromkeys(routers) if name != fleet.router.policy]
    total = 1 + len(others) + (0 if loss is None else 1 + _OTHERS)
    done = 0

    def replayed(settings: FleetSettings, work: Trace = trace) -> FleetResult:
        nonlocal done
        result = replay_fleet(work, scenario, settings, kept=Kept(steps=False))
        done += 1
        if progress is not None:
            progress((done, total, "fleets replayed"))
        return result

    result = replayed(fleet)
    rows = [_row(fleet.router.policy, result)]
    for name in others:
        rows.append(_row(name, replayed(_behind(fleet, name))))
    loss_run = loss_s = None
    by_chance: tuple[FleetRun, ...] = ()
    if loss is not None:
        loss_s = float(result.requests["arrival_s"].max()) * loss
        incident = {"at_s": loss_s, "replica": f"{fleet.group_name(0)}-0", "back_after_s": 0.0}
        fields = {**fleet.model_dump(), "incidents": [incident]}
        loss_run = FleetRun.of(replayed(FleetSettings.make(fields)))
        by_chance = tuple(FleetRun.of(replayed(fleet, _moved(trace, seed))) for seed in range(_OTHERS))
    return FleetStudy(FleetRun.of(result), loss_run, loss_s, pd.DataFrame(rows), by_chance)


def _moved(trace: Trace, seed: int) -> Trace:
    """The trace with each arrival moved by up to half of the mean time between two, either way."""
    arrival = trace.seconds("arrival_s")
    given = ~np.isnan(arrival)
    apart = float(np.ptp(arrival[given])) / max(given.sum() - 1, 1)
    moved = arrival + apart * np.random.default_rng(seed).uniform(-0.5, 0.5, len(arrival))
    requests = trace.requests.assign(arrival_s=np.maximum(moved, 0.0))
    return sort(replace(trace, requests=requests))


def _behind(fleet: FleetSettings, router: str) -> FleetSettings:
    """The same fleet behind another router, with that router's defaults."""
    return FleetSettings.make({**fleet.model_dump(), "router": {"policy": router}})


def _row(router: str, result: FleetResult) -> dict[str, Any]:
    summary = result.summary
    return {
        "router": router,
        "token_hit_rate": summary["token_hit_rate"],
        "ttft_p99_s": summary["ttft_s"]["p99"],
        "tpot_p99_s": summary["tpot_s"]["p99"],
        "herding": summary["fleet"]["herding"],
        "imbalance": summary["fleet"]["imbalance"],
    }
