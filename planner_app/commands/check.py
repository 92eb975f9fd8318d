"""`pagecast check`: the gate for CI. Exit code 0: all holds; 1: something broke; 2: bad input."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import typer
from pagecast import __version__
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.output import Explained
from pagecast.planner_app.commands.reading import LoadOptions
from pagecast.planner_app.commands.scenario_options import (
    ABOUT_LAUNCH,
    ABOUT_LOG,
    GivenScenario,
    launched,
    logged,
    started,
    trace_of,
)
from pagecast.planner_app.commands.screen import room_below, show_block, table_rows
from pagecast.planner_app.options import Options
from pagecast.planner_app.planner.execution.executor import executor
from pagecast.planner_app.planner.execution.interface import Executor
from pagecast.planner_app.planner.execution.options import Many
from pagecast.planner_app.planner.gate import baseline as baselines
from pagecast.planner_app.planner.gate import judge
from pagecast.planner_app.planner.gate.baseline import Baseline
from pagecast.planner_app.planner.gate.check_file import CheckFile, load_check
from pagecast.planner_app.planner.gate.figures import bounded, check_names
from pagecast.planner_app.planner.gate.judge import Finding
from pagecast.planner_app.planner.served import RequestCounts
from pagecast.planner_app.reports.gate_files import write_junit, write_markdown
from pagecast.planner_app.wording.assumed import step_times
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.core.errors import BadInput
from pagecast.sim.note import Caution
from pagecast.sim.replay import Kept, Result, replay
from pagecast.sim.replay.notes import idle_note
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from pydantic import Field
from rich.table import Table

_MOST_ROWS = 6  # of checks, in the answer
_SHORT_S = 3.0  # of work, that is done here before other processes have started


class CheckOptions(Options):
    """What is compared, and where the findings are written."""

    scenario: Path = Field(description="YAML file of scenario fields, with a section `check`")
    launch: str | None = Field(default=None, description=ABOUT_LAUNCH)
    log: str | None = Field(default=None, description=ABOUT_LOG)
    baseline: Path | None = Field(
        default=None, description="folder of --write-baseline, or of replay --out, to compare with"
    )
    write_baseline: Path | None = Field(
        default=None, description="folder to write this scenario's figures to"
    )
    skip_regression: bool = Field(
        default=False, description="leave check.regression out: only the SLO and the limits are judged"
    )
    junit: Path | None = Field(default=None, description="JUnit XML file to write")
    markdown: Path | None = Field(default=None, description="Markdown file to write")


@with_options
def check_command(ask: CheckOptions, many: Many, output: Explained) -> None:
    """Replays a scenario and holds its figures to their bounds, and to a baseline's.

    Exit code 1 and a table of what broke where one does not hold. Differences from the baseline are paired:
    the same draws of costs and workload on both sides, and a regression is called where the 90% interval of
    the mean difference lies beyond what the scenario allows.
    """
    start = time.perf_counter()
    scenario, junit, markdown = ask.scenario, ask.junit, ask.markdown
    baseline, write_baseline = ask.baseline, ask.write_baseline
    if junit is not None:
        console.check_place("--junit", junit, ".xml")
    if markdown is not None:
        console.check_place("--markdown", markdown)
    began, start_notes = started(GivenScenario(scenario, launch=launched(ask.launch), log=logged(ask.log)))
    file = load_check(scenario, began.given if start_notes else None)
    if baseline is not None and not file.check.regression:
        raise BadInput(f"{scenario}: has no check.regression, so there is nothing to compare with a baseline")
    _check_regression(ask, file)
    given = {name: value for name, value in file.reading().items() if name in file.check.model_fields_set}
    trace = trace_of(file.trace_name(), file.scenario, LoadOptions(**given), file.load)
    before = baselines.load(baseline, trace, file) if baseline is not None else None
    result = replay(trace, file.scenario, kept=Kept(steps=False))
    figures = bounded(result)
    check_names(file, figures)
    findings = [*judge.levels(file, result), *judge.limits(file, figures)]
    facts = _facts(file, trace, result)
    counts = RequestCounts.of(result.requests)
    notes = [
        *start_notes,
        *filter(None, [counts.sentence]),
        *judge.unserved_in_limits(file, figures),
    ]
    if before is not None or write_baseline is None:
        notes.extend(_notes(file, before, facts["costs"]))
    notes.extend((*trace.notes, *filter(None, [idle_note(trace, file.scenario)]), facts["expected_error"]))
    interrupted = False
    if before is not None or write_baseline is not None:
        if many.workers is None and result.summary["wall_s"] * file.check.draws < _SHORT_S:
            many = many.model_copy(update={"workers": 1})
        try:
            with executor(many) as run:
                regressions, left_out = _compare(file, trace, result, before, write_baseline, run)
            findings += regressions
            notes = [*left_out, *notes]
        except KeyboardInterrupt:  # what one replay tells is known
            interrupted = True
            notes = [Caution("interrupted: regressions were not compared"), *notes]
    left = interrupted or (before is None and write_baseline is None)
    uncompared = len(file.check.regression) if left else 0
    if junit is not None:
        write_junit(junit, str(scenario), findings, time.perf_counter() - start, facts)
    if markdown is not None:
        write_markdown(markdown, str(scenario), findings, [_served(facts), *notes], uncompared)
    if output.json_only:
        ok = all(finding.holds for finding in findings)
        checks = [finding.as_dict() for finding in findings]
        console.print_json(
            {
                "ok": ok,
                **facts,
                "counts": counts.to_dict(),
                "checks": checks,
                "regressions_not_compared": uncompared,
                "notes": notes,
            }
        )
    else:
        if output.explain:
            show(str(scenario), findings, notes, facts, uncompared)
        else:
            about = step_times(file.scenario, file.scenario.step_costs())
            told = [note for note in notes if note != facts["expected_error"]]
            show_answer(str(scenario), findings, told, _served(facts, costs=False), about, uncompared)
        if write_baseline is not None and not interrupted:
            console.out.print(f"baseline written to {write_baseline}", soft_wrap=True)
    if interrupted:
        raise typer.Exit(130)
    if not all(finding.holds for finding in findings):
        raise typer.Exit(1)


def _check_regression(ask: CheckOptions, file: CheckFile) -> None:
    """Errors: BadInput where regressions are asked for and can't be judged: a gate never passes on less."""
    if ask.skip_regression and (ask.baseline or ask.write_baseline):
        raise BadInput("--skip-regression leaves out what --baseline and --write-baseline are for: drop it")
    if ask.baseline or ask.write_baseline or not file.check.regression:
        return
    only = not (file.check.slo or file.check.limits)
    if only or not ask.skip_regression:
        raise BadInput(
            f"{ask.scenario}: check.regression needs a baseline to compare with; give --baseline FOLDER, or "
            "make one with --write-baseline FOLDER"
            + ("" if only else "; --skip-regression judges the SLO and the limits alone")
        )


