"""The report of a tuning: what to set the knob to and why, then every figure against it. Needs plotly."""

from __future__ import annotations

from pagecast.planner_app.planner.space import shown
from pagecast.planner_app.planner.tune import Tuned
from pagecast.planner_app.planner.tune_view import TITLES, cannot_run, tables, text
from pagecast.planner_app.reports import sweep_charts as charts
from pagecast.planner_app.reports.page import Card, Section, Table, page

_CHARTS = (
    ("reused_prefix_tokens",), ("ttft_mean_s", "ttft_p99_s"), ("tpot_mean_s", "tpot_p95_s"),
    ("admissible_concurrency", "static_concurrency"), ("tail_waste_tokens",),
    ("table_entries", "lookup_blocks"), ("lookup_s",), ("evicted_blocks", "preemptions"),
)  # fmt: skip
_CARDS = ("reused_prefix_tokens", "ttft_mean_s", "tpot_mean_s", "tail_waste_share", "table_entries",
          "admissible_concurrency", "static_concurrency")  # fmt: skip


def tune_report(tuned: Tuned) -> str:
    """The page of a tuning."""
    ran = tuned.table[tuned.table["reason"] == ""]
    figures = [
        charts.against_knob(ran, tuned.knob, names, tuned.recommended)
        for names in _CHARTS
        if all(name in ran and ran[name].notna().any() for name in names)
    ]
    marked = frozenset(at for at, value in enumerate(ran[tuned.knob]) if value == tuned.recommended)
    shown_tables = [Table("", header, rows, "The recommended setting is marked.", marked)
                    for header, rows in tables(tuned)]  # fmt: skip
    sections = [Section("In figures", shown_tables), Section(f"Against {tuned.knob}", figures)]
    said = cannot_run(tuned)
    lead = tuned.reason[:1].upper() + tuned.reason[1:]
    notes = (*([f"{said[:1].upper()}{said[1:]}"] if said else []), *tuned.notes)
    return page(f"{tuned.knob} for {tuned.trace}", lead, _cards(tuned), sections, notes)


def _cards(tuned: Tuned) -> list[Card]:
    chosen = tuned.table[tuned.table[tuned.knob] == tuned.recommended]
    if not len(chosen):
        return []
    row = chosen.iloc[0]
    return [
        Card(f"Recommended {tuned.knob}", shown(tuned.recommended), tuned.slo or "no SLO was given"),
        *(Card(TITLES[name], text(name, row[name])) for name in _CARDS if name in row),
    ]
