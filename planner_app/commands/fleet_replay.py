"""The part of `pagecast replay` for fleets: several replicas behind a router."""

from __future__ import annotations

from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Any

from pagecast.planner_app import console
from pagecast.planner_app.commands.replay_view import show
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.planner_app.wording.quantities import counted
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import FleetResult, replay_fleet
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from pagecast.traces.write import replacing
from rich.table import Table

_MOST_ROWS = 16


def replay_on_fleet(
    work: Trace,
    chosen: Scenario,
    settings: FleetSettings,
    *,
    out: Path | None,
    json: bool,
    refused: dict[str, Any],
) -> None:
    """Replays a trace on a fleet and prints its figures. Errors: BadInput for options of one replica."""
    for option, value in refused.items():
        if value:
            raise BadInput(f"{option} is for one replica; leave it out, or leave the fleet's options out")
    with console.progress("replaying", len(work)) as update:
        result = replay_fleet(work, chosen, settings, keep_steps=False, out=out, progress=update)
    summary = {**result.summary, "expected_error": sentence(result.summary["expected_error"])}
    result = replace(result, summary=summary)
    if out is not None:
        with replacing(out / "summary.json") as place:
            place.write_text(dumps(summary, indent=1) + "\n", encoding="utf-8")
    if json:
        console.print_json(summary)
    else:
        show_fleet(result, out)


def show_fleet(result: FleetResult, out: Path | None) -> None:
    """Prints a fleet's figures: of all replicas together as of one, then of each."""
    show(result, out)
    fleet = result.summary["fleet"]
    console.out.print(
        f"fleet: {counted(fleet['replicas'], 'replica')} on {counted(fleet['gpus'], 'GPU')} behind "
        f"{fleet['router']}; herding "
        f"{fleet['herding']:.2f}, busiest replica {fleet['imbalance']:.2f} x the mean",
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
    table = Table(box=None, pad_edge=False)
    for name in ("replica", "requests", "hits", "TTFT p99", "TPOT p99", "KV peak", "preemptions"):
        table.add_column(name, justify="left" if name == "replica" else "right", no_wrap=True)
    for row in fleet["by_replica"][:_MOST_ROWS]:
        table.add_row(
            f"{row['replica']} ({row['gpu']})",
            f"{row['requests']:,}",
            f"{row['token_hit_rate']:.1%}",
            console.seconds(row["ttft_p99_s"]),
            console.seconds(row["tpot_p99_s"]),
            f"{row['peak_kv_usage']:.1%}",
            f"{row['preemptions']:,}",
        )
    console.out.print(table)
    if len(fleet["by_replica"]) > _MOST_ROWS:
        console.out.print(f"and {len(fleet['by_replica']) - _MOST_ROWS} more: --json, or --out FOLDER")