def _compare(
    file: CheckFile,
    trace: Trace,
    result: Result,
    before: Baseline | Scenario | None,
    into: Path | None,
    run: Executor,
) -> tuple[list[Finding], list[str]]:
    """Draws today's figures, and the baseline's where it is a scenario; keeps today's where asked to.

    Returns findings and notes on the comparison.
    """
    count = file.check.draws
    if isinstance(before, Baseline) and into is None:
        count = min(count, before.draws)
    with console.progress("draws", count) as update:
        after = baselines.draws(trace, file.scenario, count, run, update)
    if into is not None:
        baselines.write(baselines.make(trace, file, str(result.summary["costs"]), after), into)
    if before is None:
        return [], []
    if isinstance(before, Scenario):
        with console.progress("the baseline's", count) as update:
            old = baselines.draws(trace, before, count, run, update)
    else:
        old = before.figures
    return judge.regressions(file, old, after), judge.unserved_in_regressions(file, old, after)


def _facts(file: CheckFile, trace: Trace, result: Result) -> dict[str, Any]:
    """The trace, deployment and step costs of a check, by name."""
    scenario = file.scenario
    return {
        "trace": trace.name,
        "requests": len(trace),
        "model": scenario.model,
        "gpu": scenario.gpu,
        "tensor_parallel_size": scenario.tensor_parallel_size,
        "engine": scenario.engine,
        "costs": result.summary["costs"],
        "expected_error": sentence(result.summary["expected_error"]),
    }


