"""The report of a validation: how far a forecast was from a recorded run. Needs plotly."""

from __future__ import annotations

import math

from pagecast.planner_app.reports import validate_charts as charts
from pagecast.planner_app.reports.html_page import HtmlTable, Section, SummaryCard, page
from pagecast.planner_app.wording.accuracy import accuracy_sentences, expected_error
from pagecast.planner_app.wording.figures import shown, title
from pagecast.sim.runs.forecast import Forecast, ForecastRow
from pagecast.sim.runs.run_figures import LATENCIES


def validate_report(forecast: Forecast) -> str:
    """The page of a forecast beside its recorded run."""
    lead = f"Forecast with step costs {forecast.costs}, beside what was measured."
    if forecast.in_sample:
        lead += " The step costs were fitted to this run, so this checks the fit, not the forecast."
    sections = [
        Section("Errors", [charts.errors(forecast), _table(forecast.rows)]),
        Section("Latency", [charts.distribution(forecast, name) for name in LATENCIES]),
        Section("Load", [charts.load(forecast, key) for key in ("running", "waiting")]),
    ]
    notes = [*accuracy_sentences(forecast), expected_error(forecast)]
    return page(f"{forecast.run}: forecast and measurement", lead, _cards(forecast), sections, notes)


def _cards(forecast: Forecast) -> list[SummaryCard]:
    by_name = {row.name: row for row in forecast.rows}
    rows_of_card = {
        "ttft_s.p50": "TTFT p50",
        "ttft_s.p99": "TTFT p99",
        "tpot_s.p50": "TPOT p50",
        "e2e_s.p99": "E2E p99",
        "output_tokens_per_s": "Throughput",
    }
    cards = []
    for name, label in rows_of_card.items():
        row = by_name[name]
        if not math.isnan(row.error_percent):
            hint = f"{shown(name, row.predicted)} for {shown(name, row.measured)}"
            cards.append(SummaryCard(f"{label} error", f"{row.error_percent:+z.1f}%", hint))
    coverage = forecast.coverage()
    if coverage["figures"]:
        share = 100 * (coverage["covered"] or 0)
        width = coverage["median_half_width_percent"]
        hint = f"{coverage['inside']} of {coverage['figures']} measurements; median half-width {width:.1f}%"
        cards.append(SummaryCard("Inside their 90% interval", f"{share:.0f}%", hint))
    return cards


def _table(rows: tuple[ForecastRow, ...]) -> HtmlTable:
    header = ("", "forecast", "measured", "error", "90% interval", "per 1% of step time", "within ±1%")
    body = []
    for row in rows:
        bounds = ""
        if row.low is not None and row.high is not None:
            bounds = f"{shown(row.name, row.low)} to {shown(row.name, row.high)}"
        slope = "" if row.sensitivity is None else f"{row.sensitivity:+z.1f}%"
        reach = "" if row.range_percent is None else "{:+z.1f}% to {:+z.1f}%".format(*row.range_percent)
        error = "-" if math.isnan(row.error_percent) else f"{row.error_percent:+.2f}%"
        forecast_text, real = shown(row.name, row.predicted), shown(row.name, row.measured)
        body.append((title(row.name), forecast_text, real, error, bounds, slope, reach))
    highlights = frozenset(number for number, row in enumerate(rows) if row.covered is False)
    caption = (
        "Marked rows: the interval does not hold the measurement. Within ±1%: the least and the most that "
        "step times up to 1% shorter or longer change the forecast by."
    )
    return HtmlTable("", header, body, caption, highlights)
