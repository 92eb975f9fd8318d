"""The part of `pagecast replay` for fleets: several replicas behind a router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagecast.planner_app import console
from pagecast.planner_app.wording.quantities import counted, gpus_there, replicas_there
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import FleetReplay, FleetResult, replay_fleet
from pagecast.sim.replay import Kept, Result
from pagecast.sim.replay.replicates import Study
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from rich.table import Table

_MOST_ROWS = 16


def replay_on_fleet(work: Trace, scenario: Scenario, settings: FleetSettings, kept: Kept) -> FleetResult:
    """Replays a trace on a fleet, with a bar that shows how far it is. Errors: BadInput."""
    with console.progress("replaying", len(work)) as update:
        return replay_fleet(work, scenario, settings, kept=kept, progress=update)


def fleet_study(study: Study, settings: FleetSettings) -> Study:
    """The study with a fleet's replays."""
    return replace(study, replay=FleetReplay(settings))


def show_replicas(result: Result) -> None:
    """Prints how the router spread the requests, and the figures of each replica."""
    assert isinstance(result, FleetResult)
    fleet = result.summary["fleet"]
    console.out.print(
        f"fleet: {replicas_there(fleet)} on {gpus_there(fleet)} behind "
        f"{fleet['router']}; herding "
        f"{fleet['herding']:.2f}, busiest replica {fleet['imbalance']:.2f} x an even share",
        soft_wrap=True,
    )
    if len(result.timeline) > fleet["replicas"]:
        cost = "" if fleet["cost"] is None else f", {fleet['cost']:,.2f} at the price per GPU hour"
        console.out.print(
            f"over time: {fleet['gpu_hours']:.2f} GPU hours{cost}; {fleet['retries']:,} requests sent again",
            soft_wrap=True,
        )
    if fleet["believed_tokens"]:
        share = fleet["stale_tokens"] / fleet["believed_tokens"]
        console.out.print(
            f"router: believed {fleet['believed_tokens']:,} prompt tokens cached; {share:.1%} were not",
            soft_wrap=True,
        )
    if handoff := fleet.get("handoff"):
        console.out.print(_handoffs(handoff), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("replica", "requests", "hits", "TTFT p99", "TPOT p99", "KV peak", "preemptions"):
        table.add_column(name, justify="left" if name == "replica" else "right", no_wrap=True)
    for row in fleet["by_replica"][:_MOST_ROWS]:
        table.add_row(
            f"{row['replica']} ({row['gpu']})",
            f"{row['requests']:,}",
            console.share(row["token_hit_rate"]),
            console.seconds(row["ttft_p99_s"]),
            console.seconds(row["tpot_p99_s"]),
            f"{row['peak_kv_usage']:.1%}",
            f"{row['preemptions']:,}",
        )
    console.out.print(table)
    if len(fleet["by_replica"]) > _MOST_ROWS:
        console.out.print(f"and {len(fleet['by_replica']) - _MOST_ROWS} more: --json, or --out FOLDER")


def _handoffs(handoff: dict[str, Any]) -> str:
    """The requests handed from prefill to decode replicas; the table counts such a request at both."""
    text = (
        f"handoffs: {counted(handoff['remote'], 'request')} prefilled on one replica and decoded on another "
        f"(counted at both), {handoff['local']:,} on one alone; {console.size(handoff['moved_bytes'])} moved"
    )
    if not handoff["remote"]:
        return text
    wait, transfer = handoff["wait_s"], handoff["transfer_s"]
    return (
        f"{text}, in {console.seconds(transfer['mean'])} on average (p99 {console.seconds(transfer['p99'])}) "
        f"after a wait of {console.seconds(wait['mean'])} (p99 {console.seconds(wait['p99'])})"
    )
