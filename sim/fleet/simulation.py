"""`replay_fleet(trace, scenario, settings)`: how replicas behind a router would have served a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import simpy
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.fleet.builder import Builder
from pagecast.sim.fleet.disaggregation import DisaggregatedFleet
from pagecast.sim.fleet.figures import by_replica, gpu_figures, ready_shares, replica_figures, routing_figures
from pagecast.sim.fleet.fleet import Fleet
from pagecast.sim.fleet.lifecycle import FleetLifecycle
from pagecast.sim.fleet.member import Member
from pagecast.sim.fleet.query import Prompts
from pagecast.sim.fleet.routers.registry import KINDS, NS, make
from pagecast.sim.fleet.settings import FleetSettings, RouterSettings
from pagecast.sim.fleet.view import View
from pagecast.sim.replay.clients import Arrivals
from pagecast.sim.replay.comparisons import add_comparisons
from pagecast.sim.replay.folder import replacing, save
from pagecast.sim.replay.held_clients import clients_of
from pagecast.sim.replay.metrics import measured, prefix_lookup_s, request_table
from pagecast.sim.replay.notes import notes
from pagecast.sim.replay.recorder import request_frame
from pagecast.sim.replay.replicates import ChangeCosts
from pagecast.sim.replay.result import Kept, Result
from pagecast.sim.replay.rollout import busiest_window, peak_admission, peak_figures
from pagecast.sim.replay.served import Progress, Served, run
from pagecast.sim.replay.summary import block_sizes, by_spec, summary, without_unknown_hits
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace


@dataclass(frozen=True)
class FleetResult(Result):
    """A fleet's figures. `summary` has those of all replicas together, and `fleet` those of the router.

    `requests` and `steps` have a column `replica` more than one replica's; `replicas` has a row per replica,
    `timeline` one for each time that a replica starts, is ready, drains, goes or is lost.
    """

    settings: FleetSettings
    replicas: pd.DataFrame
    timeline: pd.DataFrame


def replay_fleet(
    trace: Trace,
    scenario: Scenario,
    settings: FleetSettings,
    *,
    change: ChangeCosts | None = None,
    arrivals: Callable[[Trace], Arrivals] = clients_of,
    kept: Kept = Kept(),
    fast_forward: bool = True,
    progress: Progress | None = None,
) -> FleetResult:
    """Serves `trace` on the replicas of `settings`, each as `scenario` says but for its group's fields.

    Parameters are those of `replay`; `change` changes each replica's cost model. The folder gets no
    `events.parquet`, and `replicas.parquet` and `fleet.yaml` more than a lone replica's; KV events and room
    are of one replica.
    Errors: BadInput for a trace, scenario, fleet or folder that can't be used.
    """
    if not len(trace):
        raise BadInput(f"{trace.name}: the trace has no requests")
    if kept.kv_events or kept.room:
        raise BadInput("KV events and room can be kept of one replica, not of a fleet")
    with replacing(kept.folder) as folder:
        fleet_run = _FleetRun(trace, scenario, settings, change, arrivals, kept, fast_forward)
        started = time.perf_counter()
        fleet_run.run(progress)
        wall_s = time.perf_counter() - started
        result = fleet_run.result(wall_s)
        if folder is not None:
            save(folder, trace, scenario, fleet_run.auto_costs(), result.summary, result.requests)
            settings.save(folder / "fleet.yaml")
            result.replicas.to_parquet(folder / "replicas.parquet", index=False)
            result.timeline.to_parquet(folder / "timeline.parquet", index=False)
            fleet_run.steps().to_parquet(folder / "steps.parquet", index=False)
    if kept.comparisons:
        again = partial(
            replay_fleet, settings=settings, change=change, arrivals=arrivals, kept=Kept(steps=False)
        )
        add_comparisons(trace, scenario, result, fleet_run.fleet.members, again, kept.folder)
    return result


@dataclass(frozen=True)
class FleetReplay:
    """A fleet for `Study.replay`: replicates of its replay."""

    settings: FleetSettings

    def __call__(self, trace: Trace, scenario: Scenario, change: ChangeCosts) -> Result:
        """A replay of the fleet with changed step costs."""
        return replay_fleet(trace, scenario, self.settings, change=change, kept=Kept(steps=False))


class _FleetRun:
    """A fleet ready to run, and what is needed to make its result."""

    def __init__(
        self,
        trace: Trace,
        scenario: Scenario,
        settings: FleetSettings,
        change: ChangeCosts | None,
        arrivals: Callable[[Trace], Arrivals],
        kept: Kept,
        fast_forward: bool,
    ) -> None:
        self.trace = trace
        self.scenario = scenario
        self.settings = settings
        self._kept = kept
        self.env = simpy.Environment()
        prompts = Prompts(trace, scenario)
        router, parts = make(settings.router, scenario.seed, settings.scenarios(scenario)[0][1].block_tokens)
        more = {
            "hop_ns": round(settings.router.hop_s * NS),
            "most_retries": settings.retries.most,
            "retry_ns": round(settings.retries.after_s * NS),
        }
        self._roles = settings.roles()
        apart = settings.disaggregation
        if apart is None:
            self.fleet = Fleet(self.env, arrivals(trace), prompts, router, **more)
        else:
            chosen = RouterSettings.model_validate({"policy": apart.decode_router})
            if KINDS.get(apart.decode_router, KINDS["random"]).index == "events":
                raise BadInput(f"decode_router {apart.decode_router}: its index of events is for prefill")
            decode, _ = make(chosen, scenario.seed + 1, settings.scenarios(scenario)[0][1].block_tokens)
            self.fleet = DisaggregatedFleet(self.env, arrivals(trace), prompts, router, decode, apart, **more)
        self._builder = Builder(
            self.env,
            trace,
            prompts,
            parts,
            partial(_costs_of, change),
            keep_steps=kept.steps or kept.folder is not None,
            fast_forward=fast_forward,
        )
        self._lifecycle = FleetLifecycle(self.fleet, settings, scenario, self._member)

    def _member(self, number: int, name: str, scenario: Scenario) -> tuple[Member, View]:
        role = self._roles.get(name.rsplit("-", 1)[0], "both")
        ended = partial(self.fleet.on_end, number)
        return self._builder.member(number, name, scenario, role, ended, self.fleet.clients.failed)

    def auto_costs(self) -> str:
        """What stands for the costs `auto`: their name, or `auto` where replicas differ in it."""
        members = self.fleet.members
        names = {member.costs.name for member in members if member.scenario.costs == "auto"}
        return names.pop() if len(names) == 1 else "auto"

    def run(self, progress: Progress | None) -> None:
        """Runs until every request has ended."""
        self._lifecycle.start()
        self.fleet.start()
        run(self.env, progress, self._ended)
        while self.fleet.reject_waiting():
            run(self.env, progress, self._ended)

    def _ended(self) -> int:
        return sum(member.recorder.request_count for member in self.fleet.members)

    def result(self, wall_s: float) -> FleetResult:
        """The figures of a fleet that has run."""
        members = self.fleet.members
        self._check_ended()
        kinds = [self._table(alike, unserved=not at) for at, alike in enumerate(by_spec(members).values())]
        filled = [table for table in kinds if len(table)]
        table = pd.concat(filled).sort_values("row", kind="stable").reset_index(drop=True)
        served = self._served_by_each(kinds)
        listed = [replica_figures(served[member.number], member) for member in members]
        without_unknown_hits(self.trace, *listed)
        replicas = pd.DataFrame(listed)
        self._end_retention(table)
        own = {"fleet": self._figures(table, served, listed)}
        figures = summary(self.trace, members, table, wall_s, of_kind=kinds, more=own)
        for member, row in zip(members, listed, strict=True):
            if eviction := member.scheduler.memory.eviction_figures():
                row["eviction"] = eviction
        if any(member.revision is not None for member in members):
            figures["peak"] = self._add_peaks(table, served, listed)
        timeline = pd.DataFrame(self.fleet.log, columns=["time_s", "replica", "event"])
        timeline["time_s"] = timeline["time_s"] / NS
        return FleetResult(
            self.trace.name,
            self.scenario,
            figures,
            table,
            self.steps() if self._kept.steps else pd.DataFrame(),
            notes(self.trace, members, table),
            self.settings,
            replicas,
            timeline,
        )

    def _check_ended(self) -> None:
        members = self.fleet.members
        for member in members:
            member.check_all_ended()
        if not self.fleet.over:
            raise AssertionError("some requests never ended")
        if any(member.scheduler.memory.used_blocks for member in members if member.gone_ns is None):
            raise AssertionError("some blocks were never given back")

    def _served_by_each(self, kinds: list[pd.DataFrame]) -> dict[int, pd.DataFrame]:
        """The requests that each replica ended, by its number; `kinds`: those of each kind."""
        members = self.fleet.members
        if isinstance(self.fleet, DisaggregatedFleet):
            return {member.number: measured(member.requests(), self.trace) for member in members}
        parts: dict[str, pd.DataFrame] = {}
        for table in kinds:
            parts |= by_replica(table)
        return {member.number: parts.get(member.name, kinds[0][:0]) for member in members}

    def _figures(
        self, table: pd.DataFrame, served: dict[int, pd.DataFrame], listed: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The figures of the router and of each replica (`listed`)."""
        fleet, members = self.fleet, self.fleet.members
        sizes = np.broadcast_to(block_sizes(members, table), len(table))
        figures = {
            "router": self.settings.router.policy,
            "replicas": len(members),
            "gpus": sum(member.scenario.tensor_parallel_size for member in members),
            **gpu_figures(members, table, self.settings.price_per_gpu_hour),
            "retries": fleet.sent_again,
            **routing_figures(table, fleet.routers, fleet.believed_tokens, served, sizes),
            "by_replica": listed,
        }
        if isinstance(fleet, DisaggregatedFleet):
            figures["handoff"] = fleet.figures()
        return figures

    def _end_retention(self, table: pd.DataFrame) -> None:
        """Ends the retention that is over by the end of the last request, on idle replicas too."""
        end_ns = round(float(np.nanmax(table["finished_s"].to_numpy(np.float64), initial=0.0)) * NS)
        for member in self.fleet.members:
            if member.gone_ns is None and member.scheduler.memory.expiry is not None:
                member.scheduler.refresh(end_ns)

    def _add_peaks(
        self, table: pd.DataFrame, served: dict[int, pd.DataFrame], listed: list[dict[str, Any]]
    ) -> dict[str, float]:
        """Adds `peak` to the figures of each replica that computes prompts. Returns that of the fleet.

        The fleet can admit what its replicas can together, each for the part of the busiest ten seconds in
        which it took requests.
        """
        busiest = busiest_window(table)
        shares = ready_shares(self.fleet.log, busiest.start_s, busiest.end_s)
        rate = 0.0
        for member, figures in zip(self.fleet.members, listed, strict=True):
            if member.role == "decode":
                continue
            own = served[member.number]
            figures["peak"] = peak_admission(own, member.spec, member.recorder.most_requests)
            rate += figures["peak"]["uncached_tokens_per_s_at_peak"] * shares.get(member.name, 0.0)
        return peak_figures(rate, busiest.rate)

    def _table(self, members: Sequence[Served], *, unserved: bool) -> pd.DataFrame:
        """The requests that ended on equal replicas, by row; `unserved`: those too that no replica ended."""
        spec = members[0].spec
        recorders = [(member.name, member.recorder) for member in members]
        if unserved and self.fleet.unserved.request_count:
            recorders.append(("", self.fleet.unserved))
        parts = [recorder.request_rows() for _, recorder in recorders]
        reasons: dict[int, str] = {}
        for _, recorder in recorders:
            reasons.update(recorder.reasons)
        names = np.repeat([name for name, _ in recorders], [len(part) for part in parts])
        joined = request_frame(np.concatenate(parts))
        if isinstance(self.fleet, DisaggregatedFleet):
            kept = self.fleet.ends(joined, names)
            joined, names = joined[kept], names[kept]
        order = np.argsort(joined["row"].to_numpy(), kind="stable")
        joined = joined.iloc[order].reset_index(drop=True)
        lookup_s = prefix_lookup_s(joined, spec.costs, caching=spec.scenario.enable_prefix_caching)
        if isinstance(self.fleet, DisaggregatedFleet):
            self.fleet.take_lookups(joined, names[order], lookup_s)
        table = request_table(joined, lookup_s, reasons)
        table["replica"] = names[order]
        return measured(table, self.trace)

    def steps(self) -> pd.DataFrame:
        """The steps of all replicas, one replica after the other."""
        tables = []
        for member in self.fleet.members:
            table = member.recorder.steps()
            table["replica"] = member.name
            tables.append(table)
        return pd.concat(tables, ignore_index=True)


def _costs_of(change: ChangeCosts | None, scenario: Scenario) -> StepCosts:
    """The step costs of a replica, as `change` changes them."""
    own = scenario.step_costs()
    return own if change is None else change(own)
