"""Display of traces for the trace commands: a table of a trace's facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagecast.planner_app import console
from pagecast.planner_app.commands.screen import show_notes
from pagecast.traces.describe import describe
from pagecast.traces.schema import Trace
from rich.table import Table


def written(trace: Trace, out: Path, json: bool) -> None:
    """Says what was written where, and what to know about it."""
    if json:
        console.print_json({"requests": len(trace), "out": str(out), "notes": list(trace.notes)})
        return
    counted = console.counted(len(trace), "request")
    console.out.print(f"{counted} written to {out}", soft_wrap=True, markup=False)
    show_notes(trace.notes)


def describe_and_show(trace: Trace, json: bool) -> None:
    """Prints a trace's description: a table, or one JSON object."""
    facts = describe(trace)
    if json:
        console.print_json(facts)
    else:
        show(facts)


def show(facts: dict[str, Any]) -> None:
    """Prints a description as tables."""
    counted = console.counted(facts["requests"], "request")
    if facts["sessions"]:
        counted += f" in {console.counted(facts['sessions']['count'], 'session')}"
    console.out.print(f"{facts['name']}: {counted}", soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False)
    for title in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for title, key in (("input tokens", "input_tokens"), ("output tokens", "output_tokens")):
        table.add_row(
            title, *(f"{facts[key][column]:,.0f}" for column in ("mean", "p50", "p90", "p99", "max"))
        )
    if facts["sessions"]:
        turns = facts["sessions"]["turns"]
        table.add_row(
            "turns per session", *(f"{turns[column]:,.3g}" for column in ("mean", "p50", "p90", "p99", "max"))
        )
    if facts["gap_s"]:
        gaps = facts["gap_s"]
        table.add_row(
            "think time", *(console.seconds(gaps[column]) for column in ("mean", "p50", "p90", "p99", "max"))
        )
    console.out.print(table)
    console.out.print(_facts(facts))
    show_notes(facts["notes"])


def _facts(facts: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    if facts["requests_per_s"] is not None:
        rate = f"{facts['requests_per_s']:.3g} requests/s over {console.seconds(facts['duration_s'])}"
        if facts["follow_others"]:
            rate += f", if serving took no time ({facts['follow_others']:,} wait for another's end)"
        table.add_row("load", rate)
        table.add_row(
            "burstiness", f"cv {facts['interarrival_cv']:.3g} of the times between arrivals (Poisson: 1)"
        )
    sharing = facts["sharing"]
    if sharing is None:
        table.add_row("reuse", "unknown: the file tells lengths and no contents of prompts")
    else:
        table.add_row(
            "reuse",
            f"{sharing['shareable_fraction']:.1%} of prompt tokens, which an endless cache would find",
        )
        table.add_row("working set", f"{sharing['working_set_tokens']:,} tokens hold every prompt once")
    if facts["scopes"] > 1:
        table.add_row("scopes", f"{facts['scopes']:,} (model, adapter, salt) share nothing with each other")
    if len(facts["priorities"]) > 1:
        table.add_row("priorities", ", ".join(map(str, facts["priorities"])))
    if facts["may_cancel"]:
        table.add_row("cancellation", f"{facts['may_cancel']:,} of them may give up after a time")
    return table
