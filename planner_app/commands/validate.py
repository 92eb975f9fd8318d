"""`pagecast validate`: replay a recorded run and compare it with what really happened."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.ignored_options import refuse_options
from pagecast.planner_app.commands.output import Reported
from pagecast.planner_app.commands.scenario_options import (
    ABOUT_LAUNCH,
    ABOUT_LOG,
    GivenScenario,
    launched,
    logged,
    started,
)
from pagecast.planner_app.commands.screen import folded, show_block, table_rows
from pagecast.planner_app.options import Options
from pagecast.planner_app.planner.execution.executor import executor
from pagecast.planner_app.planner.execution.options import MOST_REPLICATES
from pagecast.planner_app.reports.html_page import ready, write
from pagecast.planner_app.wording.accuracy import accuracy_sentences, as_json, blocks_sentence, expected_error
from pagecast.planner_app.wording.note_sentences import sentences
from pagecast.planner_app.wording.server_figures import figure, verdict
from pagecast.sim.core.engines.registry import profile as find_profile
from pagecast.sim.core.errors import BadInput, Unfinished
from pagecast.sim.note import Caution
from pagecast.sim.replay.replicates import STEP_TIMES, Run
from pagecast.sim.runs.bench_results import BenchResults, is_results, read_results
from pagecast.sim.runs.block_count import block_count
from pagecast.sim.runs.engine_rules import rules_of_run
from pagecast.sim.runs.forecast import REPLICATES, Forecast, ForecastRow, forecast, forecast_results
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import compare_decisions
from pagecast.sim.scenario import Scenario
from pydantic import Field
from rich.table import Table

RECORDED = "recorded"
_TOLD = ("ttft_s.mean", "tpot_s.mean", "e2e_s.mean", "ttft_s.p99", "tpot_s.p99", "e2e_s.p99")
_MOST_ROWS = 6
_WIDEST = 200  # more columns than a forecast's table has


class Profiled(Options):
    """Whose decisions a recorded run is compared with."""

    profile: str | None = Field(
        default=None,
        description="engine, or engine@version, whose rules are followed with recorded costs [the run's]",
    )


class OfRun(Profiled):
    """How a recorded run is replayed, beyond what results of a benchmark can be told."""

    host_time_factor: float | None = Field(
        default=None,
        ge=0.01,
        description="with measured operations, host time of synchronous steps against the recorded host's",
    )


class OfBench(Options):
    """What results of a benchmark do not say themselves."""

    scenario: Path | None = Field(
        default=None,
        description="YAML file of the scenario that results of a benchmark were measured in; its costs are "
        "used",
    )
    launch: str | None = Field(default=None, description=ABOUT_LAUNCH)
    log: str | None = Field(default=None, description=ABOUT_LOG)
    client_ms: float | None = Field(
        default=None,
        ge=0,
        description="with results of a benchmark, milliseconds that the client's TTFT and E2E hold "
        "beside the engine's [6.2, and 1.9 per 1,000 prompt tokens]",
    )


class Costed(Options):
    """What a run's steps are said to take."""

    costs: str = Field(
        default=RECORDED,
        description="recorded: the run's own step times; or a calibration's file or name, auto, measured, "
        "roofline",
    )


class ForecastOptions(Costed):
    """The draws behind a forecast, and how far it may be off."""

    replicates: int = Field(
        default=REPLICATES,
        ge=0,
        le=MOST_REPLICATES,
        description="draws of the costs behind each 90% interval",
    )
    max_error: float | None = Field(
        default=None, ge=0, description="exit with 1 where any figure is off by more percent"
    )
    seed: int = Field(default=0, description="of the draws")