def _served(facts: dict[str, Any], *, costs: bool = True) -> str:
    plural = "" if facts["requests"] == 1 else "s"
    return (
        f"{facts['trace']}: {facts['requests']:,} request{plural} on {facts['model']}, "
        f"{facts['tensor_parallel_size']} x {facts['gpu']}, {facts['engine']}"
        + (f", costs {facts['costs']}" if costs else "")
    )


def _notes(file: CheckFile, before: Baseline | Scenario | None, costs: str) -> Iterator[str]:
    """Notes on the comparison with a baseline."""
    if before is None:
        return
    if isinstance(before, Scenario):
        yield "the baseline is a replay's folder: its scenario was replayed anew by this version"
    yield (
        "rows of draws are means over replays with costs and workload drawn anew, as the baseline's; the SLO "
        "and limits are of one replay without draws"
    )
    if changes := baselines.changed(before, file.scenario, costs):
        yield Caution(f"changed since the baseline: {', '.join(changes)}")
    if isinstance(before, Baseline) and before.made_with != __version__:
        made, ours = before.made_with, __version__
        yield f"the baseline was made by pagecast {made}, this is {ours}: draws may not be paired"
    if isinstance(before, Baseline) and before.draws < file.check.draws:
        yield f"the baseline has {before.draws} draws, fewer than the {file.check.draws} asked for"


def show_answer(
    name: str, findings: Sequence[Finding], notes: Sequence[str], served: str, costs: str, uncompared: int
) -> None:
    """Prints the verdict, what was served, and the checks: those that failed first."""
    lines = [f"{name}: {judge.verdict(findings, uncompared)}", served]
    if findings:
        most = min(_MOST_ROWS, room_below(lines) - 2)
        lines += table_rows(_table(_in_order(findings)[:most]))
        if len(findings) > most:
            lines.append(f"and {len(findings) - most} more")
    show_block(lines, notes, more=[costs])


def _in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Those that failed, then those that are undecided, then the others."""
    return sorted(findings, key=lambda finding: (finding.holds, not finding.undecided))


def _table(findings: Sequence[Finding]) -> Table:
    """A row for each check."""
    table = Table(box=None, pad_edge=False)
    for title in ("", "figure", "replays", "value", "asked"):
        side: Literal["left", "right"] = "right" if title in ("value", "asked") else "left"
        table.add_column(title, justify=side, no_wrap=True)
    table.add_column("", overflow="fold")
    for finding in findings:
        mark = "ok" if finding.holds else "FAILED"
        mark = "undecided" if finding.undecided and finding.holds else mark
        table.add_row(mark, finding.name, finding.of, finding.value, finding.asked, finding.why)
    return table


def show(
    name: str, findings: Sequence[Finding], notes: Sequence[str], facts: dict[str, Any], uncompared: int = 0
) -> None:
    """Prints what was served, what was asked and found, what broke first."""
    console.out.print(_served(facts), soft_wrap=True)
    if findings:
        console.out.print(_table(_in_order(findings)))
    for note in notes:
        console.out.print(f"note: {note}", soft_wrap=True)
    console.out.print(f"{name}: {judge.verdict(findings, uncompared)}", soft_wrap=True)
