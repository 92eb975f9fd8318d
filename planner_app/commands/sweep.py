"""`pagecast sweep`: a grid or a search over a scenario's fields: the cheapest replica or fleet for an SLO."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.bounds import MOST_TRIALS, MOST_WORKERS
from pagecast.planner_app.commands.fleet_options import FleetGiven, GivenFleet, with_fleet
from pagecast.planner_app.commands.ignored_options import refuse_options
from pagecast.planner_app.commands.scenario_options import (
    ScenarioArguments,
    TraceArgument,
    load,
    with_scenario,
)
from pagecast.planner_app.reports.html_page import ready, write
from pagecast.traces.write import replacing
from rich.table import Table

if TYPE_CHECKING:
    from pagecast.planner_app.planner.sweep.study import SweepResult

Opt = typer.Option
_MOST_ROWS = 20
_VERY_WIDE = 10_000  # columns of a terminal, more than any table has
_SET = "field=values, may be repeated: block_size=16,32, kv_tokens=50000:400000:50000, max_num_seqs=8:256:x2"


@with_fleet
@with_scenario
def sweep_command(
    trace: TraceArgument,
    settings: Annotated[list[str], Opt("--set", help=_SET)],
    arguments: ScenarioArguments,
    fleet: FleetGiven,
    search: Annotated[
        int | None,
        Opt(
            max=MOST_TRIALS,
            help="make N trials chosen by Optuna's TPE, not the whole grid (needs the extra: pagecast[app])",
        ),
    ] = None,
    slo: Annotated[str, Opt(help="SLO, such as ttft_p99<2s,tpot_p95<50ms")] = "",
    price: Annotated[
        list[str] | None, Opt(help="GPU=USD per GPU-hour, may be repeated: H200=3.5; no price is built in")
    ] = None,
    objective: Annotated[
        str,
        Opt(
            help="figures to trade off, with commas [ttft_p99_s, tpot_p95_s, and before them usd_per_hour, "
            "without prices gpus, where the GPUs differ, or else output_tokens_per_s]"
        ),
    ] = "",
    generation: Annotated[
        int | None, Opt(max=MOST_TRIALS, help="trials that --search chooses at once [20]")
    ] = None,
    out: Annotated[Path | None, Opt(help="the study's folder; there already, the study goes on")] = None,
    workers: Annotated[int | None, Opt(min=1, max=MOST_WORKERS, help="processes [one per core]")] = None,
    cluster: Annotated[str | None, Opt(help="address of a Dask scheduler: tcp://host:8786")] = None,
    report: Annotated[
        Path | None, Opt(help="HTML file with charts to write (needs the extra: pagecast[app])")
    ] = None,
    emit: Annotated[
        str | None, Opt(help="write the cheapest as vllm, k8s, llm-d or dynamo would start it")
    ] = None,
    emit_to: Annotated[Path | None, Opt(help="file for --emit [printed]")] = None,
    json: Annotated[bool, Opt("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Serves TRACE by every scenario of a space: the cheapest that meets --slo, the front, what matters.

    Each trial is one replica that serves the whole trace, and its cost is that replica's: `pagecast plan`
    tells how many replicas a rate needs. With a fleet's options, or one of the knobs replicas,
    prefill_replicas (how many of them only prefill) and router, each trial is a fleet. The table is the same
    for any --workers and --cluster. With --out a sweep goes on where it stopped, in whichever way that was.
    Exit code 1 where no scenario serves every request and keeps --slo.
    """
    from pagecast.planner_app.planner.fleet.emit import check_form
    from pagecast.planner_app.planner.fleet.knobs import KNOBS
    from pagecast.planner_app.planner.prices import read_prices
    from pagecast.planner_app.planner.sweep.question import SweepQuestion
    from pagecast.planner_app.planner.sweep.search import GENERATION
    from pagecast.planner_app.planner.sweep.space import parse_space
    from pagecast.planner_app.planner.sweep.study import sweep

    if report is not None:
        ready("--report", report)
    if emit is not None:
        check_form(emit)
    else:
        refuse_options({"emit-to": emit_to}, "is the file for --emit: give --emit FORM as well")
    if search is None:
        refuse_options({"generation": generation}, "is for a search: give --search N as well")
    _refuse_knobs_values(settings, arguments, fleet)
    work, scenario = load(trace, arguments)
    space = parse_space(settings, scenario, fleet=True)
    fleet_settings = (
        fleet.settings() if fleet.any or any(knob.name in KNOBS for knob in space.knobs) else None
    )
    objectives = tuple(name.strip() for name in objective.split(",") if name.strip())
    question = SweepQuestion(
        work,
        scenario,
        space,
        slo,
        read_prices(price or []),
        objectives,
        search,
        GENERATION if generation is None else generation,
        fleet_settings,
    )
    with console.progress("trials", question.count) as update:
        result = sweep(question, out=out, workers=workers, cluster=cluster, progress=update)
    if report is not None:
        from pagecast.planner_app.reports.sweep_report import sweep_report

        write(report, sweep_report(result))
    text = emitted(result, emit) if emit is not None else None
    if text is not None and emit_to is not None:
        with replacing(emit_to) as place:
            place.write_text(text, encoding="utf-8")
    if json:
        console.print_json({**as_dict(result), **({} if emit is None else {"emitted": text})})
    else:
        show(result, out)
        if report is not None:
            console.out.print(f"written to {report}", soft_wrap=True)
        if text is not None:
            console.out.print(
                text if emit_to is None else f"written to {emit_to}", soft_wrap=True, markup=False
            )
    if result.cheapest is None:
        raise typer.Exit(1)


