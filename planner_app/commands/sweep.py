"""`pagecast sweep`: a grid or a search over a scenario's fields: the cheapest replica or fleet for an SLO."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.fleet_options import FleetOptions
from pagecast.planner_app.commands.ignored_options import refuse_options, refuse_set_twice
from pagecast.planner_app.commands.output import Reported
from pagecast.planner_app.commands.scenario_options import (
    GivenScenario,
    WorkArguments,
    command_line,
    load,
    unsent,
)
from pagecast.planner_app.commands.screen import show_block
from pagecast.planner_app.planner.execution.options import Many
from pagecast.planner_app.planner.fleet.options import EmittedTrial
from pagecast.planner_app.planner.load_fields import load_fields
from pagecast.planner_app.planner.sweep.loads import Loads
from pagecast.planner_app.planner.sweep.options import SweepOptions
from pagecast.planner_app.planner.sweep.space import knob_name, parse_space
from pagecast.planner_app.planner.traffic import traffic
from pagecast.planner_app.reports.html_page import ready, write
from pagecast.planner_app.wording.assumed import rules, step_times
from pagecast.planner_app.wording.engine_defaults import engine_defaults
from pydantic import Field
from rich.table import Table

if TYPE_CHECKING:
    from pagecast.planner_app.planner.sweep.study import SweepResult
    from pagecast.sim.scenario import Scenario
    from pagecast.traces.schema import Trace

_MOST_ROWS = 20
CHEAPEST = "cheapest.yaml"  # the scenario of the cheapest replica, in a study's folder
_VERY_WIDE = 10_000  # columns of a terminal, more than any table has


class SweepOutput(Reported):
    """How a sweep's answer is printed and drawn."""

    report: Path | None = Field(
        default=None, description="HTML file with charts to write (needs the extra: pagecast[app])"
    )
    out: Path | None = Field(default=None, description="the study's folder; there already, the study goes on")


@with_options
def sweep_command(
    arguments: WorkArguments,
    fleet: FleetOptions,
    ask: SweepOptions,
    many: Many,
    emitted: EmittedTrial,
    output: SweepOutput,
) -> None:
    """Serves TRACE by every scenario of a space: the cheapest that meets --slo, the front, what matters.

    Each trial is one replica that serves the whole trace, and its cost is that replica's: `pagecast plan`
    tells how many replicas a rate needs. With a fleet's options, or one of the knobs replicas,
    prefill_replicas (how many of them only prefill) and router, each trial is a fleet. The table is the same
    for any --workers and --cluster. With --out a sweep goes on where it stopped, in whichever way that was.
    The cheapest keeps --slo when the load goes on too, as `pagecast plan` judges a rate. Exit code 1 where no
    scenario serves every request and keeps --slo.
    """
    from pagecast.planner_app.planner.capacity.admitted import keeps_rate
    from pagecast.planner_app.planner.execution.executor import executor
    from pagecast.planner_app.planner.fleet.emit import check_form
    from pagecast.planner_app.planner.sweep.question import SweepQuestion
    from pagecast.planner_app.planner.sweep.study import sweep

    if output.report is not None:
        ready("--report", output.report)
    emitted.check()
    if emitted.emit is not None:
        check_form(emitted.emit)
    if ask.search is None and "generation" in ask.model_fields_set:
        refuse_options({"generation": ask.generation}, "is for a search: give --search N as well")
    _refuse_knobs_values(ask, arguments, fleet)
    work, scenario, loads = _loads(arguments, ask)
    question = SweepQuestion(work, scenario, ask, fleet.settings() if fleet.any else None, loads)
    with executor(many) as run, console.progress("trials", question.count) as update:
        result = sweep(question, run, out=output.out, progress=update, confirm=keeps_rate)
    if output.out is not None and (best := scenario_of_cheapest(result)) is not None:
        best.save(output.out / CHEAPEST)
    if output.report is not None:
        from pagecast.planner_app.reports.sweep_report import sweep_report

        write(output.report, sweep_report(result))
    text = cheapest_as(result, emitted.emit) if emitted.emit is not None else None
    if text is not None:
        emitted.write(text)
    if output.json_only:
        console.print_json({**as_dict(result), **({} if emitted.emit is None else {"emitted": text})})
    else:
        if output.explain:
            show(result, output.out)
        else:
            show_answer(result, output.out, arguments)
        if output.report is not None:
            console.out.print(f"written to {output.report}", soft_wrap=True)
        if text is not None:
            place = text if emitted.emit_to is None else f"written to {emitted.emit_to}"
            console.out.print(place, soft_wrap=True, markup=False)
    if not result.complete:
        raise typer.Exit(130)
    if result.cheapest is None:
        raise typer.Exit(1)


def _loads(arguments: GivenScenario, ask: SweepOptions) -> tuple[Trace, Scenario, Loads | None]:
    """The requests, the scenario, and the load where the space has fields of one: then of its first point."""
    if not any(knob_name(text) in load_fields() for text in ask.settings):
        return *load(arguments), None
    trace, scenario, _ = unsent(arguments)
    loads = Loads(arguments.load, trace, scenario.seed)
    knobs = parse_space(ask.settings, scenario, fleet=True, load=True).knobs
    return loads.at({knob.name: (*knob.values, knob.low)[0] for knob in knobs}), scenario, loads