@with_options
def validate_command(
    run: Annotated[
        Path, typer.Argument(help="folder of a recorded run, or a benchmark's results with --scenario")
    ],
    ask: ForecastOptions,
    of_run: OfRun,
    of_bench: OfBench,
    output: Reported,
) -> None:
    """Replays RUN and compares.

    With recorded costs: every step and every prefix hit, on the run's own clock; exit code 1 where a
    decision differs, and the first difference is explained. With any other: the run's requests are forecast
    and every latency and total is set beside the measured one, with 90% intervals.
    """
    if is_results(run):
        launch, log = launched(of_bench.launch), logged(of_bench.log)
        if of_bench.scenario is None and launch is None and log is None:
            raise BadInput(
                f"{run}: is a file, not the folder of a recorded run; if it holds the results of a "
                "benchmark, give the scenario that they were measured in: --scenario FILE.yaml, --launch or "
                "--log"
            )
        reason = "is for a recorded run: for results of a benchmark, write it into the file of --scenario"
        refuse_options(of_run, reason)
        refuse_options({"report": output.report}, "is for a recorded run: results of a benchmark have --json")
        fields = {} if ask.costs == RECORDED else {"costs": ask.costs}
        scenario, notes = started(GivenScenario(of_bench.scenario, fields, launch=launch, log=log))
        for note in notes:
            console.err.print(note, markup=False)
        results = read_results(run, of_bench.client_ms)
        _results(results, scenario, ask, output)
        return
    refuse_options(of_bench, "is for results of a benchmark: a recorded run says itself what it is of")
    if ask.costs == RECORDED:
        reason = "needs --costs auto or a calibration: recorded costs compare decisions, not times"
        refuse_options(ask, reason, beyond=Costed)
        refuse_options(of_run, reason, beyond=Profiled)
        refuse_options({"report": output.report}, reason)
        _decisions(_loaded(run), of_run.profile, output.json_only)
        return
    if of_run.profile is not None:
        raise BadInput("--profile needs --costs recorded: a forecast follows the rules of the run's engine")
    if output.report is not None:
        ready("--report", output.report)
    recorded = _loaded(run)
    result, complete = _until_interrupt(
        ask,
        lambda draws, update: forecast(
            recorded,
            ask.costs,
            replicates=ask.replicates,
            host_time_factor=of_run.host_time_factor,
            seed=ask.seed,
            run_draws=draws,
            progress=update,
        ),
    )
    if output.report is not None:
        from pagecast.planner_app.reports.validate_report import validate_report

        write(output.report, validate_report(result))
    if output.json_only:
        console.print_json(as_json(result))
    elif output.explain:
        show(result)
    else:
        show_answer(result, complete)
    _end(ask.max_error, result, complete)


def _until_interrupt(
    ask: ForecastOptions, make: Callable[[Run, Callable[[int], None]], Forecast]
) -> tuple[Forecast, bool]:
    """The forecast, and whether all of its draws came; an interrupt leaves those that did."""
    with executor() as run, console.progress("replicates", ask.replicates + len(STEP_TIMES)) as update:
        try:
            return make(run.until_interrupt, update), True
        except Unfinished as stopped:
            run.abandon()
            return stopped.answer, False


def _end(max_error: float | None, result: Forecast, complete: bool) -> None:
    """Exit code 130 after an interrupt, 1 where an error is larger than allowed."""
    if not complete:
        raise typer.Exit(130)
    if max_error is not None and result.worst_percent > max_error:
        raise typer.Exit(1)


def _results(results: BenchResults, scenario: Scenario, ask: ForecastOptions, output: Reported) -> None:
    """Forecast against the latencies of a benchmark's requests."""
    outcome, complete = _until_interrupt(
        ask,
        lambda draws, update: forecast_results(
            results,
            scenario,
            replicates=ask.replicates,
            seed=ask.seed,
            run_draws=draws,
            progress=update,
        ),
    )
    if output.json_only:
        console.print_json(outcome.rows_as_dict() | {"expected_error": expected_error(outcome)})
    elif output.explain:
        show(outcome, totals=False)
    else:
        show_answer(outcome, complete)
    _end(ask.max_error, outcome, complete)


def _loaded(folder: Path) -> RecordedRun:
    """The run of a folder; where its recording was cut, a line says so."""
    run = RecordedRun.load(folder)
    if run.cut:
        console.err.print(
            f"{folder}: the recording was cut: the server still runs, was killed or could not write; "
            "what it wrote until then is compared",
            soft_wrap=True,
            markup=False,
        )
    return run