def _refuse_knobs_values(settings: list[str], arguments: ScenarioArguments, fleet: GivenFleet) -> None:
    """Errors: BadInput for an option whose value every trial replaces by the knob's."""
    fixed = {**arguments.fields, "replicas": fleet.replicas, "router": fleet.router.get("policy")}
    for text in settings:
        name = text.partition("=")[0].strip().replace("-", "_")
        given = {name.replace("_", "-"): fixed.get(name)}
        refuse_options(given, f"is what --set {text} varies: leave one of them out")


def as_dict(result: SweepResult) -> dict[str, Any]:
    """The sweep as plain JSON: question, cheapest, front, sensitivity and the whole table."""
    from pagecast.planner_app.planner.sweep.study import records
    from pagecast.planner_app.planner.sweep.trial_costs import notes, used, what_each_is

    question, costs = result.question, used(result)
    return {
        "trace": question.trace.name,
        "requests": len(question.trace),
        "space": str(question.space),
        "slo": question.slo,
        "prices_usd_per_gpu_hour": dict(question.prices),
        "objectives": list(question.objectives),
        "complete": result.complete,
        "scenario": question.scenario.flat(),
        "step_costs": [each.as_dict() for each in costs],
        "notes": [*question.trace.notes, what_each_is(result), *notes(result, costs)],
        "cheapest": result.cheapest,
        "front": records(result.front),
        "sensitivity": records(result.sensitivity),
        "trials": [
            {**row, "rejected_reasons": dict(result.rejections.get(row["number"], {}))}
            for row in records(result.table)
        ],
    }


def emitted(result: SweepResult, form: str) -> str | None:
    """The cheapest trial as others start it; None where no trial keeps the SLO. Errors: BadInput."""
    from pagecast.planner_app.planner.fleet.emit import emit
    from pagecast.planner_app.planner.fleet.knobs import fleet_at
    from pagecast.planner_app.planner.sweep.trial import at
    from pagecast.sim.fleet.settings import FleetSettings

    if result.cheapest is None:
        return None
    question = result.question
    point = {name: result.cheapest[name] for name in result.knobs}
    settings = fleet_at(question.fleet or FleetSettings.make({}), point)
    return emit(form, at(question.scenario, point), settings)


