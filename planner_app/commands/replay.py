"""`pagecast replay`: serve a trace on a simulated replica and read the forecast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.fleet_options import FleetOptions
from pagecast.planner_app.commands.ignored_options import refuse_options, refuse_without_draws
from pagecast.planner_app.commands.output import Reported
from pagecast.planner_app.commands.replay_view import show, show_answer, without_reuse_line
from pagecast.planner_app.commands.scenario_options import (
    GivenScenario,
    WorkArguments,
    load,
)
from pagecast.planner_app.options import Flag, Options
from pagecast.planner_app.planner.execution.executor import executor
from pagecast.planner_app.planner.execution.options import Drawn
from pagecast.planner_app.reports.html_page import ready, write
from pagecast.planner_app.wording.note_sentences import sentence, sentences
from pagecast.sim.core.errors import BadInput, Unfinished
from pagecast.sim.note import Caution
from pagecast.sim.replay import Kept, Result, replay
from pagecast.sim.replay.replicates import Spread, Study, few_draws, summary_figures, with_intervals
from pagecast.sim.replay.resample import redrawn, resample
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from pagecast.traces.shared_prefix import without_reuse
from pagecast.traces.write import replacing
from pydantic import BeforeValidator, Field


def _numbers(given: str | Iterable[int]) -> tuple[int, ...]:
    """The numbers of a text with commas."""
    if not isinstance(given, str):
        return tuple(given)
    try:
        return tuple(int(number) for number in given.split(",") if number.strip())
    except ValueError:
        raise BadInput(f"--sweep-concurrency is {given}: give whole numbers with commas: 1,2,4,8") from None


class ReplayOptions(Options):
    """What is written of a replay beside its summary and its report."""

    out: Path | None = Field(
        default=None, description="folder for summary, requests, steps, events and scenario"
    )
    kv_events: bool = Field(
        default=False, description="write kv_events.jsonl into --out as well, in vLLM's vocabulary"
    )
    sweep_concurrency: Annotated[tuple[int, ...], BeforeValidator(_numbers), Flag(kind=str)] = Field(
        default=(),
        description="replay at each of these concurrencies, and print throughput against latency: 1,2,4,8,16",
    )
    perfetto: Path | None = Field(
        default=None, description="trace of the steps to write, for ui.perfetto.dev (.json or .json.gz)"
    )


@with_options
def replay_command(
    arguments: WorkArguments,
    fleet: FleetOptions,
    drawn: Drawn,
    ask: ReplayOptions,
    output: Reported,
) -> None:
    """Replays TRACE on one replica, or on several behind a router (--replicas), and prints TTFT, TPOT,
    throughput, prefix hits and KV pressure."""
    if ask.sweep_concurrency:
        _sweep(arguments, fleet, drawn, ask, output)
        return
    if ask.kv_events and ask.out is None:
        raise BadInput("--kv-events writes into the replay's folder: give --out FOLDER as well")
    refuse_without_draws(drawn)
    if output.report is not None:
        ready("--report", output.report)
    if ask.perfetto is not None:
        from pagecast.planner_app.reports import perfetto as perfetto_trace

        perfetto_trace.ready("--perfetto", ask.perfetto)
    work, scenario = load(arguments)
    study = Study(work, scenario, scenario.seed, None if drawn.fixed_workload else resample)
    result: Result
    if fleet.any:
        if ask.kv_events:
            raise BadInput("--kv-events is for one replica; leave it out, or leave the fleet's options out")
        from pagecast.planner_app.commands.fleet_replay import fleet_study, replay_on_fleet

        settings = fleet.settings()
        kept = Kept(steps=ask.perfetto is not None, folder=ask.out)
        result = replay_on_fleet(work, scenario, settings, kept)
        study = fleet_study(study, settings)
    else:
        steps = output.report is not None or ask.perfetto is not None
        kept = Kept(steps=steps, folder=ask.out, kv_events=ask.kv_events)
        with console.progress("replaying", len(work)) as update:
            result = replay(work, scenario, kept=kept, progress=update)
    summary = {
        **result.summary,
        "expected_error": sentence(result.summary["expected_error"]),
    }
    result = replace(result, summary=summary, notes=(*_unused(work, scenario), *result.notes))
    if ask.out is not None:
        _write_summary(ask.out, summary)
    unshared = None
    if work.assumed_reuse is not None and not fleet.any:
        unshared = replay(without_reuse(work), scenario, kept=Kept(steps=False))
    spread, varied, interrupted = None, None, False
    try:
        if drawn.replicates:
            with executor() as run, console.progress("replicates", drawn.replicates) as update:
                try:
                    spread = study.spread(drawn.replicates, run=run.until_interrupt, progress=update)
                except Unfinished as stopped:
                    run.abandon()
                    spread, interrupted = stopped.answer, True
    except KeyboardInterrupt:  # the forecast itself is known
        interrupted = True
    if spread is not None:
        rates = (figures.get("token_hit_rate") for figures in (summary_figures(result), spread.middle))
        varied = None if drawn.fixed_workload else redrawn(work, scenario.seed, *rates)
        added = (note for note in (varied, few_draws(drawn.replicates)) if note)
        result = replace(result, notes=(*result.notes, *added))
    _draw(work, result, spread, output.report, ask.perfetto)
    if output.json_only:
        words = sentence(varied) if varied else "as it is"
        body = result.summary
        if spread is not None:
            variation = {"replicates": drawn.replicates, "workload": words}
            body = {**with_intervals(result.summary, spread), "intervals": variation}
        other = {} if unshared is None else {"without_reuse": unshared.summary}
        console.print_json({**body, **other, "notes": sentences(result.notes)})
    else:
        if output.explain:
            show(work, result, ask.out, spread)
            if unshared is not None:
                console.out.print(without_reuse_line(unshared), soft_wrap=True)
        else:
            show_answer(work, result, spread, unshared)
        if fleet.any and output.explain:
            from pagecast.planner_app.commands.fleet_replay import show_replicas

            show_replicas(result)
        for path in (None if output.explain else ask.out, output.report, ask.perfetto):
            if path is not None:
                console.out.print(f"written to {path}", soft_wrap=True, markup=False)
    if interrupted:
        some = spread is not None and spread.low
        left = "intervals are of the draws until then" if some else "there are no intervals"
        console.err.print(f"interrupted: {left}")
        raise typer.Exit(130)


def _sweep(
    arguments: GivenScenario, fleet: FleetOptions, drawn: Drawn, ask: ReplayOptions, output: Reported
) -> None:
    """Prints throughput against latency at several concurrencies."""
    from pagecast.planner_app.commands.curve_view import show_curve
    from pagecast.planner_app.planner.curve import curve

    reason = "is for one replay: leave it out, or --sweep-concurrency"
    refuse_options(drawn, reason)
    refuse_options({"out": ask.out, "perfetto": ask.perfetto, "kv-events": ask.kv_events or None}, reason)
    refuse_options({"concurrency": arguments.load.concurrency}, "is one of --sweep-concurrency: leave it out")
    if output.report is not None:
        ready("--report", output.report)

    served: list[Trace] = []

    def work(concurrency: int) -> tuple[Trace, Scenario]:
        sending = replace(arguments.load, concurrency=concurrency)
        trace, scenario = load(replace(arguments, load=sending))
        served[:] = [trace]
        return trace, scenario

    settings = fleet.settings() if fleet.any else None
    with console.progress("replaying", len(ask.sweep_concurrency)) as update:
        drawn_curve = curve(work, ask.sweep_concurrency, settings, update)
    if output.report is not None:
        from pagecast.planner_app.reports.curve_report import curve_report

        write(output.report, curve_report(drawn_curve))
    result = drawn_curve.result
    if output.json_only:
        points = [point.to_dict() for point in drawn_curve.points]
        notes = sentences(result.notes)
        console.print_json(
            {"trace": result.trace, "points": points, "notes": notes, "complete": drawn_curve.complete}
        )
        if not drawn_curve.complete:
            raise typer.Exit(130)
        return
    show_curve(served[0], drawn_curve, explain=output.explain)
    if output.report is not None:
        console.out.print(f"written to {output.report}", soft_wrap=True, markup=False)
    if not drawn_curve.complete:
        raise typer.Exit(130)


def _write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Writes `summary.json` again, as it is printed: the replay's own has the note, not its sentence."""
    with replacing(folder / "summary.json") as place:
        place.write_text(dumps(summary, indent=1) + "\n", encoding="utf-8")


