"""The report of a tuning: what to set the knob to and why, then every figure against it. Needs plotly."""

from __future__ import annotations

import pandas as pd
from pagecast.planner_app.planner.sweep.space import shown
from pagecast.planner_app.planner.tune.knobs import TuneResult
from pagecast.planner_app.planner.tune.tables import TITLES, admits, cannot_run, cell, tables
from pagecast.planner_app.reports import sweep_charts as charts
from pagecast.planner_app.reports.html_page import HtmlTable, Section, SummaryCard, page
from pagecast.planner_app.reports.scenario_section import scenario_section

_CHARTS = (
    ("reused_prefix_tokens",),
    ("ttft_mean_s", "ttft_p99_s"),
    ("tpot_mean_s", "tpot_p95_s"),
    ("admissible_concurrency", "static_concurrency"),
    ("tail_waste_tokens",),
    ("table_entries", "lookup_blocks"),
    ("lookup_s",),
    ("evicted_blocks", "preemptions"),
)
_CARDS = (
    "reused_prefix_tokens",
    "ttft_mean_s",
    "tpot_mean_s",
    "tail_waste_share",
    "table_entries",
    "admissible_concurrency",
    "static_concurrency",
)


def tune_report(tuned: TuneResult) -> str:
    """The page of a tuning."""
    ran = tuned.table[tuned.table["reason"] == ""]
    figures = [
        charts.against_knob(ran, tuned.knob, names, tuned.recommended)
        for names in _drawn(ran)
        if all(name in ran and ran[name].notna().any() for name in names)
    ]
    chosen = tuned.table.assign(_chosen=tuned.is_chosen).loc[ran.index, "_chosen"]
    highlights = frozenset(at for at, is_chosen in enumerate(chosen) if is_chosen)
    shown_tables = [
        HtmlTable("", header, rows, "The recommended setting is marked.", highlights)
        for header, rows in tables(tuned)
    ]
    varied = f"{tuned.knob} is as in the tables, whatever stands here."
    sections = [
        Section("In figures", shown_tables),
        Section(f"Against {tuned.knob}", figures),
        scenario_section(tuned.scenario, tuned.costs, varied),
    ]
    scenario = tuned.scenario
    lead = (
        f"{_first_up(tuned.reason).removesuffix('.')}. Served on {scenario.tensor_parallel_size} x "
        f"{scenario.gpu} with {scenario.model}, as {scenario.profile.label} would; step costs: {tuned.costs}."
    )
    texts = [_first_up(line) for line in (admits(tuned), cannot_run(tuned)) if line]
    notes = (*texts, *tuned.notes, tuned.expected_error)
    return page(f"{tuned.knob} for {tuned.trace}", lead, _cards(tuned), sections, notes)


def _drawn(ran: pd.DataFrame) -> list[tuple[str, ...]]:
    """The charts' figures; where every setting admits all the users tried, how many is no finding."""
    if "admissible_at_limit" not in ran or not ran["admissible_at_limit"].eq(True).all():
        return list(_CHARTS)
    return [tuple(name for name in names if name != "admissible_concurrency") for names in _CHARTS]


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cards(tuned: TuneResult) -> list[SummaryCard]:
    best_row = tuned.table[tuned.is_chosen]
    if not len(best_row):
        return []
    row = best_row.iloc[0].to_dict()
    return [
        SummaryCard(f"Recommended {tuned.knob}", shown(tuned.recommended), tuned.slo or "no SLO was given"),
        *(SummaryCard(TITLES[name], cell(name, row)) for name in _CARDS if name in row),
    ]
