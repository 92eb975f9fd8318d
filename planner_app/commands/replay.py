"""`pagecast replay`: serve a trace on a simulated replica and read the forecast."""

from __future__ import annotations

from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.bounds import MOST_REPLICATES
from pagecast.planner_app.commands.fleet_options import FleetGiven, with_fleet
from pagecast.planner_app.commands.ignored_options import WITHOUT_DRAWS, refuse_options
from pagecast.planner_app.commands.replay_view import show
from pagecast.planner_app.commands.scenario_options import (
    ScenarioArguments,
    TraceArgument,
    load,
    with_scenario,
)
from pagecast.planner_app.reports.html_page import ready, write
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import Result, replay
from pagecast.sim.replay.replicates import Spread, Study, few_draws, summary_figures, with_intervals
from pagecast.sim.replay.resample import redrawn, resample
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from pagecast.traces.write import replacing

Opt = typer.Option


@with_fleet
@with_scenario
def replay_command(
    trace: TraceArgument,
    arguments: ScenarioArguments,
    fleet: FleetGiven,
    replicates: Annotated[
        int,
        Opt(
            min=0,
            max=MOST_REPLICATES,
            help="replays behind 90% intervals: costs, noise and workload drawn again [0: none]",
        ),
    ] = 0,
    fixed_workload: Annotated[
        bool, Opt("--fixed-workload", help="leave the workload's uncertainty out of the intervals")
    ] = False,
    out: Annotated[Path | None, Opt(help="folder for summary, requests, steps, events and scenario")] = None,
    kv_events: Annotated[
        bool, Opt("--kv-events", help="write kv_events.jsonl into --out as well, in vLLM's vocabulary")
    ] = False,
    report: Annotated[Path | None, Opt(help="HTML file with charts to write")] = None,
    perfetto: Annotated[
        Path | None, Opt(help="trace of the steps to write, for ui.perfetto.dev (.json or .json.gz)")
    ] = None,
    json: Annotated[bool, Opt("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Replays TRACE on one replica, or on several behind a router (--replicas), and prints TTFT, TPOT,
    throughput, prefix hits and KV pressure."""
    if kv_events and out is None:
        raise BadInput("--kv-events writes into the replay's folder: give --out FOLDER as well")
    if not replicates:
        refuse_options({"fixed-workload": fixed_workload or None}, WITHOUT_DRAWS)
    if report is not None:
        ready("--report", report)
    if perfetto is not None:
        from pagecast.planner_app.reports import perfetto as perfetto_trace

        perfetto_trace.ready("--perfetto", perfetto)
    work, scenario = load(trace, arguments)
    keep = report is not None or perfetto is not None
    study = Study(work, scenario, scenario.seed, None if fixed_workload else resample)
    result: Result
    if fleet.any:
        if kv_events:
            raise BadInput("--kv-events is for one replica; leave it out, or leave the fleet's options out")
        from pagecast.planner_app.commands.fleet_replay import fleet_study, replay_on_fleet

        settings = fleet.settings()
        result = replay_on_fleet(work, scenario, settings, keep_steps=perfetto is not None, out=out)
        study = fleet_study(study, settings)
    else:
        with console.progress("replaying", len(work)) as update:
            result = replay(work, scenario, keep_steps=keep, out=out, progress=update, kv_events=kv_events)
    summary = {**result.summary, "expected_error": sentence(result.summary["expected_error"])}
    result = replace(result, summary=summary, notes=(*_unused(work, scenario), *result.notes))
    if out is not None:
        _write_summary(out, summary)
    spread = None
    if replicates:
        with console.progress("replicates", replicates) as update:
            spread = study.spread(replicates, progress=update)
    varied = None
    if spread is not None:
        rates = (figures.get("token_hit_rate") for figures in (summary_figures(result), spread.middle))
        varied = None if fixed_workload else redrawn(work, scenario.seed, *rates)
        added = (note for note in (varied, few_draws(replicates)) if note)
        result = replace(result, notes=(*result.notes, *added))
    _draw(result, spread, report, perfetto)
    if json:
        variation = {"replicates": replicates, "workload": sentence(varied) if varied else "as it is"}
        body = (
            {**with_intervals(result.summary, spread), "intervals": variation} if spread else result.summary
        )
        console.print_json(body)
    else:
        show(result, out, spread)
        if fleet.any:
            from pagecast.planner_app.commands.fleet_replay import show_replicas

            show_replicas(result)
        for path in (report, perfetto):
            if path is not None:
                console.out.print(f"written to {path}", soft_wrap=True, markup=False)


def _write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Writes `summary.json` again, as it is printed: the replay's own has the note, not its sentence."""
    with replacing(folder / "summary.json") as place:
        place.write_text(dumps(summary, indent=1) + "\n", encoding="utf-8")


def _draw(result: Result, spread: Spread | None, report: Path | None, perfetto: Path | None) -> None:
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
        texts.append("every request has the same priority: --scheduling-policy priority serves as fcfs does")
    if "tenant" not in trace.requests:
        tenancy = scenario.tenancy
        by_tenant = {"--tenants": tenancy.shares, "--isolation tenant": tenancy.isolation == "tenant"}
        if options := [option for option, is_given in by_tenant.items() if is_given]:
            verb = "change" if len(options) > 1 else "changes"
            texts.append(f"the trace has no column `tenant`, so that {' and '.join(options)} {verb} nothing")
    return tuple(texts)