def _draw(
    work: Trace, result: Result, spread: Spread | None, report: Path | None, perfetto: Path | None
) -> None:
    """Writes the pictures that were asked for."""
    if report is not None:
        from pagecast.planner_app.reports.replay_report import replay_report

        around = spread.around(summary_figures(result)) if spread else None
        write(report, replay_report(result, around))
    if perfetto is not None:
        from pagecast.planner_app.reports.perfetto import write_perfetto

        write_perfetto(result, perfetto)


def _unused(trace: Trace, scenario: Scenario) -> tuple[str, ...]:
    """Sentences on options that have no effect on this trace."""
    texts = []
    if scenario.scheduling_policy == "priority" and not np.ptp(trace.integers("priority")):
        texts.append(
            Caution("every request has the same priority: --scheduling-policy priority serves as fcfs does")
        )
    if "tenant" not in trace.requests:
        tenancy = scenario.tenancy
        by_tenant = {"--tenants": tenancy.shares, "--isolation tenant": tenancy.isolation == "tenant"}
        if options := [option for option, is_given in by_tenant.items() if is_given]:
            verb = "change" if len(options) > 1 else "changes"
            needless = f"{' and '.join(options)} {verb} nothing"
            texts.append(Caution(f"the trace has no column `tenant`, so that {needless}"))
    return tuple(texts)