def _refuse_knobs_values(ask: SweepOptions, arguments: GivenScenario, fleet: FleetOptions) -> None:
    """Errors: BadInput for an option whose value every trial replaces by the knob's."""
    fixed = {**arguments.fields, **arguments.load.given(), "replicas": fleet.replicas, "router": fleet.router}
    refuse_set_twice("--set", ask.settings, fixed)


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
        "scenario": question.scenario.resolved(),
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


def cheapest_as(result: SweepResult, form: str) -> str | None:
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


def scenario_of_cheapest(result: SweepResult) -> Scenario | None:
    """The scenario of the cheapest replica that meets the SLO; None where there is none, and for fleets."""
    from pagecast.planner_app.planner.sweep.trial import at

    if result.cheapest is None or result.question.fleet is not None:
        return None
    return at(result.question.scenario, {name: result.cheapest[name] for name in result.knobs})


def show_answer(result: SweepResult, out: Path | None, given: GivenScenario) -> None:
    """Prints the cheapest, how to run it, what it was chosen from, and below it the trials."""
    from pagecast.planner_app.planner.sweep.study_view import all_trials, answer, front, nothing_differs
    from pagecast.planner_app.planner.sweep.trial_costs import notes, servers, used, what_each_is

    question, costs = result.question, used(result)
    same = nothing_differs(result)
    trials = console.counted(len(result.table), "trial")
    lines = [same] if same else []
    if not same or result.cheapest is None:
        lines.append(answer(result, short=True))
    if result.cheapest is not None and not same and question.fleet is None:
        point = {name: result.cheapest[name] for name in result.knobs}
        if command := command_line("replay", given, point):
            lines.append(f"replay it: {command}")
    lines.append(traffic(question.trace))
    lines.append(f"{trials} of {question.space}; {what_each_is(result)}")
    lines.append(_same(result, [] if len(costs) == 1 else [each.name for each in costs]))
    if out is not None and scenario_of_cheapest(result) is not None:
        lines.append(f"its scenario: {out / CHEAPEST}")
    texts = [*notes(result, costs), *question.trace.notes]
    more = [rules(*(servers(result) or [question.scenario]), varied=result.knobs)]
    if len(costs) == 1 and "gpu" not in result.knobs and "model" not in result.knobs:
        more = [step_times(question.scenario, question.scenario.step_costs()), *more]
    show_block(lines, texts, _replayed(result), more=more)
    console.out.print()
    if len(result.table) <= _MOST_ROWS:
        for line in console.table_lines(_table(*all_trials(result))):
            console.out.print(line, soft_wrap=True)
        return
    header, rows = front(result)
    objectives = ", ".join(question.objectives)
    console.out.print(f"no trial is better in all of {objectives}:", soft_wrap=True)
    _print_trials(header, rows[:_MOST_ROWS])
    if len(rows) > _MOST_ROWS:
        console.out.print(f"and {len(rows) - _MOST_ROWS} more (--json, or trials.parquet in --out)")


def show(result: SweepResult, out: Path | None) -> None:
    """Prints the cheapest, the front, the knobs' effects, and how many trials there were."""
    from pagecast.planner_app.planner.sweep.study_view import all_trials, answer, effects, front, subject
    from pagecast.planner_app.planner.sweep.trial_costs import notes, servers, used, what_each_is

    question, costs = result.question, used(result)
    trials = console.counted(len(result.table), "trial")
    console.out.print(
        f"{question.trace.name}: {console.counted(len(question.trace), 'request')}, {trials} of "
        f"{question.space}",
        soft_wrap=True,
    )
    console.out.print(_same(result, [each.name for each in costs]), soft_wrap=True)
    if defaults := engine_defaults(*(servers(result) or [question.scenario]), varied=result.knobs):
        console.out.print(defaults, soft_wrap=True)
    console.out.print(answer(result), soft_wrap=True)
    if len(result.table) <= _MOST_ROWS:
        console.out.print()
        for line in console.table_lines(_table(*all_trials(result))):
            console.out.print(line, soft_wrap=True)
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
    where = f"; the study is in {out}" if out else ""
    if out is not None and scenario_of_cheapest(result) is not None:
        where += f", the scenario of the cheapest in {out / CHEAPEST}"
    console.out.print(f"{_replayed(result)}{where}", soft_wrap=True)


def _replayed(result: SweepResult) -> str:
    before = len(result.table) - result.replayed
    in_folder = f"; {before:,} were in the folder already" if before else ""
    trials = console.counted(result.replayed, "trial")
    if result.replays < result.replayed:
        return f"{trials} told by {console.counted(result.replays, 'replay')}{in_folder}"
    return f"{trials} replayed{in_folder}"


def _same(result: SweepResult, costs: list[str]) -> str:
    """The most important settings that all trials have in common."""
    scenario = result.question.scenario
    fields = ("model", "gpu", "tensor_parallel_size", "engine")
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
