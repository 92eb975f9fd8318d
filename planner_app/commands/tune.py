"""`pagecast tune block-size` and `pagecast tune hbm-budget`: the knob's effects, and what to set it to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.bounds import MOST_WORKERS
from pagecast.planner_app.commands.ignored_options import refuse_options
from pagecast.planner_app.commands.scenario_options import (
    ScenarioArguments,
    TraceArgument,
    load,
    with_scenario,
)
from pagecast.planner_app.reports.html_page import ready, write
from rich.table import Table

if TYPE_CHECKING:
    from pagecast.planner_app.planner.tune.knobs import TuneResult

Opt = typer.Option
Slo = Annotated[str, Opt(help="SLO to keep, such as ttft_p99<2s,tpot_p95<50ms")]
Static = Annotated[bool, Opt("--static", help="leave out the simulated admissible concurrency: much faster")]
Workers = Annotated[int | None, Opt(min=1, max=MOST_WORKERS, help="processes [one per core]")]
ClusterAddress = Annotated[str | None, Opt(help="address of a Dask scheduler: tcp://host:8786")]
Report = Annotated[Path | None, Opt(help="HTML file with charts to write")]
Json = Annotated[bool, Opt("--json", help="print one JSON object and nothing else")]

app = typer.Typer(
    name="tune",
    help="Chooses a block size or an HBM budget for a trace.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command("block-size")
@with_scenario
def block_size_command(
    trace: TraceArgument,
    arguments: ScenarioArguments,
    values: Annotated[str, Opt(help="block sizes: 16,32,64 or 8:256:x2")] = "",
    slo: Slo = "",
    static: Static = False,
    workers: Workers = None,
    cluster: ClusterAddress = None,
    report: Report = None,
    json: Json = False,
) -> None:
    """Serves TRACE with each block size: hits, waste, tables, times and room; and recommends one."""
    options = {"slo": slo, "concurrency": not static, "workers": workers, "cluster": cluster}
    _tune("block_size", trace, arguments, values, options, report, json)


@app.command("hbm-budget")
@with_scenario
def hbm_budget_command(
    trace: TraceArgument,
    arguments: ScenarioArguments,
    values: Annotated[str, Opt(help="fractions of HBM: 0.8,0.9 or 0.5:0.95:0.05")] = "",
    slo: Slo = "",
    static: Static = False,
    workers: Workers = None,
    cluster: ClusterAddress = None,
    report: Report = None,
    json: Json = False,
) -> None:
    """Serves TRACE with each share of HBM: hits, evictions, times and room; and recommends one."""
    options = {"slo": slo, "concurrency": not static, "workers": workers, "cluster": cluster}
    _tune("hbm_budget", trace, arguments, values, options, report, json)


def _tune(
    what: str,
    name: str,
    arguments: ScenarioArguments,
    values: str,
    options: dict[str, Any],
    report: Path | None,
    json: bool,
) -> None:
    if report is not None:
        ready("--report", report)
    from pagecast.planner_app.planner.tune import knobs

    work, scenario = load(name, arguments)
    knob = "block_size" if what == "block_size" else knobs.budget_knob(scenario)
    given = {knob.replace("_", "-"): arguments.fields.get(knob)}
    refuse_options(
        given, f"is what tune {what.replace('_', '-')} varies: leave it out; --values lists what is tried"
    )
    values = values or {"block_size": knobs.BLOCK_SIZES, **knobs.BUDGETS}[knob]
    ask = knobs.tune_block_size if what == "block_size" else knobs.tune_hbm_budget
    jobs = knobs.jobs_of(values, knob, scenario, options["concurrency"])
    with console.progress("settings", len(jobs)) as update:
        tuned = ask(work, scenario, values, progress=update, **options)
    if report is not None:
        from pagecast.planner_app.reports.tune_report import tune_report

        write(report, tune_report(tuned))
    if json:
        console.print_json(as_dict(tuned))
        return
    show(tuned)
    if report is not None:
        console.out.print(f"written to {report}", soft_wrap=True)


def as_dict(tuned: TuneResult) -> dict[str, Any]:
    """The tuning as plain JSON."""
    from pagecast.planner_app.planner.sweep.study import records

    return {
        "trace": tuned.trace,
        "knob": tuned.knob,
        "slo": tuned.slo,
        "recommended": tuned.recommended,
        "reason": tuned.reason,
        "settings": records(tuned.table),
        "notes": list(tuned.notes),
        "costs": tuned.costs,
        "expected_error": tuned.expected_error,
        "scenario": tuned.scenario.flat(),
    }


def show(tuned: TuneResult) -> None:
    """Prints the table, the recommendation and its reason."""
    from pagecast.planner_app.planner.tune.tables import admits, cannot_run, tables

    scenario = tuned.scenario
    console.out.print(
        f"{tuned.trace} on {scenario.model}, {scenario.tensor_parallel_size} x {scenario.gpu}, profile "
        f"{scenario.profile}, costs {tuned.costs}: {len(tuned.table)} values of {tuned.knob}",
        soft_wrap=True,
    )
    for header, rows in tables(tuned):
        table = Table(box=None, pad_edge=False)
        for title in header:
            table.add_column(title, justify="right")
        for row in rows:
            table.add_row(*row)
        console.out.print(table)
        console.out.print()
    for line in filter(None, (admits(tuned), cannot_run(tuned))):
        console.out.print(line, soft_wrap=True)
    console.out.print(f"recommended: {tuned.reason}" if tuned.recommends else tuned.reason, soft_wrap=True)
    for note in (*tuned.notes, tuned.expected_error):
        console.out.print(f"note: {note}", soft_wrap=True)
