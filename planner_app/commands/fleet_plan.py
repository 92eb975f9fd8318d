"""The part of `pagecast plan` for fleets: the fewest replicas that keep an SLO, router by router."""

from __future__ import annotations

from pathlib import Path

import typer
from pagecast.planner_app import console
from pagecast.planner_app.planner.execution.executor import executor
from pagecast.planner_app.planner.fleet.emit import emit
from pagecast.planner_app.planner.fleet.sizing import FleetSize, Sizing, against, sized
from pagecast.planner_app.planner.slo import Slo
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from pagecast.traces.write import replacing
from rich.table import Table


def plan_fleet(
    work: Trace,
    scenario: Scenario,
    settings: FleetSettings,
    level: Slo,
    *,
    routers: list[str],
    most: int,
    workers: int | None,
    cluster: str | None,
    form: str | None,
    out: Path | None,
    json: bool,
) -> None:
    """Prints the fewest replicas, and writes the cheapest fleet as others start it.

    Each router is one task of `workers` processes or of a Dask `cluster`; neither changes the answer.
    Exit code 1 where no router keeps the level with `most` replicas. Errors: BadInput.
    """
    fleets = against(settings, routers)
    if form is not None:
        for fleet in fleets:  # what cannot be written is said before the search
            emit(form, scenario, fleet)
    sizing = Sizing(work, scenario, level, most)
    with executor(workers, cluster) as run, console.progress("routers", len(fleets)) as update:
        sizes = run.map(sizing.run, fleets, progress=update)
    enough = [size for size in sizes if size.replicas is not None]
    text = None
    if form is not None and enough:
        best = min(enough, key=lambda size: size.replicas or 0)
        fleet_of_best = next(fleet for fleet in fleets if fleet.router.policy == best.router)
        text = emit(form, scenario, sized(fleet_of_best, best.replicas or 0))
    if text is not None and out is not None:
        with replacing(out) as place:
            place.write_text(text, encoding="utf-8")
    if json:
        body = {"trace": work.name, "slo": level.text, "routers": [size.to_dict() for size in sizes]}
        console.print_json({**body, "emitted": text})
    else:
        _show(work, level, sizes)
        if text is not None:
            console.out.print(text if out is None else f"written to {out}", soft_wrap=True, markup=False)
    if not enough:
        raise typer.Exit(1)


def _show(work: Trace, level: Slo, sizes: list[FleetSize]) -> None:
    console.out.print(f"{work.name}: {len(work):,} requests; SLO: {level.text}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for title in ("router", "fewest replicas", "GPUs", "GPU hours", "cost", "hits", "one less breaks"):
        table.add_column(title, justify="left" if title in ("router", "one less breaks") else "right")
    for size in sizes:
        s = size.result.summary
        fleet = s["fleet"]
        count = f"more than {size.most}" if size.replicas is None else f"{size.replicas}"
        broken = size.verdict.broken if size.replicas is None else size.below.broken if size.below else ()
        table.add_row(
            size.router,
            count,
            f"{fleet['gpus']}",
            f"{fleet['gpu_hours']:.2f}",
            "-" if fleet["cost"] is None else f"{fleet['cost']:,.2f}",
            f"{s['token_hit_rate']:.1%}",
            ", ".join(term.text for term in broken) or "-",
        )
    console.out.print(table)
