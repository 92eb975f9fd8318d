"""The part of `pagecast plan` for fleets: the fewest replicas that keep an SLO, router by router."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.output import Explained
from pagecast.planner_app.commands.screen import show_block, table_rows
from pagecast.planner_app.planner.capacity.options import Target
from pagecast.planner_app.planner.execution.executor import executor
from pagecast.planner_app.planner.execution.options import Many
from pagecast.planner_app.planner.fleet.emit import emit
from pagecast.planner_app.planner.fleet.options import SizeOptions
from pagecast.planner_app.planner.fleet.sizing import FleetSize, Sizing, against, sized
from pagecast.planner_app.planner.slo import Slo
from pagecast.planner_app.planner.traffic import traffic
from pagecast.planner_app.wording.assumed import assumed, beside_step_times
from pagecast.planner_app.wording.engine_defaults import engine_defaults
from pagecast.planner_app.wording.note_sentences import sentences
from pagecast.planner_app.wording.quantities import counted
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from rich.table import Table


def plan_fleet(
    work: Trace,
    scenario: Scenario,
    settings: FleetSettings,
    target: Target,
    ask: SizeOptions,
    many: Many,
    output: Explained,
) -> None:
    """Prints the fewest replicas, and writes the cheapest fleet as others start it.

    Each router is one task; where it runs does not change the answer. Exit code 1 where no router keeps the
    level with the most replicas. Errors: BadInput.
    """
    level = Slo.parse(target.slo)
    fleets = against(settings, list(ask.against))
    if ask.emit is not None:
        for fleet in fleets:  # what cannot be written is said before the search
            emit(ask.emit, scenario, fleet)
    sizing = Sizing(work, scenario, level, ask.most_replicas)
    started = time.perf_counter()
    with executor(many) as run, console.progress("routers", len(fleets)) as update:
        sizes = []
        for _, size in run.until_interrupt(sizing.run, fleets):
            sizes.append(size)
            update(len(sizes))
    sizes.sort(key=lambda size: [fleet.router.policy for fleet in fleets].index(size.router))
    wall_s = time.perf_counter() - started
    enough = [size for size in sizes if size.replicas is not None]
    text = None
    if ask.emit is not None and enough:
        best = min(enough, key=lambda size: size.replicas or 0)
        fleet_of_best = next(fleet for fleet in fleets if fleet.router.policy == best.router)
        text = emit(ask.emit, scenario, sized(fleet_of_best, best.replicas or 0))
        ask.write(text)
    replica = settings.group_scenario(0, scenario)
    if output.json_only:
        console.print_json(_body(work, replica, level, sizes, text))
    else:
        (_show if output.explain else _show_answer)(work, replica, level, sizes, wall_s)
        if text is not None:
            console.out.print(
                text if ask.emit_to is None else f"written to {ask.emit_to}", soft_wrap=True, markup=False
            )
    if len(sizes) < len(fleets):
        raise typer.Exit(130)
    if not enough:
        raise typer.Exit(1)


def _body(
    work: Trace, scenario: Scenario, level: Slo, sizes: Sequence[FleetSize], text: str | None
) -> dict[str, Any]:
    """The plan for JSON."""
    routers = [{**size.to_dict(), "peak_gpus": size.result.summary["fleet"]["peak_gpus"]} for size in sizes]
    return {
        "trace": work.name,
        "requests": len(work),
        "model": scenario.model,
        "gpu": scenario.gpu,
        "tensor_parallel_size": scenario.tensor_parallel_size,
        "costs": _costs(sizes),
        "slo": level.text,
        "routers": routers,
        "notes": list(_notes(sizes)),
        "emitted": text,
    }


def _costs(sizes: Sequence[FleetSize]) -> str:
    """The names of the step costs of all fleets."""
    return " and ".join(dict.fromkeys(size.result.summary["costs"] for size in sizes))


def _notes(sizes: Sequence[FleetSize]) -> tuple[str, ...]:
    """What qualifies the figures of any router's fleet, the expected error of the costs included."""
    return sentences(_all_notes(sizes))


def _all_notes(sizes: Sequence[FleetSize]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for size in sizes for note in size.result.notes))


def _show_answer(
    work: Trace, scenario: Scenario, level: Slo, sizes: Sequence[FleetSize], wall_s: float
) -> None:
    """Prints the fewest replicas of any router, and a row for each."""
    enough = [size for size in sizes if size.replicas is not None]
    if enough:
        best = min(enough, key=lambda size: size.replicas or 0)
        others = " (others need as many)" if all(size.replicas == best.replicas for size in sizes[1:]) else ""
        answer = f"take {counted(best.replicas or 0, 'replica')} behind {best.router}"
        answer += others if len(sizes) > 1 else ""
    else:
        answer = f"no router keeps the SLO with {max(size.most for size in sizes):,} replicas"
    lines = [
        traffic(work),
        f"on replicas of {scenario.tensor_parallel_size} x {scenario.gpu} with {scenario.model}, "
        f"SLO {level.text}",
        answer,
        *table_rows(_table(sizes)),
        *(f"{size.router}: {size.counts.sentence}" for size in sizes if size.counts.sentence),
    ]
    replays = counted(sum(size.replays for size in sizes), "replay")
    notes = beside_step_times(_all_notes(sizes))
    show_block(lines, notes, f"{console.seconds(wall_s)}, {replays}", more=assumed(scenario))


def _show(work: Trace, scenario: Scenario, level: Slo, sizes: Sequence[FleetSize], wall_s: float) -> None:
    """Prints what was planned for, the replicas of each router, what was not served, and the notes."""
    replica = f"replicas of {scenario.tensor_parallel_size} x {scenario.gpu}"
    console.out.print(
        f"{work.name}: {len(work):,} requests on {scenario.model}, {replica}, {scenario.profile.label}, "
        f"costs {_costs(sizes)}",
        soft_wrap=True,
    )
    if defaults := engine_defaults(scenario):
        console.out.print(defaults, soft_wrap=True)
    console.out.print(f"SLO: {level.text}", soft_wrap=True)
    console.out.print(_table(sizes))
    for size in sizes:
        if size.counts.sentence:
            console.out.print(f"{size.router}: {size.counts.sentence}", soft_wrap=True, markup=False)
    for note in _notes(sizes):
        console.out.print(f"note: {note}", soft_wrap=True, markup=False)
    replays = counted(sum(size.replays for size in sizes), "replay")
    console.out.print(f"planned in {wall_s:.1f} s with {replays}", soft_wrap=True)


def _table(sizes: Sequence[FleetSize]) -> Table:
    """The fewest replicas of each router."""
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
            f"{fleet['peak_gpus']}",
            f"{fleet['gpu_hours']:.2f}",
            "-" if fleet["cost"] is None else f"{fleet['cost']:,.2f}",
            console.share(s["token_hit_rate"]),
            ", ".join(term.text for term in broken) or "-",
        )
    return table
