"""Throughput against latency on the console: the answer on one screen, or all that it rests on."""

from __future__ import annotations

from pagecast.planner_app import console
from pagecast.planner_app.commands.screen import show_block, show_notes, table_rows
from pagecast.planner_app.planner.curve import HEADER, Curve
from pagecast.planner_app.planner.traffic import traffic
from pagecast.planner_app.wording.assumed import beside_step_times, rules, step_times
from pagecast.planner_app.wording.note_sentences import sentences
from pagecast.traces.schema import Trace
from rich.table import Table

_MOST_ROWS = 6  # of concurrencies, in the answer: more follow below it


def show_curve(work: Trace, curve: Curve, *, explain: bool) -> None:
    """Prints the most output, and a row for each concurrency. `explain`: all notes as well."""
    table = Table(box=None, pad_edge=False)
    for title in HEADER:
        table.add_column(title, justify="right", no_wrap=True)
    for point in curve.points:
        table.add_row(*point.row)
    rows, notes, scenario = table_rows(table), curve.result.notes, curve.result.scenario
    short = explain or len(curve.points) <= _MOST_ROWS
    cut = [] if curve.complete else ["interrupted: the other concurrencies were not replayed"]
    few = filter(None, [curve.short_of])
    lines = [traffic(work, paced=False), *cut, curve.answer, *few, curve.about, *(rows if short else [])]
    if explain:
        for line in (*lines, rules(scenario)):
            console.out.print(line, soft_wrap=True)
        show_notes(sentences(notes))
        return
    more = [step_times(scenario, scenario.step_costs()), rules(scenario)]
    show_block(lines, beside_step_times(notes), more=more)
    if not short:
        console.out.print()
        for line in rows:
            console.out.print(line, soft_wrap=True)