def show(result: SweepResult, out: Path | None) -> None:
    """Prints the cheapest, the front, the knobs' effects, and how many trials there were."""
    from pagecast.planner_app.planner.sweep.study_view import answer, effects, front, subject
    from pagecast.planner_app.planner.sweep.trial_costs import notes, used, what_each_is

    question, costs = result.question, used(result)
    trials = console.counted(len(result.table), "trial")
    console.out.print(
        f"{question.trace.name}: {console.counted(len(question.trace), 'request')}, {trials} of "
        f"{question.space}",
        soft_wrap=True,
    )
    console.out.print(_same(result, [each.name for each in costs]), soft_wrap=True)
    console.out.print(answer(result), soft_wrap=True)
    header, rows = front(result)
    title = f"Pareto-optimal {subject(result)}s" + (
        ", of those that meet the SLO" if question.slo and result.table["meets"].any() else ""
    )
    console.out.print(f"\n{title} in {', '.join(question.objectives)}:", soft_wrap=True)
    _print_trials(header, rows[:_MOST_ROWS])
    if len(rows) > _MOST_ROWS:
        console.out.print(f"and {len(rows) - _MOST_ROWS} more (--json, or trials.parquet in --out)")
    header, rows = effects(result)
    console.out.print("\nwhat each knob moves (share of a figure's variance that it explains alone):")
    _print_effects(header, rows)
    console.out.print()
    for note in (*question.trace.notes, what_each_is(result), *notes(result, costs)):
        console.out.print(f"note: {note}", soft_wrap=True)
    before = len(result.table) - result.replayed
    in_folder = f"; {before:,} were in the folder already" if before else ""
    where = f"; the study is in {out}" if out else ""
    replayed = console.counted(result.replayed, "trial")
    console.out.print(f"{replayed} replayed{in_folder}{where}", soft_wrap=True)


def _same(result: SweepResult, costs: list[str]) -> str:
    """The most important settings that all trials have in common."""
    scenario = result.question.scenario
    fields = ("model", "gpu", "tensor_parallel_size", "profile")
    parts = [f"{name} {getattr(scenario, name)}" for name in fields if name not in result.knobs]
    parts += [f"step costs {' and '.join(costs)}"] if costs else []
    return f"with {', '.join(parts)}"


def _print_trials(header: list[str], rows: list[list[str]]) -> None:
    """Prints a row per trial or, where a line is too short for that, a column per trial."""
    if not rows or _fits(_table(header, rows)):
        console.out.print(_table(header, rows))
        return
    first = 0
    while first < len(rows):
        last = first + 1
        while last < len(rows) and _fits(_upright(header, rows[first : last + 1])):
            last += 1
        console.out.print(_upright(header, rows[first:last]))
        first = last
        if first < len(rows):
            console.out.print()


def _upright(header: list[str], rows: list[list[str]]) -> Table:
    """A table with a row per title; the first titles its columns."""
    top, *lines = [list(line) for line in zip(header, *rows, strict=True)]
    return _table(top, lines)


def _print_effects(header: list[str], rows: list[list[str]]) -> None:
    """Prints the knobs' effects, figure by figure."""
    if not rows:
        console.out.print("nothing, by half a percent or more")
    knob, _, *titles = header
    for figure in dict.fromkeys([row[1] for row in rows]):
        of_figure = [[row[0], *row[2:]] for row in rows if row[1] == figure]
        console.out.print(f"\n{figure}", soft_wrap=True)
        console.out.print(_table([knob, *titles], of_figure))


def _fits(table: Table) -> bool:
    """Whether a table has room on a line without a break in any of its cells."""
    wide = console.out.options.update(width=_VERY_WIDE)
    return console.out.measure(table, options=wide).maximum <= console.out.width


def _table(header: list[str], rows: list[list[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(header):
        table.add_column(title, justify="right" if number else "left", no_wrap=not number, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