def _decisions(run: RecordedRun, profile: str | None, json: bool) -> None:
    rules = find_profile(profile) if profile else rules_of_run(run.meta)
    comparison, blocks = compare_decisions(run, rules), block_count(run)
    if json:
        fields = {**asdict(comparison), "num_gpu_blocks": None if blocks is None else blocks.as_dict()}
        del fields["run"]
        fields["cut"] = run.cut
        console.print_json(fields)
    else:
        named = [str(run.meta[key]) for key in ("engine", "engine_version") if run.meta.get(key)]
        engine = " ".join(named) or "the engine"
        same = f"same decisions as {engine}" if comparison.ok else f"other decisions than {engine}"
        lines = [
            f"{comparison.run}: {same}; times are not compared: add --costs auto",
            f"{comparison.steps_matched:,} of {comparison.steps_recorded:,} steps are equal, and the "
            f"prefix hits of {comparison.cached_tokens_matched:,} of {comparison.requests:,} requests",
        ]
        lines += [f"first difference: {comparison.first_mismatch}"] if comparison.first_mismatch else []
        lines += [blocks_sentence(blocks)] if blocks is not None else []
        for part in (part for line in lines for part in folded(line)):
            console.out.print(part, soft_wrap=True)
    if not comparison.ok:
        raise typer.Exit(1)


def show_answer(result: Forecast, complete: bool = True) -> None:
    """Prints how far the means are off, whether intervals held, and the rows of means and tails."""
    cut = [] if complete else [Caution("interrupted: intervals are missing, or of the draws until then")]
    covered = [row.covered for row in result.rows if row.covered is not None]
    held = f"; {sum(covered)} of {len(covered)} figures within their 90% interval" if covered else ""
    by_name = {row.name: row for row in result.rows}
    rows = [by_name[name] for name in _TOLD if name in by_name] or list(result.rows)
    lines = [
        f"{result.run}: {verdict((row.name, row.error_percent) for row in result.rows)}{held}",
        f"forecast with costs {result.costs}; ±1%: percent by which steps 1% shorter or longer move it",
        *table_rows(_table(rows[:_MOST_ROWS], units=True)),
    ]
    show_block(lines, [*cut, *sentences(result.notes)], more=accuracy_sentences(result))


def _table(rows: Sequence[ForecastRow], *, units: bool = False) -> Table:
    """Forecast and measurement side by side; latencies in seconds, or with their `units`."""

    def shown(row: ForecastRow, value: float | None) -> str:
        return figure(row.name, value) if units and value is not None else _plain(value)

    table = Table(box=None, pad_edge=False)
    for title in ("", "forecast", "measured", "error", "90% low", "high", "±1%"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            _title(row.name),
            shown(row, row.predicted),
            shown(row, row.measured),
            _percent(row.error_percent),
            shown(row, row.low),
            shown(row, row.high) + ("*" if row.covered is False else ""),
            _reach(row.range_percent),
        )
    return table


def show(result: Forecast, *, totals: bool = True) -> None:
    """Prints forecast and measurement side by side, how often intervals held, and what matters most.

    `totals`: the figures are those of a recorded run, of which more is known than latencies.
    """
    console.out.print(
        f"{result.run}: forecast with costs {result.costs} against the recording", soft_wrap=True
    )
    table = _table(result.rows)
    wide = console.out.options.update(width=_WIDEST)
    if console.out.measure(table, options=wide).maximum > console.out.width:
        table.padding = (0, 1, 0, 0)  # closer together, so that no figure is cut
    console.out.print(table)
    console.out.print(
        "low, high: a 90% interval (* missed); ±1%: what step times within 1% change it by, percent",
        soft_wrap=True,
    )
    for sentence in accuracy_sentences(result) if totals else ():
        console.out.print(sentence, soft_wrap=True, markup=False, highlight=False)
    console.out.print(f"note: {expected_error(result)}", soft_wrap=True, markup=False)


def _title(name: str) -> str:
    latency, _, statistic = name.partition(".")
    return f"{latency.removesuffix('_s').upper()} {statistic}" if statistic else name.replace("_", " ")


def _plain(value: float | None) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _reach(span: tuple[float, float] | None) -> str:
    if span is None:
        return ""
    return " ".join(f"{value:+.0f}" if abs(value) > 9.9 else f"{value:+z.1f}" for value in span)


def _percent(value: float | None) -> str:
    if value is None:
        return ""
    return "-" if math.isnan(value) else f"{value:+z.1f}%"
