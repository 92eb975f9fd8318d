"""`pagecast validate`: replay a recorded run and compare it with what really happened."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.bounds import MOST_REPLICATES
from pagecast.planner_app.commands.ignored_options import refuse_options
from pagecast.planner_app.reports.html_page import ready, write
from pagecast.planner_app.wording.accuracy import accuracy_sentences, as_json, blocks_sentence, expected_error
from pagecast.sim.core.engines.registry import profile as find_profile
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay.replicates import STEP_TIMES
from pagecast.sim.runs.bench_results import BenchResults, is_results, read_results
from pagecast.sim.runs.block_count import block_count
from pagecast.sim.runs.forecast import REPLICATES, Forecast, forecast, forecast_results
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import compare_decisions
from pagecast.sim.scenario import Scenario
from rich.table import Table

Opt = typer.Option
_WIDEST = 200  # more columns than a forecast's table has


def validate_command(
    run: Annotated[
        Path, typer.Argument(help="folder of a recorded run, or a benchmark's results with --scenario")
    ],
    costs: Annotated[
        str,
        Opt(
            help="recorded: the run's own step times; or a calibration's file or name, auto, measured, "
            "roofline"
        ),
    ] = "recorded",
    scenario: Annotated[
        Path | None,
        Opt(
            help="YAML file of the scenario that results of a benchmark were measured in; its costs are used"
        ),
    ] = None,
    profile: Annotated[
        str | None, Opt(help="engine whose rules are followed, with recorded costs [vllm]")
    ] = None,
    replicates: Annotated[
        int | None,
        Opt(min=0, max=MOST_REPLICATES, help=f"draws of the costs behind each 90% interval [{REPLICATES}]"),
    ] = None,
    transfer: Annotated[
        bool,
        Opt("--transfer-costs", "--transfer", help="allow a calibration of another model or GPU, scaled"),
    ] = False,
    host_time_factor: Annotated[
        float | None,
        Opt(
            min=0.01,
            help="with measured operations, host time of synchronous steps against the recorded host's",
        ),
    ] = None,
    client_ms: Annotated[
        float | None,
        Opt(
            min=0,
            help="with results of a benchmark, milliseconds that the client's TTFT and E2E hold beside the "
            "engine's [6.2, and 1.9 per 1,000 prompt tokens]",
        ),
    ] = None,
    max_error: Annotated[
        float | None, Opt(min=0, help="exit with 1 where any figure is off by more percent")
    ] = None,
    seed: Annotated[int | None, Opt(help="of the draws [0]")] = None,
    report: Annotated[Path | None, Opt(help="HTML file with charts to write")] = None,
    json: Annotated[bool, Opt("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Replays RUN and compares.

    With recorded costs: every step and every prefix hit, on the run's own clock; exit code 1 where a
    decision differs, and the first difference is explained. With any other: the run's requests are forecast
    and every latency and total is set beside the measured one, with 90% intervals.
    """
    if is_results(run):
        if scenario is None:
            raise BadInput(
                f"{run}: is a file, not the folder of a recorded run; if it holds the results of a "
                "benchmark, give the scenario that they were measured in: --scenario FILE.yaml"
            )
        refuse_options(
            {
                "profile": profile,
                "transfer-costs": transfer or None,
                "host-time-factor": host_time_factor,
            },
            "is for a recorded run: for results of a benchmark, write it into the file of --scenario",
        )
        refuse_options({"report": report}, "is for a recorded run: results of a benchmark have --json")
        fields = {} if costs == "recorded" else {"costs": costs}
        results = read_results(run, client_ms)
        _results(results, Scenario.load(scenario, **fields), replicates, seed or 0, max_error, json)
        return
    if scenario is not None:
        raise BadInput("--scenario is for results of a benchmark: a recorded run says what it is of")
    if client_ms is not None:
        raise BadInput("--client-ms is for results of a benchmark: a recorded run has the engine's latencies")
    if costs == "recorded":
        refuse_options(
            {
                "replicates": replicates,
                "transfer-costs": transfer or None,
                "host-time-factor": host_time_factor,
                "max-error": max_error,
                "seed": seed,
                "report": report,
            },
            "needs --costs auto or a calibration: recorded costs compare decisions, not times",
        )
        _decisions(RecordedRun.load(run), profile or "vllm", json)
        return
    if profile is not None:
        raise BadInput("--profile needs --costs recorded: a forecast follows the rules of the run's engine")
    if report is not None:
        ready("--report", report)
    count = REPLICATES if replicates is None else replicates
    with console.progress("replicates", count + len(STEP_TIMES)) as update:
        result = forecast(
            RecordedRun.load(run),
            costs,
            replicates=count,
            transfer=transfer,
            host_time_factor=host_time_factor,
            seed=seed or 0,
            progress=update,
        )
    if report is not None:
        from pagecast.planner_app.reports.validate_report import validate_report

        write(report, validate_report(result))
    if json:
        console.print_json(as_json(result))
    else:
        show(result)
    if max_error is not None and result.worst_percent > max_error:
        raise typer.Exit(1)


def _results(
    results: BenchResults,
    scenario: Scenario,
    replicates: int | None,
    seed: int,
    max_error: float | None,
    json: bool,
) -> None:
    """Forecast against the latencies of a benchmark's requests."""
    count = REPLICATES if replicates is None else replicates
    with console.progress("replicates", count + len(STEP_TIMES)) as update:
        outcome = forecast_results(results, scenario, replicates=count, seed=seed, progress=update)
    if json:
        console.print_json(outcome.rows_as_dict() | {"expected_error": expected_error(outcome)})
    else:
        show(outcome, totals=False)
    if max_error is not None and outcome.worst_percent > max_error:
        raise typer.Exit(1)


def _decisions(run: RecordedRun, profile: str, json: bool) -> None:
    comparison, blocks = compare_decisions(run, find_profile(profile)), block_count(run)
    if json:
        fields = {**asdict(comparison), "num_gpu_blocks": None if blocks is None else blocks.as_dict()}
        del fields["run"]
        console.print_json(fields)
    else:
        console.out.print(
            f"{comparison.run}: {comparison.steps_matched:,} of {comparison.steps_recorded:,} steps and "
            f"{comparison.cached_tokens_matched:,} of {comparison.requests:,} prefix hits are the engine's",
            soft_wrap=True,
        )
        if comparison.first_mismatch:
            console.out.print(f"first difference: {comparison.first_mismatch}", soft_wrap=True, markup=False)
        if blocks is not None:
            console.out.print(blocks_sentence(blocks), soft_wrap=True, markup=False, highlight=False)
    if not comparison.ok:
        raise typer.Exit(1)


def show(result: Forecast, *, totals: bool = True) -> None:
    """Prints forecast and measurement side by side, how often intervals held, and what matters most.

    `totals`: the figures are those of a recorded run, of which more is known than latencies.
    """
    console.out.print(
        f"{result.run}: forecast with costs {result.costs} against the recording", soft_wrap=True
    )
    table = Table(box=None, pad_edge=False)
    for title in ("", "forecast", "measured", "error", "low", "high", "±1%"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for row in result.rows:
        table.add_row(
            _title(row.name),
            _plain(row.predicted),
            _plain(row.measured),
            _percent(row.error_percent),
            _plain(row.low),
            _plain(row.high) + ("*" if row.covered is False else ""),
            _reach(row.range_percent),
        )
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
    return " ".join(f"{value:+.0f}" if abs(value) > 9.9 else f"{value:+.1f}" for value in span)


def _percent(value: float | None) -> str:
    if value is None:
        return ""
    return "-" if math.isnan(value) else f"{value:+.1f}%"
