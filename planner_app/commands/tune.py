"""`pagecast tune block-size` and `pagecast tune hbm-budget`: the knob's effects, and what to set it to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.ignored_options import refuse_options
from pagecast.planner_app.commands.output import Reported
from pagecast.planner_app.commands.scenario_options import (
    GivenScenario,
    WorkArguments,
    load,
)
from pagecast.planner_app.commands.screen import room_below, show_block, table_rows
from pagecast.planner_app.planner.execution.options import Many
from pagecast.planner_app.planner.traffic import traffic
from pagecast.planner_app.planner.tune.options import BlockSizeOptions, TuneOptions
from pagecast.planner_app.reports.html_page import ready, write
from pagecast.planner_app.wording.assumed import rules, step_times
from pagecast.planner_app.wording.engine_defaults import engine_defaults
from pagecast.planner_app.wording.quantities import counted
from rich.table import Table

if TYPE_CHECKING:
    from pagecast.planner_app.planner.tune.knobs import TuneResult
    from pagecast.traces.schema import Trace

_MOST_ROWS = 6  # of values, in the answer
app = typer.Typer(
    name="tune",
    help="Chooses a block size or an HBM budget for a trace.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command("block-size")
@with_options
def block_size_command(
    arguments: WorkArguments,
    ask: BlockSizeOptions,
    many: Many,
    output: Reported,
) -> None:
    """Serves TRACE with each block size: hits, waste, tables, times and room; and recommends one."""
    _tune("block-size", arguments, ask, many, output)


@app.command("hbm-budget")
@with_options
def hbm_budget_command(
    arguments: WorkArguments,
    ask: TuneOptions,
    many: Many,
    output: Reported,
) -> None:
    """Serves TRACE with each share of HBM: hits, evictions, times and room; and recommends one."""
    _tune("hbm-budget", arguments, ask, many, output)


def _tune(what: str, arguments: GivenScenario, ask: TuneOptions, many: Many, output: Reported) -> None:
    report = output.report
    if report is not None:
        ready("--report", report)
    from pagecast.planner_app.planner.execution.executor import executor
    from pagecast.planner_app.planner.tune import knobs

    work, scenario = load(arguments)
    knob = "block_size" if what == "block-size" else knobs.budget_knob(scenario)
    refuse_options(
        {knob.replace("_", "-"): arguments.fields.get(knob)},
        f"is what tune {what} varies: leave it out; --values lists what is tried",
    )
    values = knobs.values_of(scenario, knob, ask)
    with executor(many) as run, console.progress("settings", len(values)) as update:
        tuned = knobs.tune(work, scenario, knob, ask, run, update)
    if report is not None:
        from pagecast.planner_app.reports.tune_report import tune_report

        write(report, tune_report(tuned))
    if output.json_only:
        console.print_json(as_dict(tuned))
    else:
        if output.explain:
            show(tuned)
        else:
            show_answer(work, tuned)
        if report is not None:
            console.out.print(f"written to {report}", soft_wrap=True)
    if not tuned.complete:
        raise typer.Exit(130)


def as_dict(tuned: TuneResult) -> dict[str, Any]:
    """The tuning as plain JSON."""
    from pagecast.planner_app.planner.sweep.study import records

    return {
        "trace": tuned.trace,
        "knob": tuned.knob,
        "slo": tuned.slo,
        "recommended": tuned.recommended,
        "reason": tuned.reason,
        "complete": tuned.complete,
        "settings": records(tuned.table),
        "notes": list(tuned.notes),
        "costs": tuned.costs,
        "expected_error": tuned.expected_error,
        "scenario": tuned.scenario.resolved(),
    }


def show_answer(work: Trace, tuned: TuneResult) -> None:
    """Prints the recommendation, its reason in short, the question, and a row for each value."""
    from pagecast.planner_app.planner.tune.tables import cannot_run, shortest

    scenario = tuned.scenario
    place = f"{scenario.tensor_parallel_size} x {scenario.gpu} with {scenario.model}"
    take = "keep" if tuned.recommended == getattr(scenario, tuned.knob) else "take"
    lines = [
        f"{take} {tuned.reason}" if tuned.recommends else tuned.reason,
        *([] if tuned.complete else [f"interrupted after {counted(len(tuned.table), 'value')}"]),
        traffic(work),
        f"on {place}; {_loads(tuned)}",
    ]
    header, rows = shortest(tuned, min(_MOST_ROWS, room_below(lines) - 1))
    if rows:
        lines += table_rows(_table(header, rows))
    more = [step_times(scenario, scenario.step_costs()), *filter(None, [cannot_run(tuned)])]
    more.append(rules(scenario, varied=(tuned.knob,)))
    show_block(lines, tuned.notes, more=more)


def _loads(tuned: TuneResult) -> str:
    """The loads that the figures of a row are at."""
    own = "hits and latencies: the trace as it comes"
    if "admissible_concurrency" not in tuned.table:
        return own
    return f"users admitted: of a closed loop, {f'SLO {tuned.slo}' if tuned.slo else 'without SLO'}; {own}"


def _table(header: list[str], rows: list[list[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in header:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def show(tuned: TuneResult) -> None:
    """Prints the table, the recommendation and its reason."""
    from pagecast.planner_app.planner.tune.tables import admits, cannot_run, tables

    scenario = tuned.scenario
    console.out.print(
        f"{tuned.trace} on {scenario.model}, {scenario.tensor_parallel_size} x {scenario.gpu}, "
        f"{scenario.profile.label}, costs {tuned.costs}: {len(tuned.table)} values of {tuned.knob}",
        soft_wrap=True,
    )
    if defaults := engine_defaults(scenario, varied=(tuned.knob,)):
        console.out.print(defaults, soft_wrap=True)
    if not tuned.complete:
        console.out.print("interrupted: the other values were not tried")
    for header, rows in tables(tuned):
        console.out.print(_table(header, rows))
        console.out.print()
    for line in filter(None, (admits(tuned), cannot_run(tuned))):
        console.out.print(line, soft_wrap=True)
    console.out.print(f"recommended: {tuned.reason}" if tuned.recommends else tuned.reason, soft_wrap=True)
    for note in (*tuned.notes, tuned.expected_error):
        console.out.print(f"note: {note}", soft_wrap=True)
