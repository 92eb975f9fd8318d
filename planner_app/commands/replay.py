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
from pagecast.planner_app.commands.scenario_options import Given, TraceArgument, load, with_scenario
from pagecast.planner_app.reports.html_page import ready, write
from pagecast.planner_app.wording.note_sentences import sentence
from pagecast.sim.replay import Result, replay
from pagecast.sim.replay.metrics import STATISTICS, telling
from pagecast.sim.replay.replicates import Spread, Study, few_draws, summary_figures, with_intervals
from pagecast.sim.replay.resample import redrawn, resample
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from pagecast.traces.write import replacing
from rich.table import Table

Opt = typer.Option


@with_scenario
def replay_command(
    trace: TraceArgument,
    given: Given,
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
    report: Annotated[Path | None, Opt(help="HTML file with charts to write")] = None,
    perfetto: Annotated[
        Path | None, Opt(help="trace of the steps to write, for ui.perfetto.dev (.json or .json.gz)")
    ] = None,
    json: Annotated[bool, Opt("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Replays TRACE on one replica and prints TTFT, TPOT, throughput, prefix hits and KV pressure."""
    if report is not None:
        ready("--report", report)
    if perfetto is not None:
        from pagecast.planner_app.reports import perfetto as perfetto_trace

        perfetto_trace.ready("--perfetto", perfetto)
    work, chosen = load(trace, given)
    keep = report is not None or perfetto is not None
    with console.progress("replaying", len(work)) as update:
        result = replay(work, chosen, keep_steps=keep, out=out, progress=update)
    summary = {**result.summary, "expected_error": sentence(result.summary["expected_error"])}
    result = replace(result, summary=summary, notes=(*_unused(work, chosen), *result.notes))
    if out is not None:
        _write_summary(out, summary)
    spread = None
    if replicates:
        study = Study(work, chosen, chosen.seed, None if fixed_workload else resample)
        with console.progress("replicates", replicates) as update:
            spread = study.spread(replicates, progress=update)
    varied = None
    if spread is not None:
        rates = (found.get("token_hit_rate") for found in (summary_figures(result), spread.middle))
        varied = None if fixed_workload else redrawn(work, chosen.seed, *rates)
        added = (note for note in (varied, few_draws(replicates)) if note)
        result = replace(result, notes=(*result.notes, *added))
    _draw(result, spread, report, perfetto)
    if json:
        drawn = {"replicates": replicates, "workload": sentence(varied) if varied else "as it is"}
        body = {**with_intervals(result.summary, spread), "intervals": drawn} if spread else result.summary
        console.print_json(body)
    else:
        show(result, out, spread)
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
    """What was asked for and has no effect on this trace."""
    if scenario.scheduling_policy != "priority" or np.ptp(trace.integers("priority")):
        return ()
    return ("every request has the same priority: --scheduling-policy priority serves as fcfs does",)


def show(result: Result, out: Path | None, spread: Spread | None = None) -> None:
    """Prints a result as tables, with its intervals, and what the figures mean and how far to trust them."""
    s, scenario = result.summary, result.scenario
    console.out.print(
        f"{result.trace}: {s['requests']:,} requests on {scenario.model}, {scenario.tensor_parallel_size} x "
        f"{scenario.gpu}, profile {scenario.profile}, costs {s['costs']}",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in STATISTICS:
        table.add_column(name, justify="right", no_wrap=True)
    for title, key in _rows(result):
        table.add_row(title, *(console.seconds(s[key][statistic]) for statistic in STATISTICS))
        for side, bounds in (("low", spread.low), ("high", spread.high)) if spread else ():
            values = (bounds.get(f"{key}.{statistic}") for statistic in STATISTICS)
            table.add_row(f"  {side}", *(console.seconds(value) for value in values), style="dim")
    console.out.print(table)
    console.out.print(_facts(s, scenario.tensor_parallel_size))
    for note in result.notes:
        console.out.print(f"note: {sentence(note)}", soft_wrap=True, markup=False)
    written = f"; written to {out}" if out else ""
    console.out.print(f"replayed in {s['wall_s']:.2f} s{written}", soft_wrap=True)


def _rows(result: Result) -> list[tuple[str, str]]:
    """Latencies, parts below their sum: queue, lookup and prefill make TTFT, and with decode E2E.

    TTFT with and without a prefix hit, at equal queues, where enough requests can be compared.
    """
    rows = [
        ("E2E", "e2e_s"),
        ("  TTFT", "ttft_s"),
        ("    queue", "queue_s"),
        ("    lookup", "prefix_lookup_s"),
        ("    prefill", "prefill_s"),
        ("  decode", "decode_s"),
        ("TPOT", "tpot_s"),
    ]
    sides = [("TTFT cached", "ttft_cached_s"), ("TTFT uncached", "ttft_uncached_s")]
    return rows + (sides if telling(result.requests) else [])


def _facts(s: dict[str, Any], gpus: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    ended = f"{s['completed']:,} completed"
    ended += "".join(f", {s[state]} {state}" for state in ("rejected", "cancelled") if s[state])
    rate = s["completed"] / s["makespan_s"] if s["makespan_s"] else 0.0
    table.add_row("requests", f"{ended} in {console.seconds(s['makespan_s'])} ({rate:.3g}/s)")
    if reasons := s.get("rejected_reasons"):
        reason, count = max(reasons.items(), key=lambda pair: pair[1])
        others = f", and {s['rejected'] - count:,} for other reasons" if s["rejected"] > count else ""
        table.add_row("rejected", f"{count:,}: {reason}{others}")
    table.add_row("output", f"{s['output_tokens_per_s']:,.0f} tokens/s, {s['output_tokens']:,} tokens")
    table.add_row(
        "prefix hits",
        f"{s['token_hit_rate']:.1%} of eligible prompt tokens reused, "
        f"{console.seconds(s['prefill_avoided_s'])} of prefill avoided",
    )
    table.add_row(
        "KV cache",
        f"{s['num_gpu_blocks']:,} blocks, {s['peak_kv_usage']:.1%} in use at peak, "
        f"{s['evicted_blocks']:,} evicted",
    )
    over = f", over all {gpus} GPUs" if gpus > 1 else ""
    table.add_row("sequence", f"{console.size(s['bytes_per_sequence'])} of KV at its end, in the mean{over}")
    table.add_row(
        "pressure", f"{s['preemptions']:,} preemptions, {s['failed_allocations']:,} failed allocations"
    )
    table.add_row("steps", f"{s['steps']:,}")
    return table
