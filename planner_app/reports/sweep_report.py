"""The report of a sweep: the cheapest replica, what was traded for it, and what each knob does."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from pagecast.planner_app.planner.sweep.study import SweepResult
from pagecast.planner_app.planner.sweep.study_view import (
    answer,
    best_word,
    differ,
    effects,
    front,
    subject,
    text,
    title,
)
from pagecast.planner_app.planner.sweep.trial_costs import CostUse, notes, used, what_each_is
from pagecast.planner_app.reports import sweep_charts as charts
from pagecast.planner_app.reports.html_page import HtmlTable, Section, SummaryCard, page

MOST_ROWS = 300  # of the table of trials; the study's parquet file has them all


def sweep_report(result: SweepResult) -> str:
    """The page of a sweep."""
    table, knobs = result.table, result.knobs
    objectives = list(dict.fromkeys(result.question.objectives))
    best = result.cheapest
    best_number = None if best is None else int(best["number"])
    ran = table[table["reason"] == ""]
    costs = used(result)
    header, rows = front(result)
    highlights = frozenset(at for at, row in enumerate(rows) if row[0] == str(best_number))
    text = f"The {best_word(result)} is marked." if highlights else ""
    traded = [charts.trade_off(table, objectives[0], y, knobs, best_number) for y in objectives[1:]]
    lines = [
        charts.against_knob(ran, knob, [name], None if best is None else best[knob])
        for knob in knobs
        for name in objectives[:3]
    ]
    effects_table = HtmlTable(
        "", *effects(result), "Shares of a figure's variance that a knob explains alone."
    )
    sections = [
        Section("What is traded", [*traded, HtmlTable("Undominated trials", header, rows, text, highlights)]),
        Section("What each knob does", [charts.sensitivity(result.sensitivity), *lines, effects_table]),
        Section("All trials", [_trials(result, table.head(MOST_ROWS), best_number)]),
        Section("Scenario", [_scenario(result, costs)]),
    ]
    text = answer(result)
    lead = text[:1].upper() + text[1:]
    return page(
        f"Sweep of {result.question.trace.name}", lead, _cards(result), sections, _notes(result, costs)
    )


def _cards(result: SweepResult) -> list[SummaryCard]:
    best, table = result.cheapest, result.table
    counted = f"{int(table['meets'].sum()):,} of {len(table):,}"
    level = result.question.slo or "every request served"
    cards = [SummaryCard("Trials that serve well", counted, level)]
    if best is not None:
        names = dict.fromkeys((result.cost, *result.question.objectives, "usd_per_million_output_tokens"))
        figures = [name for name in names if name in best]
        cards += [
            SummaryCard(title(name), text(name, best[name]), f"of the {best_word(result)} {subject(result)}")
            for name in figures
        ]
    failed = int((table["reason"] != "").sum())
    return [*cards, SummaryCard("Can't run", f"{failed:,}", "trials")] if failed else cards


def _trials(result: SweepResult, rows: pd.DataFrame, best_number: int | None) -> HtmlTable:
    terms = [] if result.question.level is None else [term.text for term in result.question.level.terms]
    columns = [*result.knobs, "meets", result.cost, *result.question.objectives, *terms]
    names = list(dict.fromkeys([*columns, *(["step_costs"] if differ(result) else [])]))
    header = ["trial", *map(title, names), "can't run because"]
    body = [
        [str(row["number"]), *(text(str(name), row[name]) for name in names), str(row["reason"])]
        for row in rows.to_dict("records")
    ]
    highlights = frozenset(at for at, number in enumerate(rows["number"]) if number == best_number)
    count = len(result.table)
    caption = (
        f"All {count:,} trials."
        if count <= MOST_ROWS
        else (f"The first {MOST_ROWS} of {count:,} trials; trials.parquet in the study's folder has all.")
    )
    return HtmlTable("", header, body, caption, highlights)


def _scenario(result: SweepResult, costs: Sequence[CostUse]) -> HtmlTable:
    """The settings that all trials share, and the knobs."""
    knobs = {knob.name: knob for knob in result.question.space.knobs}
    rows = []
    for name, value in result.question.scenario.resolved().items():
        swept = str(knobs[name]).partition("=")[2] if name in knobs else ""
        rows.append((name, f"varied: {swept}" if swept else "-" if value is None else str(value)))
    rows.append(("step costs used", ", ".join(each.name for each in costs) or "-"))
    return HtmlTable("", ("field", "value"), rows)


def _notes(result: SweepResult, costs: list[CostUse]) -> list[str]:
    texts = [
        "Each trial is one replay of the same trace with the same seed (common random numbers), so that "
        "differences between trials are the scenarios' own.",
        what_each_is(result),
        *notes(result, costs),
    ]
    if not result.complete:
        texts.insert(0, "The sweep was stopped before its end: what follows is of the trials that ended.")
    return texts
