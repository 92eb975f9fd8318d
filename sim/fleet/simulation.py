"""`replay_fleet(trace, scenario, settings)`: how replicas behind a router would have served a trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import simpy
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.limits import Limits
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.fleet.figures import of_replica, spread, summed, together
from pagecast.sim.fleet.fleet import Fleet, run
from pagecast.sim.fleet.member import Member
from pagecast.sim.fleet.query import Prompts
from pagecast.sim.fleet.routers.registry import NS, make
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.replay.clients import Arrivals
from pagecast.sim.replay.folder import replacing, save
from pagecast.sim.replay.metrics import request_table
from pagecast.sim.replay.notes import notes
from pagecast.sim.replay.simulation import Progress, Result, counters, summarise
from pagecast.sim.replay.windows import blocks_per_block
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

_SLICE = 4096


@dataclass(frozen=True)
class FleetResult(Result):
    """A fleet's figures. `summary` has those of all replicas together, and `fleet` those of the router.

    `requests` and `steps` have a column `replica` more than one replica's; `replicas` has a row per replica.
    """

    settings: FleetSettings
    replicas: pd.DataFrame


def replay_fleet(
    trace: Trace,
    scenario: Scenario,
    settings: FleetSettings,
    *,
    costs: StepCosts | None = None,
    arrivals: Callable[[Trace], Arrivals] = Arrivals,
    keep_steps: bool = True,
    out: str | Path | None = None,
    fast_forward: bool = True,
    progress: Progress | None = None,
) -> FleetResult:
    """Serves `trace` on the replicas of `settings`, each as `scenario` says but for its group's fields.

    Parameters are those of `replay`; `costs` replaces every replica's cost model. `out` gets no
    `events.parquet`, and `replicas.parquet` and `fleet.yaml` more than a lone replica's folder.
    Errors: BadInput for a trace, scenario, fleet or folder that can't be used.
    """
    if not len(trace):
        raise BadInput(f"{trace.name}: the trace has no requests")
    with replacing(out) as folder:
        built = _Built(
            trace, scenario, settings, costs, arrivals, keep_steps or out is not None, fast_forward
        )
        started = time.perf_counter()
        tell = None if progress is None else partial(_tell, progress, built.fleet)
        built.fleet.start()
        run(built.env, _SLICE, tell)
        wall_s = time.perf_counter() - started
        result = built.result(wall_s, keep_steps=keep_steps)
        if folder is not None:
            save(folder, trace, scenario, built.costs[0], result.summary, result.requests)
            settings.save(folder / "fleet.yaml")
            result.replicas.to_parquet(folder / "replicas.parquet", index=False)
            built.steps().to_parquet(folder / "steps.parquet", index=False)
        return result


def _tell(progress: Progress, fleet: Fleet) -> None:
    progress(sum(member.recorder.ended for member in fleet.members))


class _Built:
    """A fleet ready to run, and what is needed to make its result."""

    def __init__(
        self,
        trace: Trace,
        scenario: Scenario,
        settings: FleetSettings,
        costs: StepCosts | None,
        arrivals: Callable[[Trace], Arrivals],
        keep_steps: bool,
        fast_forward: bool,
    ) -> None:
        self.trace = trace
        self.scenario = scenario
        self.settings = settings
        self.env = simpy.Environment()
        prompts = Prompts(trace)
        named = settings.scenarios(scenario)
        sizes = {one.block_size for _, one in named}
        router, parts = make(settings.router, scenario.seed, named[0][1].block_size)
        if parts.events is not None and len(sizes) > 1:
            raise BadInput("an index fed by events needs one block size; use --index approximate")
        hop_ns = round(settings.router.hop_s * NS)
        self.fleet = Fleet(self.env, arrivals(trace), prompts, router, hop_ns=hop_ns)
        self.costs: list[StepCosts] = []
        made: dict[str, tuple[float, Limits, StepCosts]] = {}
        for number, (name, one) in enumerate(named):
            key = one.model_dump_json()
            if key not in made:
                share = blocks_per_block(trace, one)
                made[key] = (share, one.limits(share), costs or one.step_costs())
            self.share, limits, each = made[key]
            self.costs.append(each)
            member = Member(
                self.env,
                number,
                name,
                one,
                kind=key,
                limits=limits,
                costs=each,
                feed=prompts.feed(one.block_size),
                on_end=partial(self.fleet.ended, number),
                keep_steps=keep_steps,
                fast_forward=fast_forward,
            )
            if parts.events is not None:
                replica = member.replica
                watcher = parts.events.feed(number, partial(getattr, replica, "clock"))
                member.scheduler.memory.pool.watcher = watcher
            self.fleet.add(member, member.view(parts.metrics_period_ns))

    def result(self, wall_s: float, *, keep_steps: bool) -> FleetResult:
        """The figures of a fleet that has run."""
        members = self.fleet.members
        left = sum(len(member.scheduler.requests) for member in members)
        if left:
            raise AssertionError(f"{left} requests never ended")
        kinds: dict[str, list[Member]] = {}
        for member in members:
            kinds.setdefault(member.kind, []).append(member)
        tables = []
        summaries = []
        each: dict[int, dict[str, Any]] = {}
        for alike in kinds.values():
            first = alike[0]
            table = self._table(alike)
            counted = [counters(member.recorder, member.scheduler) for member in alike]
            summary = summarise(table, summed(counted), first.scenario, first.costs, wall_s)
            summary["num_gpu_blocks"] *= len(alike)
            owners = table["replica"].to_numpy()
            gpu = f"{first.scenario.tensor_parallel_size} x {first.scenario.gpu}"
            for member, own in zip(alike, counted, strict=True):
                served = table[owners == member.name]
                each[member.number] = of_replica(served, own, member.name, gpu)
            tables.append(table)
            summaries.append(summary)
        filled = [table for table in tables if len(table)]
        table = pd.concat(filled).sort_values("row", kind="stable").reset_index(drop=True)
        summary = together(summaries, table, wall_s)
        listed = [each[member.number] for member in members]
        replicas = pd.DataFrame(listed)
        summary["fleet"] = {
            "router": self.settings.router.policy,
            "replicas": len(members),
            "gpus": sum(member.scenario.tensor_parallel_size for member in members),
            **spread(table, self.fleet.choices, self.fleet.believed, replicas),
            "by_replica": listed,
        }
        busiest = max(members, key=lambda member: member.recorder.ended)
        said = notes(self.trace, busiest.scenario, busiest.costs, table, busiest.recorder, self.share)
        steps = self.steps() if keep_steps else pd.DataFrame()
        return FleetResult(
            self.trace.name, self.scenario, summary, table, steps, said, self.settings, replicas
        )

    def _table(self, members: list[Member]) -> pd.DataFrame:
        """The requests that ended on equal replicas, by row."""
        first = members[0]
        rows = [member.recorder.requests() for member in members]
        reasons: dict[int, str] = {}
        for member in members:
            reasons.update(member.recorder.reasons)
        names = np.repeat([member.name for member in members], [len(each) for each in rows])
        joined = pd.concat(rows, ignore_index=True) if len(rows) > 1 else rows[0]
        order = np.argsort(joined["row"].to_numpy(), kind="stable")
        joined = joined.iloc[order].reset_index(drop=True)
        caching = first.scenario.enable_prefix_caching
        table = request_table(joined, first.costs, reasons, caching=caching)
        table["replica"] = names[order]
        return table

    def steps(self) -> pd.DataFrame:
        """The steps of all replicas, one replica after the other."""
        tables = []
        for member in self.fleet.members:
            table = member.recorder.steps()
            table["replica"] = member.name
            tables.append(table)
        return pd.concat(tables, ignore_index=True)
